"""Training prefixes shared between trials: stages, their checkpoints, and leases for training them."""
