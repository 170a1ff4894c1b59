"""Image classification with one's own data: the workload ``images``. Loads no torch until the workload is built.

From the files to a batch: `finding` says which files there are, `parquet` and `folder` read encoded images and labels
from them, `decoding` makes pixels, `store` keeps these as memory-mapped arrays, `opening` puts the four together,
`augmentation` makes training inputs, `prefetch` keeps ahead of the training, `workload` is what the loop sees.
"""
