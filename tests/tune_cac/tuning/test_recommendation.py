"""Recommendations from really trained studies of the tiny workload: what is expected, its errors, explicit stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from searchers import learning
from tiny_workload import HeadFirst, Tiny, tiny  # noqa: F401 - a fixture

import analysis
import search_spaces
from analysis.io.layout import Layout
from analysis.metrics.noise import resolution_of
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.quality import ACCURACY
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun
from tune_cac.tuning.outcomes.distinct_outcomes import distinct_outcomes, stops_in
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy, shares_at
from tune_cac.tuning.outcomes.quality_model import posterior
from tune_cac.tuning.recommendation import (
    Earlier,
    Recommendation,
    check_space,
    expected,
    explicit,
    foreseen,
    left_out,
    read_earlier,
    recommend,
    recommended,
    shorter_lengths,
)
from tune_cac.tuning.warm_start.threshold_ranges import outcome, predictions

pytestmark = pytest.mark.thorough

SPACE = "auto_thresholds"


def study(folder: Path, seed: int) -> Earlier:
    """A study of two trained settings."""
    folder.mkdir()
    made = learning(folder, seed=seed)
    for number in range(2):
        suggested = made.suggest(f"t{number}")
        assert isinstance(suggested, dict)
        with SharedRun(TrialConfig(**suggested["config"]), Sharing(tree=folder / "tree", budget_bytes=0)) as shared:
            while not shared.finished:
                last = shared.train_epoch()
        made.on_trial_complete(f"t{number}", last)
    return read_earlier(Layout(folder), search_spaces.load(SPACE), ACCURACY, 0.01)


@pytest.fixture
def earlier(tiny: str, tmp_path: Path) -> list[Earlier]:  # noqa: F811
    return [study(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))]


@pytest.mark.slow
def test_what_is_recommended_saves_as_much_when_it_is_trained(earlier: list[Earlier]) -> None:
    rows: list[Any] = []
    base = TrialConfig(workload="tiny", epochs=8, seed=3, method="none")
    found = recommend(base, search_spaces.load(SPACE), earlier, 2, rows.append)
    assert len(rows) == 2  # a quarter, and nothing else
    assert found is not None
    thresholds, stops = found.thresholds, found.stops
    assert found.shorter is None  # no study has trained a shorter run
    assert stops is not None
    assert trained(stops)["compute_saved"] == pytest.approx(stops.outcome.saved, abs=1e-9)  # exact
    assert stops.outcome.stops == thresholds.outcome.stops
    assert 0 < thresholds.outcome.saved < 1
    assert thresholds.spread > 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("reverse", [False, True])
def test_explicit_stops_are_the_stops_of_the_setting_whatever_order_layers_are_registered_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """Whole units stop in the order in which they execute, which no ascending list says where that is the opposite."""
    monkeypatch.setattr(Tiny, "make_model", lambda self: HeadFirst(reverse=reverse))
    made = learning(tmp_path, space="stop_rules")
    drawn = made.learn().drawn(0, 200)
    # A freezeout scales learning rates, too, which no list says.
    kept = [(parameters, values) for parameters, values in drawn if values["CAC_RULE"] != "freezeout"]
    outcomes = distinct_outcomes(made.learn(), kept)[0]
    assert any(len(one.stops) > 1 for one in outcomes)
    for one in [max(outcomes, key=lambda one: len(one.stops)), outcomes[-1]]:
        row, weights = trained_alone(TrialConfig.from_mapping(one.config))
        stops = explicit(made.learn(), replace(one, stops=stops_in(row)))  # as they were, not as they were predicted
        if reverse and len(stops_in(row)) > 1:
            assert stops is None
            continue
        assert stops is not None
        same, as_list = trained_alone(stops)
        for name in ("accuracy", "train_loss", "executed_flops"):
            assert same[name] == row[name]
        assert torch.equal(weights, as_list)


def trained_alone(config: TrialConfig) -> tuple[dict[str, Any], torch.Tensor]:
    """The last row of a training, and its weights."""
    with TrainingRun(config) as run:
        while not run.finished:
            row = run.train_epoch()
        return row, torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.slow
def test_thresholds_are_in_the_middle_of_what_trains_alike(earlier: list[Earlier]) -> None:
    known, outcomes = foreseen(earlier[0].known, 8, earlier[1:])
    chosen = recommended(known, outcomes, earlier[1:])
    assert chosen is not None
    one = chosen[0].outcome
    low, high = known.context.start_thr_range
    values = np.linspace(low, high, 2001)
    rows = predictions(known.trace, [{**one.config, "CAC_VAR_START_THR": float(value)} for value in values])
    alike = np.array([row is not None and outcome(row, one.config) == one.identity for row in rows])
    own = int(np.argmin(np.abs(values - one.config["CAC_VAR_START_THR"])))
    assert alike[own]
    others = np.flatnonzero(~alike)
    first, last = max(others[others < own], default=-1) + 1, min(others[others > own], default=len(values)) - 1
    assert not alike.all()
    assert own == pytest.approx((first + last) / 2, abs=(last - first) / 20)  # ends are found to a 16th of a step


def trained(found: Recommendation) -> dict[str, Any]:
    """The last row of a recommended setting's training."""
    return trained_alone(TrialConfig.from_mapping(found.outcome.config))[0]


def with_shorter_run(one: Earlier, loss: float) -> Earlier:
    """A study of a baseline without luck that has trained three quarters of the run, without a method, too."""
    scale = one.prior.scale
    run = PriorRun(stops=(), ended=0.75, saved=0.25, loss=loss * scale.unit)
    own = replace(one.prior, runs=(*one.prior.runs, *[run] * 5), scale=replace(scale, luck=0.1 * scale.unit))
    return replace(one, prior=own)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "loss"), [(SPACE, 0.0), (SPACE, 9.0), ("manual_layers", 0.0)])
def test_a_shorter_run_is_recommended_if_those_of_earlier_studies_lost_nothing(
    earlier: list[Earlier], space: str, loss: float
) -> None:
    base = TrialConfig(workload="tiny", epochs=8, seed=3, method="none")
    studies = [with_shorter_run(one, loss) for one in earlier]
    found = recommend(base, search_spaces.load(space), studies, 2, lambda row: None)
    assert found is not None
    if loss:
        assert found.shorter is None
        return
    assert found.shorter is not None
    outcome = found.shorter.outcome
    assert outcome.config["CAC_STOP_LAYER_ITR"] == list(dict.fromkeys(when for when, _ in outcome.stops))
    assert (outcome.epochs, outcome.config["epochs"], outcome.share) == (6, 6, 0.75)
    row = trained(found.shorter)
    assert row["epoch"] == 6
    assert outcome.saved == pytest.approx(1 - 0.75 * (1 - row["compute_saved"]), abs=1e-9)
    assert [event["iteration"] for event in json.loads(row["stop_events"])] == list(
        outcome.config["CAC_STOP_LAYER_ITR"]
    )
    assert found.shorter.rank > found.thresholds.rank
    errors = left_out(studies, 0.25)
    assert errors is not None
    assert errors.studies == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "of", "epochs", "lengths"),
    [
        ((30, 24, 18, 24), 30, 30, [18, 24]),
        ((14, 30), 30, 30, []),  # too short
        ((15, 30), 30, 30, [15]),
        ((12, 19), 25, 25, [12, 19]),  # half rounded down, as a search does
        ((12, 19), 25, 30, [15, 22]),
        ((4,), 8, 8, [4]),
        ((18,), 30, 1, []),
    ],
)
def test_lengths_are_those_of_earlier_studies_that_are_not_too_short(
    earlier: list[Earlier], ended: tuple[int, ...], of: int, epochs: int, lengths: list[int]
) -> None:
    runs = tuple(PriorRun(stops=(), ended=one / of, saved=1 - one / of, loss=0.0) for one in ended)
    known = replace(earlier[0].known, base=replace(earlier[0].known.base, epochs=of))
    study = PriorStudy.of("a", runs, 0.9, ACCURACY, 0.01)
    assert shorter_lengths([replace(earlier[0], known=known, prior=study)], epochs) == lengths


@pytest.mark.slow
def test_the_luck_of_a_baseline_is_that_of_one_run(earlier: list[Earlier], tmp_path: Path) -> None:
    (accuracy,) = (one.known.trace.dense.recorded.rows[one.known.trace.total_steps]["accuracy"] for one in earlier[:1])
    resolution = resolution_of(analysis.load(tmp_path / "a")["accuracy"])
    assert resolution is not None
    wrong = 1 - accuracy
    bound = min(wrong / 2, wrong * (1 - wrong)) * resolution  # the variance of one training's accuracy
    scale = earlier[0].prior.scale
    assert scale.luck == pytest.approx(bound**0.5 or scale.unit)
    assert scale.unit == pytest.approx(max(0.01, 0.5 * bound**0.5))


@pytest.mark.slow
def test_errors_are_those_of_studies_left_out_in_turn(earlier: list[Earlier]) -> None:
    errors = left_out(earlier, 0.25)
    assert errors is not None
    assert errors.studies == 2
    assert 0 <= errors.saved < 1
    # With all of the run recorded its savings are known: what replay says of the dense run is what it says.
    known = left_out(earlier, 1.0)
    assert known is not None
    assert known.saved <= errors.saved + 1e-9
    assert known.loss == pytest.approx(known.loss_of_stops, abs=0.5)


@pytest.mark.slow
def test_what_is_expected_is_the_model_of_all_studies_on_the_runs_layers(earlier: list[Earlier]) -> None:
    earlier = [replace(one, prior=replace(one.prior, scale=replace(one.prior.scale, luck=0.7))) for one in earlier]
    trace, priors = earlier[0].known.trace, [one.prior for one in earlier]
    runs = priors[0].runs
    found = expected(earlier, trace, runs)
    levels = Depths(trace).levels

    def rows(study: PriorStudy) -> np.ndarray:
        return np.array([[r.saved, r.ended, *shares_at(r.stops, levels, end=r.ended)] for r in study.runs])

    seen = np.vstack([rows(priors[0]), rows(priors[1])])
    losses = np.array([r.loss / one.scale.unit for one in priors for r in one.runs])
    numbers = np.array([*[1] * len(priors[0].runs), *[2] * len(priors[1].runs)])
    luck = np.mean([0.7 / one.scale.unit for one in priors])
    wanted = posterior(seen, losses, rows(priors[0]), unit=1.0, studies=numbers, luck=luck)
    np.testing.assert_allclose(found.mean, wanted.mean)
    np.testing.assert_allclose(found.spread, wanted.spread)


def test_a_space_of_another_method_is_refused() -> None:
    for name in ("agp", "training_recipe"):
        with pytest.raises(UserError, match=rf"--space must be one of Gradient-Skip alone, .*, got {name}"):
            check_space(search_spaces.load(name))
    check_space(replace(search_spaces.load("manual_layers"), name="own"))
