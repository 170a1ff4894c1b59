"""A user's training script as a child process: started, guarded, its printed reports read."""
