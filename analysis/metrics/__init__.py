"""Numbers about trials: baseline, Pareto front, ranking, confidence, importance, accounting."""
