"""Settings, orders and accidents under which a trial could get a row or weights that are not its own."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import facts, finish
from thorough import rest_thorough
from tiny_workload import STEPS_PER_EPOCH, Tiny, tiny  # noqa: F401 - a fixture
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.registry import WORKLOADS, Entry
from trainables.stage_tree import checkpoint_policy as keeping
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

EPOCHS = 3
TOTAL = EPOCHS * STEPS_PER_EPOCH

pytestmark = pytest.mark.usefixtures("tiny", "twisted")


class TwistedModel(nn.Module):
    """Its layers run in another order than they are registered, so that stops leave layers before stopped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Conv2d(4, 6, 3, padding=1)
        self.third_norm = nn.BatchNorm2d(6)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.classifier = nn.Linear(6, 3)
        self.first_norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first_norm(self.first(images)).relu()
        hidden = self.second(hidden).relu()
        hidden = self.dropout(self.third_norm(self.third(hidden)).relu())
        scores: Tensor = self.classifier(hidden.mean((2, 3)))
        return scores


class Twisted(Tiny):
    """The tiny workload with that model; its evaluation draws random numbers, as a data loader does."""

    name = "twisted"

    def make_model(self) -> nn.Module:
        return TwistedModel()

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float:
        torch.rand(3)
        random.random()
        return super().evaluate(model, split, device)


@pytest.fixture
def twisted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Registers it for a test."""
    monkeypatch.setitem(
        WORKLOADS, "twisted", Entry(home=f"{__name__}:Twisted", default_epochs=3, description="a test's")
    )
    return "twisted"


_ALONE: dict[TrialConfig, tuple[list[dict[str, Any]], dict[str, Tensor]]] = {}


def over(tree: Path, config: TrialConfig, **sharing: Any) -> int:
    """Train over the tree; rows, and weights where there are any, must be those of the run alone. Steps executed."""
    if config not in _ALONE:
        with TrainingRun(config) as run:
            _ALONE[config] = facts(finish(run)), {n: v.clone() for n, v in run.model.state_dict().items()}
    rows, weights = _ALONE[config]
    with SharedRun(config, Sharing(tree=tree, **{"trials": 10**6, **sharing})) as trial:
        assert facts(finish(trial)) == rows
        if trial.run is not None and trial.run.finished:
            assert all(torch.equal(value, weights[name]) for name, value in trial.run.model.state_dict().items())
        return trial.trained_steps


def configs(rng: random.Random, workload: str) -> Iterator[TrialConfig]:
    """Odd settings without end."""
    while True:
        how: dict[str, Any] = {
            "CAC_WATCH": rng.choice([("conv",), ("conv", "linear"), ("linear",), ("Conv2d", "BatchNorm2d")]),
            "CAC_WHOLE_UNITS": rng.random() < 0.5,
            "CAC_NORM_STATISTICS": rng.choice(["go_on", "go_on", "hold", "hold_all"]),
            "CAC_PREFIX_MODE": rng.choice(["train", "eval"]),
            "CAC_LR_FACTOR": rng.choice([1.0, 1.0, 2.0]),
            "CAC_PREFIX_AUTOGRAD": rng.random() < 0.6,
        }
        mode = rng.choice(["auto", "manual", "linear", "freezeout", "gradient_norm", "grades", "plasticity", "off"])
        if mode == "auto":
            high = rng.choice([0.97, 0.99, 0.9999])
            how |= {
                "CAC_VAR_START_ITR": rng.choice([0, 3]), "CAC_VAR_SAMPLES": rng.choice([1, 2, 7]),
                "CAC_VAR_START_THR": high, "CAC_VAR_SLOPE_THR": high, "CAC_VAR_MT_THR": rng.choice([0.9, 0.99]),
                "CAC_VAR_MT_COUNT_THR": rng.choice([0, 3]),
            }  # fmt: skip
        elif mode == "manual":
            stops = rng.randint(1, 4)
            numbers = range(9 if workload == "twisted" else 14)
            how["CAC_STOP_LAYER_NUM"] = tuple(sorted(rng.sample(numbers, stops)))
            how["CAC_STOP_LAYER_ITR"] = tuple(
                sorted(rng.sample([0, 1, 2, 6, 7, 8, 9, 14, 15, 16, TOTAL - 2, TOTAL - 1, TOTAL, 90], stops))
            )
        elif mode == "off":
            how["CAC_VAR_START_THR"] = -1.0
        else:
            how |= {
                "CAC_RULE": mode, "CAC_RULE_START_ITR": rng.choice([0, 2]), "CAC_RULE_END_ITR": rng.choice([9, TOTAL]),
                "CAC_RULE_INTERVAL": rng.choice([2, 3]), "CAC_RULE_DEPTH": rng.choice([0.4, 1.0]),
                "CAC_RULE_WINDOW": 2, "CAC_RULE_PERCENTILE": rng.choice([40.0, 90.0]), "CAC_RULE_TOLERANCE": 0.6,
                "CAC_RULE_TAU": rng.choice([1e-3, 1e-2]),
                "CAC_RULE_CUBIC": rng.random() < 0.5, "CAC_RULE_SCALED": rng.random() < 0.5,
            }  # fmt: skip
        if mode != "freezeout":
            how["CAC_BRAKING_DISTANCE"] = rng.choice([0, 0, 1, 2, 5, 60])
            how["CAC_STOP_INTERVAL"] = rng.choice([0, 0, 4])
        yield TrialConfig(workload=workload, epochs=EPOCHS, **how)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["twisted", "tiny"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))])
def test_odd_settings_in_random_order(workload: str, seed: int, tmp_path: Path) -> None:
    """Settings that look at the model in different ways, stop everything, brake past the end, act at epochs' ends."""
    rng = random.Random(seed)
    chosen = list(itertools.islice(configs(rng, workload), 25))
    for config in rng.choices(chosen, k=45):
        over(tmp_path / "tree", config, trials=rng.choice([1, 10**6]))


# --- one by one -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
def test_sums_of_gradients_are_of_the_layers_that_a_rule_watches(tmp_path: Path) -> None:
    """Another trial's checkpoint holds no sums for layers that it does not watch: it is none to continue from."""
    base = TrialConfig(
        workload="tiny", epochs=EPOCHS, CAC_RULE="gradient_norm", CAC_RULE_START_ITR=5, CAC_RULE_INTERVAL=3,
        CAC_RULE_PERCENTILE=60.0,
    )  # fmt: skip
    over(tmp_path / "tree", base)
    for watch in (("linear",), ("conv", "linear")):
        over(tmp_path / "tree", replace(base, CAC_WATCH=watch))


def test_a_rule_that_is_off_does_not_say_how_others_order_the_layers(tmp_path: Path) -> None:
    off = TrialConfig(workload="twisted", epochs=EPOCHS, CAC_VAR_START_THR=-1.0, CAC_WHOLE_UNITS=True)
    over(tmp_path / "tree", off)
    linear = TrialConfig(
        workload="twisted", epochs=EPOCHS, CAC_WHOLE_UNITS=True, CAC_RULE="linear", CAC_RULE_END_ITR=TOTAL,
        CAC_RULE_DEPTH=1.0,
    )  # fmt: skip
    over(tmp_path / "tree", linear)


def test_layers_stopped_because_they_run_before_stopped_ones_are_still_followed(tmp_path: Path) -> None:
    config = TrialConfig(
        workload="twisted", epochs=EPOCHS, CAC_PREFIX_AUTOGRAD=False, CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1,
        CAC_VAR_START_THR=0.9999, CAC_VAR_SLOPE_THR=0.9999, CAC_VAR_MT_THR=0.9999,
    )  # fmt: skip
    assert over(tmp_path / "tree", config) == TOTAL
    assert over(tmp_path / "tree", config) == 0


def test_an_evaluation_that_draws_random_numbers_may_be_left_out(tmp_path: Path) -> None:
    """The second trial trains again over the end of an epoch whose row is known, and does not evaluate there."""
    over(tmp_path / "tree", dense("twisted"), budget_bytes=0)
    late = TrialConfig(workload="twisted", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(2,), CAC_STOP_LAYER_ITR=(12,))
    assert over(tmp_path / "tree", late, budget_bytes=0) == TOTAL


def dense(workload: str = "tiny") -> TrialConfig:
    """The run without a method."""
    return TrialConfig(workload=workload, epochs=EPOCHS, method="none")


def stops_at(*iterations: int) -> TrialConfig:
    """The first convolution stops, then the second."""
    return TrialConfig(
        workload="tiny", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(2, 5)[: len(iterations)], CAC_STOP_LAYER_ITR=iterations
    )


#: The step that ends the first epoch.
AT_THE_END = STEPS_PER_EPOCH - 1


@pytest.mark.slow
@pytest.mark.thorough
def test_a_row_is_not_lost_to_a_trial_that_stops_at_the_epochs_end(tmp_path: Path) -> None:
    """Both train the same stretch at once, as after a lapsed lease; only one of them has a row for it."""
    sharing = Sharing(tree=tmp_path / "tree")
    with SharedRun(stops_at(AT_THE_END), sharing) as second:
        second.store.first().refresh()  # it has looked before the other publishes
        published = second.store.publish

        def late(*args: Any) -> None:
            if not done:
                done.append(over(tmp_path / "tree", dense()))
            published(*args)

        done: list[int] = []
        second.store.publish = late
        finish(second)
    assert done == [TOTAL]
    assert over(tmp_path / "tree", dense()) == 0


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at every step."""
    monkeypatch.setattr(keeping, "checkpoint_interval", lambda **_: 1)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("every_step")
def test_a_missing_row_is_evaluated_before_the_next_is_reported(tmp_path: Path) -> None:
    over(tmp_path / "tree", dense())
    over(tmp_path / "tree", stops_at(AT_THE_END))
    with SharedRun(dense(), Sharing(tree=tmp_path / "tree")) as trial:
        stage = trial.store.first()
        stage.refresh()
        del stage.rows[STEPS_PER_EPOCH]
        assert facts(finish(trial)) == _ALONE[dense()][0]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("every_step")
def test_a_checkpoint_that_does_not_load_leads_to_no_other_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory on the device, say. What comes after a trial's own intervention elsewhere is not on its path."""
    over(tmp_path / "tree", dense())
    over(tmp_path / "tree", stops_at(3))
    more = stops_at(3, 20)
    real = torch.load

    def fails(*args: Any, **kwargs: Any) -> Any:
        state = real(*args, **kwargs)
        if not failed or min(failed) > 3:
            failed.append(state["counts"]["step"])
            raise RuntimeError("out of memory")
        return state

    failed: list[int] = []
    over(tmp_path / "other", more)
    monkeypatch.setattr(torch, "load", fails)
    with pytest.warns(UserWarning, match="out of memory"):
        over(tmp_path / "tree", more)
    assert min(failed) == 3 < max(failed)


def test_method_and_record_that_disagree_are_told_before_anything_is_published(tmp_path: Path) -> None:
    with SharedRun(stops_at(AT_THE_END), Sharing(tree=tmp_path / "tree")) as trial:
        advance = trial._replay.advance

        def late(recorded: Any, until: int) -> Any:
            found = advance(recorded, until)
            trial._replay.machine.stopped_through = min(trial._replay.machine.stopped_through, 1)
            return found

        trial._replay.advance = late
        with pytest.raises(RuntimeError, match="internal error: at step 8"):
            finish(trial)
    assert over(tmp_path / "tree", dense()) == TOTAL


def test_the_same_errors_with_and_without_a_tree(tmp_path: Path) -> None:
    cached = replace(dense(), method="gradskip", forward_cache_mb=5)
    wrong = [cached, replace(stops_at(3), CAC_STOP_LAYER_NUM=(99,))]
    wrong += [] if torch.cuda.is_available() else [replace(dense(), device="cuda")]
    over(tmp_path / "tree", replace(cached, forward_cache_mb=0))
    for config in wrong:
        with pytest.raises(UserError) as alone:
            TrainingRun(config)
        with pytest.raises(UserError) as over_the_tree:
            SharedRun(config, Sharing(tree=tmp_path / "tree"))
        assert str(over_the_tree.value) == str(alone.value)


def process_state() -> list[Any]:
    return [
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), dict(os.environ),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", rest_thorough(["between epochs", "in a step", "in loading", "in an evaluation"]))
def test_the_process_is_as_it_was(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a trial that is given up or raises, for the next one in this process."""
    tree = tmp_path / "tree"
    over(tree, dense())
    monkeypatch.setenv("CAC_VAR_START_THR", "0.5")
    before = process_state()
    trial = SharedRun(replace(stops_at(12), threads=2), Sharing(tree=tree))
    same_root = SharedRun(stops_at(12), Sharing(tree=tree))

    def raises(*_: Any, **__: Any) -> None:
        raise ValueError("here")

    for run in (trial, same_root):
        if where == "between epochs":
            run.train_epoch()
        else:
            owner, name = {
                "in a step": (Tiny, "loss"), "in loading": (TrainingRun, "load_state_dict"),
                "in an evaluation": (Tiny, "evaluate"),
            }[where]  # fmt: skip
            with monkeypatch.context() as patched, suppress(ValueError):
                patched.setattr(owner, name, raises)
                finish(run)
        run.close()
        run.close()
        assert process_state() == before
    over(tree, stops_at(12))


def test_a_model_that_looks_different_from_what_is_noted_is_told(tmp_path: Path) -> None:
    """Its layers' order could not be seen this time, say: rule and record would speak of different layers."""
    config = TrialConfig(
        workload="twisted", epochs=EPOCHS, CAC_WHOLE_UNITS=True, CAC_RULE="linear", CAC_RULE_END_ITR=TOTAL
    )
    with SharedRun(config, Sharing(tree=tmp_path / "tree")) as trial, pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingRun, "_example_forward", lambda *_: 1 / 0)
        with (
            pytest.warns(UserWarning, match="could not be seen"),
            pytest.raises(AssertionError, match="internal error"),
        ):
            finish(trial)
    over(tmp_path / "tree", config)
