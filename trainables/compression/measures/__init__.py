"""Size, multiply-adds and latency of a model."""
