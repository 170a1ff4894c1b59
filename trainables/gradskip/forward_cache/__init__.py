"""Cache of a stopped prefix's outputs, computed once per sample."""
