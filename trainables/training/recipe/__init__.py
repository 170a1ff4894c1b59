"""The training recipe: precision, memory, loading and compilation of a run, each a field of its configuration."""
