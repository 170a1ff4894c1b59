"""Early ends in a search on a recorded run, with rows by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState
from searchers import learning, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from analysis.io.layout import Layout
from tune_cac.tuning.confirmation import options_of
from tune_cac.tuning.early_stopper import EarlyStopper
from tune_cac.tuning.outcomes.trial_attributes import ENDED_EARLY, OUTCOME, PREDICTED
from tune_cac.tuning.progress import SearchProgress
from tune_cac.tuning.study_searcher import StudySearch

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.usefixtures("tiny")]


def searching(folder: Path, **more: Any) -> tuple[StudySearch, EarlyStopper]:
    made = learning(folder, early_ending=True, **more)
    assert made.early_stopper is not None
    return made, made.early_stopper


def rows(made: StudySearch, *accuracies: float, executes: bool = True, **more: Any) -> list[dict[str, Any]]:
    """Rows of a trial's first epochs, in the form of the baseline's."""
    baseline = made.trials.baseline_row()
    assert baseline is not None
    return [
        {
            **baseline,
            "epoch": epoch,
            "accuracy": value,
            "search_flops": 100 * epoch * executes,
            "done": epoch == 4,
            **more,
        }
        for epoch, value in enumerate(accuracies, start=1)
    ]


def begun(made: StudySearch, name: str) -> int:
    suggested = made.suggest(name)
    assert isinstance(suggested, dict)
    return int(suggested["trial"])


def with_five_finished(folder: Path) -> tuple[StudySearch, EarlyStopper]:
    """The starting point, which saves little, and four outcomes that end with 90 % of the compute saved."""
    made, stopper = searching(folder)
    for number in range(5):
        begun(made, f"t{number}")
        start, saved = 0.5 + 0.01 * number, 0.9 if number else 0.01
        for row in rows(made, start, start + 0.1, 0.7, 0.8, compute_saved=saved):
            assert not stopper(f"t{number}", row)
        made.on_trial_complete(f"t{number}", row)
    return made, stopper


def test_a_trial_that_falls_behind_ends_and_is_told_as_pruned(tmp_path: Path) -> None:
    made, stopper = with_five_finished(tmp_path)
    made.plan(10)
    number = begun(made, "slow")
    progress = SearchProgress(
        made, finished_before=[{"trial": 0, "role": "baseline", "row": made.trials.baseline_row()}], to_run=1,
        allowed_drop=0.01, early_stopper=stopper,
    )  # fmt: skip
    of_ray: Any = SimpleNamespace(trial_id="slow", config={"trial": number, "role": "search"})
    ends = []
    for row in rows(made, 0.3, 0.31):
        ends.append(stopper("slow", row))
        progress.on_trial_result(0, [], of_ray, row)
    assert ends == [False, True]
    made.on_trial_complete("slow", row | {"done": True})
    progress.on_trial_complete(0, [], of_ray)
    assert (progress.ended, progress.ended_early) == (1, 1)
    assert "saved yet, 1 ended early, compute so far:" in progress.summary()

    pruned = told(tmp_path)[number]
    assert pruned.state == TrialState.PRUNED
    assert pruned.values is None
    attrs = pruned.user_attrs
    assert "row" not in attrs
    assert (attrs["row_so_far"]["epoch"], attrs["row_so_far"]["search_flops"]) == (2, 200)
    assert 0 < attrs[PREDICTED] < 0.9
    assert (attrs[ENDED_EARLY]["epoch"], attrs[ENDED_EARLY]["amount"]) == (2, pytest.approx(0.33))
    assert attrs[ENDED_EARLY]["expected"] == pytest.approx(0.8 - 0.33)
    ahead = attrs[ENDED_EARLY]["trial"]
    assert attrs["error"] == (
        f"ended early after epoch 2: trial {ahead}, which saves as much, was ahead by 33.00 points, and until the "
        f"end leads change by 2.24 points; predicted to save {100 * attrs[PREDICTED]:.1f} %"
    )
    assert made.trials.finished_count() == 1 + 5 + 1
    assert not [t for t in told(tmp_path) if t.state == TrialState.RUNNING]
    assert made.outcomes is not None
    baseline = made.trials.baseline_row()
    assert baseline is not None
    (tried,) = (
        one for one in made.outcomes._tried(baseline, made.outcomes._traces()) if one.identity == attrs[OUTCOME]
    )
    assert (tried.saved, tried.loss) == (pytest.approx(attrs[PREDICTED]), pytest.approx(baseline["accuracy"] - 0.47))
    for more in range(3):
        if isinstance(suggested := made.suggest(f"more{more}"), dict):
            assert told(tmp_path)[suggested["trial"]].user_attrs[OUTCOME] != attrs[OUTCOME]


def test_it_costs_what_it_executed_and_is_no_result(tmp_path: Path) -> None:
    made, stopper = with_five_finished(tmp_path)
    before = analysis.search_cost(analysis.load(tmp_path))
    number = begun(made, "slow")
    assert [stopper("slow", row) for row in rows(made, 0.3, 0.31)] == [False, True]
    made.on_trial_complete("slow", rows(made, 0.3, 0.31)[-1])
    trials = analysis.load(tmp_path)
    ended = trials.set_index("trial").loc[number]
    assert ended["status"] == "pruned"
    assert ended["error"].startswith("ended early after epoch 2")
    assert ended[["accuracy", "compute_saved", "saved", "accuracy_drop"]].isna().all()
    cost = analysis.search_cost(trials)
    assert cost.search_flops == before.search_flops + 200
    assert (cost.trials, cost.ended_early) == (before.trials + 1, 1)
    assert number not in analysis.rank(trials)["trial"].tolist()
    assert number not in analysis.pareto_front(trials)["trial"].tolist()


def test_what_is_known_already_or_not_predicted_goes_on(tmp_path: Path) -> None:
    made, stopper = with_five_finished(tmp_path)
    number = begun(made, "known")
    assert not any(stopper("known", row) for row in rows(made, 0.3, 0.31, 0.32, 0.33, executes=False))
    made.on_trial_complete("known", rows(made, 0.3, 0.31, 0.32, 0.33)[-1])
    assert told(tmp_path)[number].state == TrialState.COMPLETE
    (tmp_path / "other").mkdir()
    other, its_stopper = searching(tmp_path / "other")
    begun(other, "published")  # its saving is not predicted
    its_stopper._finished = {one.trial: one for one in stopper.finished()}
    assert not any(its_stopper("published", row) for row in rows(other, 0.3, 0.31, 0.32, 0.33))
    assert not stopper("nobody", rows(made, 0.3)[0])


def test_a_resumed_search_has_the_qualities_of_what_ended_before(tmp_path: Path) -> None:
    made, stopper = with_five_finished(tmp_path)
    interrupted = begun(made, "interrupted")
    again, its_stopper = searching(tmp_path, begin=False)
    again.adopt_unfinished()
    assert len(its_stopper.finished()) == 6  # the baseline, too, whose rows were not seen
    assert its_stopper.finished() == stopper.finished()
    begun_again = begun(again, "again")
    attrs = told(tmp_path)[begun_again].user_attrs
    assert attrs[PREDICTED] == told(tmp_path)[interrupted].user_attrs[PREDICTED]
    assert [its_stopper("again", row) for row in rows(again, 0.3, 0.31)] == [False, True]


def test_no_end_without_the_option_nor_where_savings_are_not_predicted(tmp_path: Path) -> None:
    for number, more in enumerate(
        [{}, {"early_ending": True, "sampler": "tpe"}, {"early_ending": True, "space": "agp"}]
    ):
        (tmp_path / str(number)).mkdir()
        assert searcher(tmp_path / str(number), **more).early_stopper is None


def test_a_confirmation_ends_nothing_early(tmp_path: Path) -> None:
    made, _ = searching(tmp_path)
    info = Layout(tmp_path).read_info()
    base = made._base
    for early in (False, True):
        options = options_of(
            replace(info, early_ending=early), Layout(tmp_path), base, trials=3, concurrency=1, budget="1GB"
        )
        assert options.early_ending is False
