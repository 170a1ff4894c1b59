"""A short dry run of a training, and a check that it repeats bit for bit."""
