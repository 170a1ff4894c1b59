"""A short dry run of training, and a check that training repeats bit for bit."""
