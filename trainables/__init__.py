"""Everything that runs inside a trial: methods, workloads, the training loop and the Ray trainable.

Importing this package loads neither torch nor ray; the submodules that need them do.
"""
