"""The samplers by name: each draws from the trials of its study, the baseline and controls beside it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import pytest

from tests.support.searchers import row, searcher, told
from tune_cac.tuning.study_searcher import make_sampler


def drawn(folder: Path, sampler: str, count: int) -> list[float]:
    """How much the settings brake and count, in [0, 1]: the more, the worse are both objectives."""
    folder.mkdir()
    made = searcher(folder, sampler=sampler)
    found = []
    for number in range(count):
        suggested: Any = made.suggest(str(number))
        config = suggested["config"]
        found.append((config["CAC_BRAKING_DISTANCE"] / 60 + config["CAC_VAR_MT_COUNT_THR"] / 20) / 2)
        made.on_trial_complete(str(number), row(0.9 - 0.1 * found[-1], 0.5 - 0.5 * found[-1]))
    return found


@pytest.mark.parametrize("name", ["tpe", "random", "nsga2"])
def test_a_plain_sampler_begins_with_the_start_and_repeats(tmp_path: Path, name: str) -> None:
    first = drawn(tmp_path / "first", name, 8)
    baseline, start, *others = told(tmp_path / "first")
    assert [trial.user_attrs.get("role") for trial in (baseline, start)] == ["baseline", "published"]
    assert len({str(trial.params) for trial in others}) == 7
    assert first == drawn(tmp_path / "again", name, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("tpe", 30), *(pytest.param(*c, marks=pytest.mark.thorough) for c in (("gp", 16), ("nsga2", 120)))],
)
def test_what_learns_learns_in_spite_of_a_baseline_without_parameters(tmp_path: Path, name: str, count: int) -> None:
    # With a trial without parameters in sight, Optuna's GP and NSGA-II draw what its random sampler draws.
    late = fmean(drawn(tmp_path / "it", name, count)[-count // 3 :])
    assert late < 0.6 * fmean(drawn(tmp_path / "random", "random", count)[1:])


def test_nsga2_has_its_generations_in_the_study(tmp_path: Path) -> None:
    drawn(tmp_path / "it", "nsga2", 4)
    attrs = [set(trial.system_attrs) for trial in told(tmp_path / "it")[2:]]
    assert all(any("generation" in name for name in found) for found in attrs)


def test_every_sampler_can_do_two_objectives_and_a_constraint() -> None:
    for name in ("auto", "tpe", "random", "gp", "nsga2"):
        study = optuna.create_study(directions=["maximize"] * 2, sampler=make_sampler(0, name))
        for _ in range(12):
            trial = study.ask()
            x = trial.suggest_float("x", 0, 1)
            trial.set_constraint("accuracy_drop", x - 0.5)
            study.tell(trial, [1 - x, x])
        assert len(study.best_trials) > 0
