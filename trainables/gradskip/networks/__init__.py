"""Gradient-Skip on the networks of one model, such as a generator and a discriminator, each with its own settings."""
