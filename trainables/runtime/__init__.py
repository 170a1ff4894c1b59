"""The process of a trial: random generators, isolation, memory, time, FLOPs of operations."""
