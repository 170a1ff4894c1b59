"""The forward pass of a stopped prefix, computed once a sample."""
