"""Record how each watched layer's signal goes."""
