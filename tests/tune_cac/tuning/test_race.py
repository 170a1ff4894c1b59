"""Seeds for the answer: which runs follow the search, and what they decide. Trainings are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from searchers import row, searcher, told

import analysis
from analysis.io.journal import JournalTrial
from analysis.io.studies import records_of, to_frame
from tune_cac.tuning.searcher import FINISHED, StudySearch

pytestmark = pytest.mark.slow
Losses = Callable[[int, int], float]


def play(
    search: StudySearch,
    losses: Losses,
    *,
    settings: int,
    controls: bool = False,
    most: int = 99,
    less: dict[int, float] | None = None,
    failing: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Train what a search suggests: settings save .5, .4, ... and lose what number (-1: a control) and seed say.

    They save ``less`` on further seeds, by their number. The run of the ``failing`` number and seed raises.
    """
    search.ask_for(settings, controls=controls, seeds=True)
    sent = []
    while len(sent) < most and isinstance(one := search.suggest("a"), dict):
        attrs, seed = told(search.plan.journal.parent)[one["trial"]].user_attrs, one["config"]["seed"]
        number = attrs.get("candidate", one["trial"])
        setting = -1 if attrs.get("control") == "shorter on other seed" else number
        saved = 0.6 - 0.1 * number - (less or {}).get(number, 0.0) * (seed > 0) if number else 0.0
        sent.append(attrs | {"seed": seed, "epochs": one["config"]["epochs"]})
        if (setting, seed) == failing:
            search.tell_failure("a", "boom")
            continue
        # A thousandth on the own seed tells on how many samples accuracies are.
        quality = 0.9 + seed % 7 / 1000 - (losses(setting, seed) + 0.001 * (seed == 0) if number else 0.0)
        executed = round(1000 * (1 - saved))
        flops = {"dense_flops": 1000, "executed_flops": executed, "search_flops": executed}
        search.on_trial_complete("a", row(quality, saved) | flops | {"test_quality": None})
    assert one == FINISHED or len(sent) == most
    return sent


def on_seeds(sent: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Number of the setting and seed of the runs on further seeds, in their order."""
    return [(one["candidate"], one["seed"]) for one in sent if one.get("control") == "other seed"]


def answer_written(folder: Path) -> pd.Series | None:
    """The answer of what the journal has, as reports and files give it."""
    trials = [JournalTrial(number=t.number, state=t.state.name, user_attrs=dict(t.user_attrs)) for t in told(folder)]
    return analysis.best(analysis.rank(to_frame(records_of(trials)), allowed_drop=0.01))


def a_search(folder: Path, **more: Any) -> StudySearch:
    return searcher(folder, sampler="random", **{"seeds": 4, "baseline": False, **more})


def test_what_saves_most_is_trained_beside_the_baseline_until_it_is_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = a_search(tmp_path)
    runs = on_seeds(play(search, lambda number, seed: 0.0, settings=4))
    assert runs == [(0, 1001), (1, 1001), (0, 1002), (1, 1002), (0, 1003), (1, 1003)]
    best = search.best()
    assert best is not None
    assert best.trial == 1
    assert (
        "trial 1 saves 50.0 %: it and the baseline on up to 3 further seeds, at most 4.5 full"
        in capsys.readouterr().err
    )


def test_where_the_mean_loses_too_much_the_next_one_follows_on_the_same_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trial 1 loses 30 points from its first further seed on; 1 is allowed."""
    search = a_search(tmp_path)
    runs = on_seeds(play(search, lambda number, seed: 0.3 * (number == 1 and seed > 0), settings=4))
    assert runs == [(0, 1001), (1, 1001), (2, 1001), (0, 1002), (2, 1002), (0, 1003), (2, 1003)]
    best = search.best()
    assert best is not None
    assert best.trial == 2
    cost = 3 * (1 - best.saved) + 2  # the baseline has one of the three seeds
    assert (
        f"at most {cost:.1f} full trainings (1 of at most 12 settings were refused so far)" in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_four_refused_settings_do_not_end_the_search_without_an_answer(tmp_path: Path) -> None:
    search = a_search(tmp_path)
    runs = on_seeds(play(search, lambda number, seed: 0.3 * (number < 5 and seed > 0), settings=6))
    assert [seed for number, seed in runs if number == 5] == [1001, 1002, 1003]


def test_what_loses_too_much_on_the_own_seed_is_not_trained_on_others(tmp_path: Path) -> None:
    assert on_seeds(play(a_search(tmp_path), lambda number, seed: 0.1, settings=4)) == []


def test_one_seed_is_the_studys_own(tmp_path: Path) -> None:
    assert on_seeds(play(a_search(tmp_path, seeds=1), lambda number, seed: 0.0, settings=4)) == []


def test_a_resumed_search_trains_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = play(a_search(tmp_path, seeds=2), lambda number, seed: 0.0, settings=3)
    assert on_seeds(first) == [(0, 1001), (1, 1001)]
    again = play(a_search(tmp_path, begin=False, seeds=3), lambda number, seed: 0.0, settings=0)
    assert on_seeds(again) == [(0, 1002), (1, 1002)]
    said = "trial 1 saves 50.0 %: it and the baseline on up to 1 further seed, at most 1.5 full trainings"
    assert capsys.readouterr().err.count(said) == 2


@pytest.mark.thorough
def test_a_seed_on_which_the_baseline_fails_judges_no_setting(tmp_path: Path) -> None:
    """Trial 1 loses hardly more than is allowed, which takes all seeds to tell; trial 2 nothing."""
    search = a_search(tmp_path)
    sent = play(search, lambda number, seed: 0.011 * (number == 1 and seed > 0), settings=4, failing=(0, 1002))
    assert on_seeds(sent) == [(0, 1001), (1, 1001), (0, 1002), (0, 1003), (1, 1003), (2, 1001), (2, 1003)]
    written = answer_written(tmp_path)
    assert written is not None
    assert (search.best().trial, written["trial"], written["seeds"]) == (2, 2, 2)


def test_where_time_is_up_after_a_refusal_the_answer_is_of_one_seed(tmp_path: Path) -> None:
    search = a_search(tmp_path)
    play(search, lambda number, seed: 0.3 * (number == 1 and seed > 0), settings=4, most=6)
    written = answer_written(tmp_path)
    assert written is not None
    assert (search.best().trial, written["trial"], pd.isna(written["seeds"])) == (2, 2, True)


@pytest.mark.thorough
def test_a_search_whose_time_is_up_in_between_has_an_answer_and_goes_on(tmp_path: Path) -> None:
    search = a_search(tmp_path)
    assert on_seeds(play(search, lambda number, seed: 0.0, settings=4, most=6)) == [(0, 1001), (1, 1001)]
    best = search.best()
    assert best is not None
    assert best.trial == 1
    again = play(a_search(tmp_path, begin=False), lambda number, seed: 0.0, settings=0)
    assert on_seeds(again) == [(0, 1002), (1, 1002), (0, 1003), (1, 1003)]


def test_the_dense_run_cut_to_the_same_compute_is_trained_on_the_same_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = a_search(tmp_path)
    sent = play(search, lambda number, seed: 0.5 * (number < 0), settings=3, controls=True, less={1: 0.1})
    cut = [one for one in sent if one.get("control") == "shorter on other seed"]
    assert [(one["candidate"], one["seed"]) for one in cut] == [(1, 1001), (1, 1002), (1, 1003)]
    assert {one["epochs"] for one in cut} == {round(0.6 * search.plan.base.epochs)}  # what is saved on these seeds
    assert "it, the baseline and a dense run of its compute on up to 3 further seeds, at most 6.0 full trainings" in (
        capsys.readouterr().err
    )
    written = answer_written(tmp_path)
    assert written is not None
    assert (written["saved"], written["saved_mean"]) == (0.5, pytest.approx(0.4))
    assert search.race.beyond() == []  # what a control loses refuses no setting


@pytest.mark.thorough
def test_a_rule_that_stops_on_the_own_seed_alone_is_refused(tmp_path: Path) -> None:
    search = a_search(tmp_path)
    sent = play(search, lambda number, seed: 0.0, settings=3, controls=True, less={1: 0.7})
    assert [run for run in on_seeds(sent) if run[0]] == [
        (1, 1001),
        (1, 1002),
        (1, 1003),
        (2, 1001),
        (2, 1002),
        (2, 1003),
    ]
    written = answer_written(tmp_path)
    assert written is not None
    assert (search.best().trial, written["trial"]) == (2, 2)


@pytest.mark.thorough
def test_no_control_is_trained_beside_a_setting_that_is_not_decided(tmp_path: Path) -> None:
    search = a_search(tmp_path)
    play(search, lambda number, seed: 0.0, settings=3, most=8)
    search.ask_for(0, controls=True, seeds=True)
    last = search.suggest("a")
    assert isinstance(last, dict)
    assert (told(tmp_path)[last["trial"]].user_attrs["candidate"], last["config"]["seed"]) == (1, 1003)
    kinds = []
    while isinstance(control := search.suggest("b"), dict):
        kinds.append(told(tmp_path)[control["trial"]].user_attrs["control"])
        search.on_trial_complete("b", row(0.9, 0.1) | {"test_quality": None})
    assert set(kinds) == {"shorter"}
    assert control is None
    search.on_trial_complete("a", row(0.9, 0.5) | {"test_quality": None})
    control = search.suggest("b")
    assert isinstance(control, dict)
    assert told(tmp_path)[control["trial"]].user_attrs["control"] == "shorter on other seed"


def test_a_script_that_ignores_its_seed_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = a_search(tmp_path)
    search.ask_for(2, seeds=True)
    while isinstance(one := search.suggest("a"), dict):
        saved = 0.5 * (one["config"]["method"] != "none")
        search.on_trial_complete("a", row(0.9, saved))
    assert "the same result on every seed: the answer is of one run" in capsys.readouterr().err
    assert search.best() is not None


@pytest.mark.thorough
def test_a_search_that_has_executed_enough_finishes_a_setting_and_begins_no_other(tmp_path: Path) -> None:
    def lost(number: int, seed: int) -> float:
        return 0.3 * (number < 3 and seed > 0)

    # The baseline and three settings of .5, .6 and .7; on a further seed the baseline and the first: 4.3, then .6.
    search = a_search(tmp_path, most_trainings=4.5)
    assert on_seeds(play(search, lost, settings=4)) == [(0, 1001), (1, 1001), (2, 1001)]
    assert search.race.why_spent.startswith("4.9 full trainings are executed and 2 settings refused over further seeds")
    assert search.best().trial == 3
    again = play(a_search(tmp_path, begin=False), lost, settings=0)  # with a budget of its own
    assert on_seeds(again) == [(3, 1001), (0, 1002), (3, 1002), (0, 1003), (3, 1003)]
