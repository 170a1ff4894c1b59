"""Compression of what is trained: schedules of pruning, regularization, quantization and distillation."""
