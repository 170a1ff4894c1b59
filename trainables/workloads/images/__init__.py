"""Image classification with the user's data: the workload ``images``. Loads torch only when the workload is built.

From the files to a batch: `detect` finds the kind of data, `parquet` and `folder` read encoded images and labels,
`decoding` makes pixels, `store` keeps these as memory-mapped arrays, `dataset` combines the four, `augmentation` makes
training inputs, `workload` is what the training loop uses.
"""
