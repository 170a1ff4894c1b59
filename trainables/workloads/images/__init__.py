"""Image classification with the user's data: the workload ``images``. Loads torch only when the workload is built.

From files to a batch: `source` finds and reads encoded images and labels, `store` decodes them and keeps the pixels as
memory-mapped arrays, `workload` makes training inputs and is what the training loop uses.
"""
