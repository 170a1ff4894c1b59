"""The rule of early ends, on curves by hand."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from trainables.quality import ACCURACY, Quality
from tune_cac.tuning.early_ending import Curve, lead_over, noise

#: Percent after four epochs; differences of two of them change by a point or so from the second epoch to the end.
FINISHED = {1: (50, 60, 70, 80), 2: (52, 61, 70, 81), 3: (49, 60, 71, 79), 4: (55, 65, 75, 85)}


def curve(trial: int, percents: Any, *, sign: int = 1, **more: Any) -> Curve:
    qualities = {epoch: sign * percent / 100 for epoch, percent in enumerate(percents, start=1)}
    return Curve(**{"trial": trial, "epochs": 4, "saved": 0.5, "quality": qualities, **more})


def finished(sign: int = 1, **of_the_best: Any) -> list[Curve]:
    return [curve(t, percents, sign=sign, **(of_the_best if t == 4 else {})) for t, percents in FINISHED.items()]


@pytest.mark.parametrize("epoch", [1, 2, 3, 4])
def test_the_noise_is_what_differences_of_pairs_change_to_the_end(epoch: int) -> None:
    """Against the mean over all pairs; curves that are equal count once, and those that lack the epoch not at all."""
    pairs = np.array(list(combinations(FINISHED.values(), 2))) / 100
    differences = pairs[:, 0] - pairs[:, 1]
    changes = differences[:, 3:] - differences[:, epoch - 1 :]
    wanted = math.sqrt(np.square(changes).mean(axis=0).max())
    assert noise(finished(), epoch) == pytest.approx(wanted, abs=1e-12)
    late = Curve(trial=6, epochs=4, saved=0.0, quality={epoch - 1: 0.3, 4: 0.1})  # begun again, or undefined between
    more = [*finished(), curve(5, FINISHED[1]), *([] if epoch == 4 else [late])]
    assert noise(more, epoch) == pytest.approx(wanted, abs=1e-12)
    assert noise([one for one in more if one.trial != 1], epoch) == pytest.approx(wanted, abs=1e-12)  # 5 is equal to it
    assert noise(finished()[1:], epoch) == math.inf


def test_a_run_ends_when_another_one_is_ahead_by_more_than_the_noise_twice_in_a_row() -> None:
    for worse in (1, 0.5):  # points below trial 3, and five more below trial 4
        slow = [value - 6 * worse for value in FINISHED[4]]
        lead = lead_over(curve(9, slow[:2], saved=0.4), finished(), ACCURACY)
        twice = [2 * 100 * noise(finished(), epoch) for epoch in (1, 2)]
        assert (lead is not None) == all(6 * worse > least for least in twice)
    found = lead_over(curve(9, (40, 45)), finished(), ACCURACY)
    assert found is not None
    assert (found.trial, found.epoch, found.amount) == (4, 2, pytest.approx(0.2))
    assert found.noise == noise(finished(), 2)
    assert found.expected == pytest.approx(0.85 - 0.2)
    assert lead_over(curve(9, (40,)), finished(), ACCURACY) is None  # one row
    assert lead_over(curve(9, (55, 45)), finished(), ACCURACY) is None  # ahead in the last row alone
    assert lead_over(curve(9, (70, 75)), finished(), ACCURACY) is None  # the one that runs is ahead
    assert lead_over(curve(9, ()), finished(), ACCURACY) is None


def test_of_a_metric_that_is_minimised_the_smaller_is_ahead() -> None:
    cost = Quality(name="cost", direction="min", unit="")
    found, mirror = (
        lead_over(curve(9, (40, 45), sign=sign), finished(sign), quality)
        for sign, quality in ((-1, cost), (1, ACCURACY))
    )
    assert found is not None
    assert mirror is not None
    assert (found.trial, found.amount, found.noise, found.expected) == pytest.approx(
        (mirror.trial, mirror.amount, mirror.noise, -mirror.expected)
    )
    assert lead_over(curve(9, (40, 45)), finished(), cost) is None  # a small cost is good


def test_only_what_may_answer_saves_as_much_and_is_as_long_is_compared() -> None:
    slow = curve(9, (54, 59), saved=0.6)  # behind trial 4 alone by more than the noise

    def ends(**of_the_best: Any) -> bool:
        return lead_over(slow, finished(**of_the_best), ACCURACY) is not None

    wide = {"quality": {1: 0.75, 2: 0.85, 3: 0.9, 4: 1.0}}
    assert ends(saved=0.6, **wide)
    assert ends(saved=0.9, **wide)
    assert not ends(saved=0.59, **wide)
    assert not ends(saved=0.9, may_answer=False, **wide)
    assert not ends(saved=0.9, epochs=3, **wide)  # three runs of this length are left, too few
    assert not ends(saved=0.9, quality={1: 0.75, 4: 1.0})  # its second epoch is not known
    assert lead_over(slow, [one for one in finished(saved=0.9, **wide) if one.trial != 1], ACCURACY) is None
