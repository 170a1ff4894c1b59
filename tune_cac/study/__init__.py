"""A study's folder: options, lock, trial folders and result files."""
