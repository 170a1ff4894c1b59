"""Gradient-Skip beside other parts of torch."""
