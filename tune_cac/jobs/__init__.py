"""Searches as jobs of a Ray cluster (Ray Jobs): what is shipped, submission, logs, and the way back of a study."""
