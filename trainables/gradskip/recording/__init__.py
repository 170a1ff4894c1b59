"""Recording of each watched layer's signal over a run."""
