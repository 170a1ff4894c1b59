"""Integrations of Gradient-Skip with other parts of torch."""
