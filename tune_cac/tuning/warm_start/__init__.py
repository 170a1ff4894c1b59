"""Warm start: what a search learns from its baseline before it suggests more trials."""
