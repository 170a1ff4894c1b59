"""The training loop, its cost, and the process state around it."""
