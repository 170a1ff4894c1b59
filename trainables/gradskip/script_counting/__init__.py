"""What the steps of a user's own script cost, counted from inside its optimizers."""
