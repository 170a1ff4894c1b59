"""The training recipe: precision, memory and loading of a run, each a field of its configuration."""
