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
        assert len(found) < 120
    return found


@pytest.mark.parametrize("seed", range(3))
def test_each_of_a_few_settings_is_trained_once_and_the_search_ends(seed: int, tmp_path: Path) -> None:
    made = searcher(tmp_path, seed=seed, own=SPACE)
    made.ask_for(30)
    found = trained(made)
    assert (len(found), made.gave_up) == (6, "")
    assert len(set(found)) == 6
    assert made.nothing_left
    assert made.candidates.why_ended() == (
        "ended after 7 trials: of 525 settings drawn in a row none was left to train"
    )
    assert len(told(tmp_path)) == 7  # with the baseline: nothing is padded into the study


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hundred_settings_are_all_found(tmp_path: Path) -> None:
    def suggest(trial: Any, context: Any) -> dict[str, Any]:
        return {"method": "svrg", "svrg_alpha": trial.suggest_int("tenth", 1, 100) / 100}

    own = Space(name="many", method="svrg", suggest=suggest, start=lambda context: {"tenth": 1})
    made = searcher(tmp_path, own=own)
    made.ask_for(300)
    assert 98 <= len(set(found := trained(made))) == len(found) <= 100


def test_the_search_goes_on_while_one_runs_that_may_begin_again(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.ask_for(30)
    running = [made.suggest(str(number)) for number in range(6)]
    assert len({json.dumps(one["config"], sort_keys=True) for one in running if isinstance(one, dict)}) == 6
    assert made.suggest("6") is None
    assert not made.nothing_left
    for number in "01234":
        made.on_trial_complete(number, row(0.9, 0.1))
    assert made.suggest("6") is None
    assert made.tell_failure("5", "its worker died", died=True)
    again = made.suggest("6")
    assert isinstance(again, dict)
    assert isinstance(running[5], dict)
    assert again["config"] == running[5]["config"]
    made.on_trial_complete("6", row(0.9, 0.1))
    assert trained(made) == []
    assert made.nothing_left


def test_what_cannot_be_is_drawn_once(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.ask_for(30)
    made.baselines.why_useless = lambda config: "no" if config["zero_unbiased"] else ""  # type: ignore[method-assign]
    assert len(trained(made)) == 3
    assert made.gave_up == ""  # what could be was trained
    assert made.nothing_left
    assert [trial.state.name for trial in told(tmp_path)].count("PRUNED") == 3
