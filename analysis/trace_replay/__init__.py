"""Replay of settings on recorded training, one by one or in batches."""
