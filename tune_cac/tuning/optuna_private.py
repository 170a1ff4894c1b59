"""The private names of Optuna and Ray that this package uses, each with a test that it still exists and means this.

Nothing else in `tune_cac` touches a private name of either (tests/tune_cac/test_private_names.py).
"""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial


def live_trial(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """Return the trial of a study that can still suggest, take attributes and be told.

    Optuna makes one in `Study.ask` alone; a trial that another process began, or that was added as running, has none.
    Uses `FrozenTrial._trial_id`.
    """
    return optuna.Trial(study, trial._trial_id)
