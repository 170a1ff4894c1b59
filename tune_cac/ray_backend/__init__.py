"""Ray for a search: session, multi-worker trials, TensorBoard rows, other loggers."""
