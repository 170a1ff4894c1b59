"""A study being searched: Optuna's side, what the baseline teaches, controls and confirmation."""
