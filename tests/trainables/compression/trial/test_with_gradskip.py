"""Gradient-Skip and compression on one run: alone, continued, shared; stops before, at and after pruning."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_schedules import EPOCHS, SCHEDULES, ranked, sections, span, text, trained_alone
from runs import NOT_THE_RUNS, Row, finish, without
from thorough import rest_thorough
from tiny_workload import STEPS_PER_EPOCH, Tiny, tiny  # noqa: F401 - a fixture

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

pytestmark = pytest.mark.usefixtures("tiny")

OFTEN = 10**9
Weights = dict[str, torch.Tensor]


def auto(threshold: float, schedule: dict[str, Any], workload: str = "tiny", **more: Any) -> TrialConfig:
    """The variance rule with one threshold, deciding at every step from the third on, unless told otherwise."""
    rule: dict[str, Any] = {"CAC_VAR_START_ITR": 2, "CAC_VAR_SAMPLES": 1}
    rule |= dict.fromkeys(("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR"), threshold)
    return TrialConfig(
        workload=workload, epochs=EPOCHS, method="gradskip+compression", schedule=text(schedule), **{**rule, **more}
    )


def manual(schedule: dict[str, Any], layers: tuple[int, ...], steps: tuple[int, ...], **more: Any) -> TrialConfig:
    return TrialConfig(
        workload="tiny", epochs=EPOCHS, method="gradskip+compression", schedule=text(schedule),
        CAC_STOP_LAYER_NUM=layers, CAC_STOP_LAYER_ITR=steps, **more,
    )  # fmt: skip


def stops(rows: list[Row]) -> list[int]:
    return [event["iteration"] for event in json.loads(rows[-1]["stop_events"])]


def alone(config: TrialConfig, cuts: tuple[int, ...] = ()) -> tuple[list[Row], Weights, dict[int, bytes]]:
    rows, trained, states = trained_alone(config, cuts)
    return without(rows, NOT_THE_RUNS), trained, states


def assert_shared_equals(config: TrialConfig, sharing: Sharing, rows: list[Row], trained: Weights) -> SharedRun:
    with SharedRun(config, sharing) as trial:
        assert without(finish(trial), NOT_THE_RUNS) == rows
        if trial.run is not None:
            assert all(torch.equal(value, trained[name]) for name, value in trial.run.model.state_dict().items())
    return trial


@pytest.mark.slow
@pytest.mark.parametrize("workload", rest_thorough(["tiny", "tiny_adam"]))
def test_layers_stop_before_at_and_after_pruning(workload: str, tmp_path: Path) -> None:
    """Over one tree, equal to each alone: rows, weights, and stops; pruning is in steps 8 and 24."""
    sharing = Sharing(tree=tmp_path / "tree", trials=OFTEN)
    plain = TrialConfig(workload=workload, epochs=EPOCHS, method="none")
    with SharedRun(plain, sharing) as baseline:
        finish(baseline)
    schedule = SCHEDULES["sensitivity"]
    found: set[int] = set()
    for config in (
        auto(0.97, schedule, workload),
        auto(0.99, schedule, workload),
        auto(0.995, schedule, workload, CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=8),
        auto(0.98, schedule, workload, CAC_BRAKING_DISTANCE=4),
    ):
        rows, trained, _ = alone(config)
        assert 0.3 < rows[-1]["sparsity"] < 0.5
        found |= set(stops(rows))
        assert_shared_equals(config, sharing, rows, trained)
        assert assert_shared_equals(config, sharing, rows, trained).trained_steps == 0
    assert any(step < 8 for step in found)
    assert 8 in found  # where a policy acts, too
    assert any(step > 8 for step in found)


def test_acting_in_one_step_is_one_intervention_and_both_methods_see_the_weights_before_it(tmp_path: Path) -> None:
    schedule = SCHEDULES["sensitivity"]
    config = auto(0.995, schedule, CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=8)
    rows, trained, _ = alone(config)
    assert stops(rows) == [8]
    trial = assert_shared_equals(config, Sharing(tree=tmp_path / "tree", trials=OFTEN), rows, trained)
    acts = [visit.entered_by for visit in trial.path.visits if visit.entered_by is not None]
    assert [act.iteration for act in acts] == [8]
    assert "compression" in json.loads(acts[0].action)
    assert len(json.loads(acts[0].action)) > 1
    # Without pruning in that step it decides the same there: the variance that it saw is not that of pruned weights.
    later = sections([span("pruner", "p", 2, 3)], pruners=schedule["pruners"])
    unpruned, _, _ = alone(replace(config, schedule=text(later)))
    events = [json.loads(found[-1]["stop_events"])[0] for found in (rows, unpruned)]
    assert events[0] == events[1]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["activations", "gradients"])
def test_rankings_by_what_is_seen_go_on_where_a_layer_has_just_stopped(name: str) -> None:
    """A stop in the middle of an epoch that is looked at: what was found of the graph before it stays true."""
    config = manual(SCHEDULES[name], (5,), (12,))
    rows, trained, states = alone(config, (10, 14, 15, 18))
    for step, data in states.items():
        with TrainingRun(config) as run:
            run.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
            if step == 14:
                run.begin_epoch()
                run.train_step()
                seen = torch.load(io.BytesIO(states[15]), weights_only=True)["method"]["training_state"]["compression"]
                again = run.method.training_state()["compression"]
                assert repr(again["components"]) == repr(seen["components"])
            rest = without(finish(run), NOT_THE_RUNS)
            assert rest == rows[-len(rest) :], step
            assert all(torch.equal(value, trained[key]) for key, value in run.model.state_dict().items())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_cache_of_stopped_layers_notices_that_they_are_pruned() -> None:
    pruner = {"class": "SparsityLevelParameterPruner", "levels": {"conv1.weight": 0.5}}
    schedule = sections([span("pruner", "p", 1, 2)], pruners={"p": pruner})
    values: dict[str, Any] = {"CAC_STOP_LAYER_NUM": (5,), "CAC_STOP_LAYER_ITR": (4,), "CAC_NORM_STATISTICS": "hold",
                              "CAC_PREFIX_AUTOGRAD": False}  # fmt: skip
    config = TrialConfig(
        epochs=3, method="gradskip+compression", schedule=text(schedule), forward_cache_mb=50, **values
    )
    rows, trained, _ = alone(config)
    plain, trained_plain, _ = alone(replace(config, forward_cache_mb=0))
    assert int((trained["conv1.weight"] == 0).sum()) == 36
    # The cached prefix has its norms in eval mode, another training than without: only weights of stopped layers and
    # what they were pruned to are the same.
    assert torch.equal(trained["conv1.weight"], trained_plain["conv1.weight"])
    assert rows[-1]["sparsity"] == plain[-1]["sparsity"]


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["linear", "freezeout", "gradient_norm", "plasticity"])
def test_rules_that_look_at_more_than_weights_are_refused(rule: str) -> None:
    values: dict[str, Any] = {"CAC_RULE": rule, "CAC_RULE_START_ITR": 1}
    if rule in ("linear", "freezeout"):
        values["CAC_RULE_END_ITR"] = 16
    config = TrialConfig(workload="tiny", epochs=2, method="gradskip+compression", **values)
    with pytest.raises(UserError, match=f"CAC_RULE={rule} can't be combined with compression"):
        TrainingRun(config)


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULES["dorefa"],
        sections([span("pruner", "p", 0, 1), span("extension", "x", 1, 2)],
                 pruners={"p": ranked("L1RankedStructureParameterPruner")},
                 extensions={"x": {"class": "FilterRemover"}}),
    ],
)  # fmt: skip
def test_what_changes_the_numbered_layers_is_refused(schedule: dict[str, Any]) -> None:
    config = manual(schedule, (2,), (4,))
    with pytest.raises(UserError, match="can't be combined with quantizers or extensions, which change the layers"):
        TrainingRun(config)
