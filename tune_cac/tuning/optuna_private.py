"""Private names of Optuna and Ray that this package uses, each with a test of its existence and meaning.

Nothing else in `tune_cac` touches a private name of either (tests/tune_cac/test_private_names.py).
"""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial


def live_trial(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """Return a running trial of a study as an object that can suggest values and take attributes and results.

    Optuna makes one only in `Study.ask`; a trial that another process began, or that was added as running, has none.
    Uses `FrozenTrial._trial_id`.
    """
    return optuna.Trial(study, trial._trial_id)
