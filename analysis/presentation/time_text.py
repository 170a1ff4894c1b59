"""Training time beside saved FLOPs, where the two say different things. Pure: a row in, text out."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import percent
from analysis.io.checked import number_of
from analysis.metrics.saving import saved_of_one, saving_of
from trainables.savings import TRAINING

#: Difference of the shares saved in FLOPs and in time above which both are given.
TOLD_FROM = 0.1


def time_beside(row: pd.Series) -> str:
    """Return a sentence on a trial's training time if it says another thing than its FLOPs; empty otherwise.

    It does if the two shares saved differ by more than `TOLD_FROM` or in sign. Empty, too, for a study that ranks by
    other compute than that of training, and where a time is not known.

    Args:
        row: a row of `analysis.rank`.

    >>> time_beside(pd.Series({"compute_saved": 0.26, "time_saved": -0.27}))
    'Its training took 27.0 % longer than that of the baseline (one measurement, beside other trials).'
    >>> time_beside(pd.Series({"compute_saved": 0.4, "time_saved": 0.12}))
    'Its training took 12.0 % less time than that of the baseline (one measurement, beside other trials).'
    >>> time_beside(pd.Series({"compute_saved": 0.26, "time_saved": 0.2}))
    ''
    """
    saved, time = saved_of_one(row), number_of(row, "time_saved")
    if saving_of(row) != TRAINING or not (abs(saved - time) > TOLD_FROM or saved * time < 0):
        return ""
    took = f"{percent(time)} less time than" if time >= 0 else f"{percent(-time)} longer than"
    if percent(abs(time)) == percent(0):
        took = "as long as"
    return f"Its training took {took} that of the baseline (one measurement, beside other trials)."
