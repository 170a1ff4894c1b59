"""The search of a study: Optuna, warm start from the baseline, controls and confirmation."""
