"""Training prefixes shared between trials: stages, their checkpoints, and who trains which."""
