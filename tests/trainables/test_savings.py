"""The formulas of savings by hand, and that they stand nowhere else."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trainables.savings import share_saved


def test_by_hand() -> None:
    assert share_saved(25, 100) == 0.75
    assert share_saved(150, 100) == -0.5
    assert share_saved(0, 0) == 0.0
    of_frame = share_saved(pd.Series([25.0, 1.0]), pd.Series([100.0, np.nan]))
    assert of_frame.isna().tolist() == [False, True]
    assert of_frame[0] == 0.75
