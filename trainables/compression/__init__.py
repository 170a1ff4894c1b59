"""Model compression during training: schedules of pruning, regularization, quantization and distillation."""
