"""Plots as PNG for papers, drawn with matplotlib's objects and no global state."""
