"""Compression as a method of a trial, alone and together with Gradient-Skip."""
