"""Settings that a study has are not trained again, where a sampler draws them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from searchers import row, searcher, told

from search_spaces import Space
from tune_cac.tuning.study_searcher import FINISHED, StudySearch

#: Six settings, of which replay knows nothing.
VALUES: dict[str, list[Any]] = {"zero_threshold": [0.01, 0.1, 0.2], "zero_unbiased": [False, True]}
START = {"zero_threshold": 0.01, "zero_unbiased": False}


def few(trial: Any, context: Any) -> dict[str, Any]:
    return {"method": "zero_gradients", **{name: trial.suggest_categorical(name, of) for name, of in VALUES.items()}}


SPACE = Space(name="few", method="zero_gradients", suggest=few, start=lambda context: START)


def trained(made: StudySearch, failing: Collection[int] = ()) -> list[str]:
    """Train until the search ends by itself; return the configurations in their order."""
    found: list[str] = []
    while (suggested := made.suggest(number := str(len(found)))) != FINISHED:
        if suggested is None:  # Ray asks again
            continue
        assert isinstance(suggested, dict)
        found.append(json.dumps(suggested["config"], sort_keys=True))
        if int(number) in failing:
            made.tell_failure(number, "no memory")
        else:
            made.on_trial_complete(number, row(0.9, 0.1))
        assert len(found) < 40
    return found


@pytest.mark.parametrize("seed", range(3))
def test_each_of_a_few_settings_is_trained_once_and_the_search_ends(seed: int, tmp_path: Path) -> None:
    made = searcher(tmp_path, seed=seed, own=SPACE)
    made.plan(30)
    found = trained(made)
    assert (len(found), made.gave_up) == (6, "")
    assert len(set(found)) == 6
    assert made.nothing_left
    assert made.candidates.why_ended() == "ended after 7 trials: 50 settings drawn in a row had been trained before"
    assert len(told(tmp_path)) == 7  # with the baseline: nothing is padded into the study


def test_what_runs_is_not_begun_again_and_what_failed_is(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.plan(30)
    running = [made.suggest(str(number)) for number in range(6)]
    assert len({json.dumps(one["config"], sort_keys=True) for one in running if isinstance(one, dict)}) == 6
    assert made.suggest("more") is None  # one of them may fail
    (tmp_path / "again").mkdir()
    again = searcher(tmp_path / "again", own=SPACE)
    again.plan(30)
    found = trained(again, failing=range(3))
    assert len(set(found)) == 6
    assert len(found) == 9
