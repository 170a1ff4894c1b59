"""The private names of Optuna and Ray that this project relies on, each with a canary test.

Code that uses a private name is here; facts about private formats are at their place of use and are listed here:

| private name | used in | for |
|---|---|---|
| ``optuna.trial.FrozenTrial._trial_id`` | `live_trial` | trials that another process began |
| the system attribute ``fixed_params`` of a queued trial | `queued_parameters` | to queue it again |
| ``optuna.storages.journal._storage.JournalOperation`` | `analysis.io.journal` | reading a journal without Optuna |
| ``optuna.storages.journal._file.LOCK_FILE_SUFFIX`` | `tune_cac.study.folder` | removing a dead process's lock |
| ``ray._private.ray_constants.ENABLE_RAY_CLUSTER`` | `tune_cac.ray_backend.session` | services on loopback alone |
| ``ray.tune.logger.TBXLoggerCallback._trial_writer``, ``_trial_result`` | `tune_cac.ray_backend.tensorboard` | rows |

tests/tune_cac/test_private_names.py fails if one of them changes, or if another one is used.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.trial import FrozenTrial


def live_trial(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """Return a running trial of a study as an object that can suggest values and take attributes and results.

    Optuna makes one only in `Study.ask`; a trial that another process began, or that was added as running, has none.
    """
    return optuna.Trial(study, trial._trial_id)


def queued_parameters(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, or those it was queued with if it was never suggested."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))
