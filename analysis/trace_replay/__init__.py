"""Replay of settings on recorded training: step by step, and many at once."""
