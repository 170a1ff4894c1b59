"""Count the cost of the steps of a user's own script, from inside its optimizers."""
