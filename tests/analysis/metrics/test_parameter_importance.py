"""Importance on studies whose answer is known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial
from studies import result_row, write_study

from analysis.io.layout import STUDY_NAME, Layout
from analysis.metrics.parameter_importance import LEAST_TRIALS, importance
from trainables.config import TrialConfig
from trainables.errors import UserError

START, SLOPE, COUNT = "CAC_VAR_START_THR", "CAC_VAR_SLOPE_THR", "CAC_VAR_MT_COUNT_THR"
RANGES: dict[str, BaseDistribution] = {
    START: FloatDistribution(0.9, 1.001),
    SLOPE: FloatDistribution(0.9, 1.001),
    COUNT: IntDistribution(0, 20),
}
Objective = Callable[[Mapping[str, float]], float]


def unit(params: Mapping[str, float]) -> tuple[float, float, float]:
    """The three parameters, each scaled to [0, 1]."""
    return (params[START] - 0.9) * 10, (params[SLOPE] - 0.9) * 10, params[COUNT] / 20


def additive(params: Mapping[str, float]) -> float:
    """Of two independent uniform terms of weights 2 and 1, the first has four fifths of the variance."""
    start, slope, _ = unit(params)
    return 2 * start + slope


def third_alone(params: Mapping[str, float]) -> float:
    return unit(params)[2]


def drawn(seed: int) -> list[dict[str, Any]]:
    """Random parameters, more than a test takes, on grids of 21 values."""
    places = np.random.default_rng(seed).integers(0, 21, (400, 3)).tolist()
    return [{START: 0.9 + a / 200, SLOPE: 0.9 + b / 200, COUNT: c} for a, b, c in places]


@cache
def opened(journal: Path) -> optuna.storages.JournalStorage:
    """One storage a journal, so that it is not read anew for every trial."""
    return optuna.storages.JournalStorage(JournalFileBackend(str(journal)))


def add(
    layout: Layout,
    params: Mapping[str, Any],
    *,
    accuracy: float,
    saved: float,
    ranges: Mapping[str, BaseDistribution] = RANGES,
    config: Mapping[str, Any] | None = None,
    **attrs: Any,
) -> None:
    """One completed trial of a search at the end of a study's journal."""
    storage = opened(layout.journal)
    values = TrialConfig().to_dict() | dict(config if config is not None else params)
    given = {"role": "search", "config": values, "row": result_row(accuracy, saved), **attrs}
    trial = create_trial(
        state=TrialState.COMPLETE,
        values=[accuracy, saved],
        # Ranges that a starting point need not keep to are checked by `create_trial`, not by the journal.
        params={},
        distributions={},
        user_attrs=given,
    )
    trial.distributions = {name: ranges[name] for name in params}
    trial.params = dict(params)
    study_id = storage.get_study_id_from_name(STUDY_NAME)
    storage.create_new_trial(study_id, template_trial=trial)


def study(
    folder: Path, count: int, accuracy: Objective, saved: Objective, *, seed: int = 0, noise: float = 0.01
) -> Layout:
    """A baseline and so many random trials."""
    layout = write_study(folder, [{"row": result_row()}])
    generator = np.random.default_rng(seed + 1000)
    for params in drawn(seed)[:count]:
        add(
            layout,
            params,
            accuracy=accuracy(params) + noise * generator.normal(),
            saved=saved(params) + noise * generator.normal(),
        )
    return layout


def shares(frame: pd.DataFrame, objective: str) -> dict[str, float]:
    those = frame[frame["objective"] == objective]
    return dict(zip(those["parameter"], those["importance"], strict=True))


# --- importance -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_additive_objective_has_the_shares_of_its_variance(tmp_path: Path) -> None:
    layout = study(tmp_path / "s", 80, additive, third_alone)
    found = importance(layout.root)
    accuracy = shares(found, "accuracy")
    assert accuracy == pytest.approx({START: 0.8, SLOPE: 0.2, COUNT: 0.0}, abs=0.07)
    assert shares(found, "compute_saved") == pytest.approx({COUNT: 1, START: 0, SLOPE: 0}, abs=0.02)
    assert found.groupby("objective")["importance"].sum().tolist() == pytest.approx([1, 1])
    assert found.attrs["evaluator"] == "fANOVA"
    assert (found.attrs["trials"], found.attrs["reason"]) == (80, "")
    assert list(accuracy) == [START, SLOPE, COUNT]  # greatest first
    explained = found.attrs["explained"]
    assert 0.9 < explained["accuracy"] <= 1  # additive: all of it, but for noise and the forest's coarseness
    pd.testing.assert_frame_equal(found, importance(str(layout.journal)))  # seeded, and the journal alone is enough


@pytest.mark.slow
def test_a_long_study_is_drawn_from(tmp_path: Path) -> None:
    found = importance(study(tmp_path / "s", 230, additive, lambda _: 0.5, noise=0).root)
    assert shares(found, "accuracy") == pytest.approx({START: 0.8, SLOPE: 0.2, COUNT: 0.0}, abs=0.07)
    assert found.attrs["trials"] == 230
    assert found.attrs["reason"] == "compute_saved is the same in all 230 trials"
    assert set(found["objective"]) == {"accuracy"}


def test_thresholds_that_a_search_moved_off_the_grid_of_their_space_count(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    ranges = {**RANGES, START: FloatDistribution(0.9, 1.0, step=0.02)}
    for params in drawn(0)[:40]:
        moved = {**params, START: round(params[START] + 0.0037, 5)}
        add(layout, moved, accuracy=additive(moved), saved=third_alone(moved), ranges=ranges)
        add(layout, {**moved, START: 0.3}, accuracy=50.0, saved=0.0, ranges=ranges)  # outside its range
    found = importance(layout.root)
    assert found.attrs["trials"] == sum(params[START] + 0.0037 <= 1.0 for params in drawn(0)[:40])
    assert next(iter(shares(found, "accuracy"))) == START


@pytest.mark.slow
def test_only_completed_trials_of_the_search_count(tmp_path: Path) -> None:
    layout = study(tmp_path / "s", 40, additive, third_alone)
    before = importance(layout.root)
    wild = {START: 0.95, SLOPE: 0.95, COUNT: 3}
    for attrs in ({"role": "control"}, {"role": "published"}, {"role": "candidate"}):
        add(layout, wild, accuracy=50.0, saved=-50.0, **attrs)
    add(layout, wild | {COUNT: 99}, accuracy=50.0, saved=-50.0)  # outside its range, as a starting point may be
    add(layout, {}, accuracy=50.0, saved=-50.0)
    add(layout, wild, accuracy=float("inf"), saved=0.5)
    pd.testing.assert_frame_equal(importance(layout.root), before)


def conditional(layout: Layout, count: int) -> None:
    """Two branches. High accuracy comes from a high depth of the one, low accuracy from a high window of the other."""
    generator = np.random.default_rng(7)
    ranges: dict[str, BaseDistribution] = {
        "CAC_RULE": CategoricalDistribution(("linear", "plasticity")),
        "linear.CAC_RULE_DEPTH": FloatDistribution(0, 1),
        "linear.CAC_BRAKING_DISTANCE": FloatDistribution(0, 1),
        "plasticity.CAC_RULE_TOLERANCE": FloatDistribution(0, 1),
    }
    for number in range(count):
        a, b = (float(v) for v in generator.random(2))
        params: dict[str, Any] = {"CAC_RULE": "linear", "linear.CAC_RULE_DEPTH": a, "linear.CAC_BRAKING_DISTANCE": b}
        accuracy = max(0.0, a - 0.7)
        if number % 2:
            params = {"CAC_RULE": "plasticity", "plasticity.CAC_RULE_TOLERANCE": a}
            accuracy = -max(0.0, a - 0.7)
        config = {name.rpartition(".")[2]: value for name, value in params.items()}
        add(layout, params, accuracy=accuracy, saved=-accuracy, ranges=ranges, config=config)


def test_parameters_of_branches_are_told_and_high_objectives_are_what_matters(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    conditional(layout, 120)
    found = importance(layout.root)
    assert found.attrs["evaluator"] == "PED-ANOVA"
    depth, tolerance = "linear.CAC_RULE_DEPTH", "plasticity.CAC_RULE_TOLERANCE"
    accuracy, saved = shares(found, "accuracy"), shares(found, "compute_saved")
    assert set(accuracy) == set(saved) == {"CAC_RULE", depth, "linear.CAC_BRAKING_DISTANCE", tolerance}
    assert accuracy[depth] > 0.7 > 0.1 > accuracy[tolerance]
    assert saved[tolerance] > 0.7 > 0.1 > saved[depth]  # the other way round, so the other end
    assert found.groupby("objective")["importance"].sum().tolist() == pytest.approx([1, 1])


def test_too_few_trials_and_no_difference_are_said(tmp_path: Path) -> None:
    few = importance(study(tmp_path / "few", LEAST_TRIALS - 1, additive, third_alone).root)
    assert list(few.columns) == ["objective", "parameter", "importance"]
    assert len(few) == 0
    assert few.attrs["reason"] == "19 completed trials of the search with parameters are too few, 20 are needed"
    same = importance(study(tmp_path / "same", LEAST_TRIALS, lambda _: 0.9, lambda _: 0.1, noise=0).root)
    assert len(same) == 0
    assert same.attrs["reason"] == ("accuracy is the same in all 20 trials; compute_saved is the same in all 20 trials")


def test_without_an_optuna_study_it_is_refused(tmp_path: Path) -> None:
    layout = study(tmp_path / "s", 3, additive, third_alone)
    other = tmp_path / "other.journal"
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(other)))
    optuna.create_study(study_name="mine", storage=storage)
    with pytest.raises(UserError, match=r"other\.journal holds no study of a search: importance needs one"):
        importance(other)
    layout.journal.unlink()
    with pytest.raises(UserError, match=r"importance needs a study with its Optuna journal, .* has none: give"):
        importance(layout.root)
    with pytest.raises(UserError, match="no study in"):
        importance(tmp_path / "nothing")


@pytest.mark.slow
def test_what_matters_is_what_the_study_ranks_by(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    for params in drawn(3)[:40]:
        # Told to Optuna is the mean of both; training compute alone says nothing.
        mean, config = third_alone(params), {**params, "saving": "both"}
        row = result_row(additive(params), 0.0, inference_saved=2 * mean)
        add(layout, params, accuracy=additive(params), saved=mean, config=config, row=row)
    found = importance(layout.root)
    assert set(found["objective"]) == {"accuracy", "saved"}
    assert max(shares(found, "saved"), key=shares(found, "saved").__getitem__) == COUNT
