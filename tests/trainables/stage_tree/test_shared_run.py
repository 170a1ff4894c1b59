"""A trial over the stage tree is the trial alone: rows, weights, and what it costs."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lease_holders import holder_of
from runs import facts, finish
from thorough import rest_thorough
from tiny_workload import STEPS_PER_EPOCH, tiny  # noqa: F401 - a fixture

import trainables.stage_tree.checkpoint_policy as keeping_module
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.metrics import ROW
from trainables.runtime.checkpoint_folder import read_state
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.leases import Leases
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

EPOCHS = 4
TOTAL = EPOCHS * STEPS_PER_EPOCH
AUTO: dict[str, Any] = {"CAC_VAR_START_ITR": 2, "CAC_VAR_SAMPLES": 1}

Outcome = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def alone(config: TrialConfig) -> Outcome:
    with TrainingRun(config) as run:
        return facts(finish(run)), weights(run)


def shared(config: TrialConfig, sharing: Sharing, **more: Any) -> tuple[Outcome, SharedRun]:
    with SharedRun(config, sharing, **more) as trial:
        rows = finish(trial)
        assert {*rows[-1], "further_metrics"} == {metric.name for metric in ROW}
        trained = weights(trial.run) if trial.run is not None and trial.run.finished else {}
    return (facts(rows), trained), trial


def assert_equals_alone(config: TrialConfig, sharing: Sharing, **more: Any) -> SharedRun:
    """Rows equal, and the whole weight vectors where this trial trained to the end itself."""
    (rows, trained), trial = shared(config, sharing, **more)
    rows_alone, weights_alone = alone(config)
    assert rows == rows_alone
    assert all(torch.equal(value, weights_alone[name]) for name, value in trained.items())
    return trial


def auto(workload: str, **values: Any) -> TrialConfig:
    """A configuration in auto mode; ``START_THR`` is short for ``CAC_VAR_START_THR``."""
    named = {name if name.startswith("CAC_") else f"CAC_VAR_{name}": value for name, value in values.items()}
    return TrialConfig(workload=workload, epochs=EPOCHS, **{**AUTO, **named})


@pytest.mark.usefixtures("tiny")
def test_what_is_known_is_answered_without_training(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree")
    config = auto("tiny", START_THR=0.97, SLOPE_THR=0.97, CAC_BRAKING_DISTANCE=3)
    first = assert_equals_alone(config, sharing)
    assert first.trained_steps == TOTAL
    assert first.search_flops == first.row["executed_flops"]
    # Other numbers, the same interventions: thresholds between the same two ratios.
    for threshold in (0.97, 0.9700001):
        again = assert_equals_alone(replace(config, CAC_VAR_START_THR=threshold), sharing)
        assert (again.trained_steps, again.search_flops, again.run) == (0, 0, None)
        assert again.row["stage"] == first.row["stage"]
    assert again.row["executed_flops"] == first.row["executed_flops"]


@pytest.mark.usefixtures("tiny")
def test_what_is_written_behind_the_training_is_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint against a run of its own; the training goes on while it is written, and waits at its end."""
    monkeypatch.setattr(keeping_module, "WRITTEN_BEHIND", ("cpu",))
    put, begun = Checkpoints.put, list[tuple[int, int]]()

    def slow(self: Checkpoints, stage: str, step: int, data: bytes, **more: Any) -> bool:
        time.sleep(0.1)
        begun.append((step, trial.trained_steps))
        return put(self, stage, step, data, **more)

    monkeypatch.setattr(Checkpoints, "put", slow)
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="none")
    with SharedRun(config, Sharing(tree=tmp_path / "tree", trials=10**9)) as trial:
        finish(trial)
        entries = trial.checkpoints.entries(trial.store.root)
        assert [entry.step for entry in entries] == [step for step, _ in begun]
        assert any(trained > step + 1 for step, trained in begun)
        written = {
            entry.step: read_state(io.BytesIO(trial.checkpoints.read(trial.store.root, entry) or b""))
            for entry in entries
        }
    with TrainingRun(config) as run:
        for _ in run.each_step():
            if run.step in written:
                state = written.pop(run.step)
                assert all(torch.equal(v, state["model"][k]) for k, v in run.model.state_dict().items())
                momenta = [entry["momentum_buffer"] for entry in run.optimizer.state_dict()["state"].values()]
                assert all(
                    torch.equal(a, b["momentum_buffer"])
                    for a, b in zip(momenta, state["optimizer"]["state"].values(), strict=True)
                )
            run.train_step()
    assert not written


def test_a_failure_behind_the_training_is_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "WRITTEN_BEHIND", ("cpu",))
    monkeypatch.setattr(Checkpoints, "put", lambda *_, **__: 1 / 0)
    config = TrialConfig(epochs=1, method="none")
    with pytest.raises(ZeroDivisionError), SharedRun(config, Sharing(tree=tmp_path / "tree", trials=10**9)) as trial:
        finish(trial)


def test_a_copy_in_the_hosts_memory_keeps_aliases_and_versions() -> None:
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, torch.nn.BatchNorm1d(3), layer)
    copied = keeping_module.host_copy({"model": model.state_dict(), "more": [(1, "a", None)]})
    state = model.state_dict()
    assert list(copied["model"]) == list(state)
    assert copied["model"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert copied["model"]["0.weight"] is copied["model"]["2.weight"]
    assert copied["more"] == [(1, "a", None)]
    assert all(torch.equal(copied["model"][name], value) for name, value in state.items())
    assert copied["model"]["0.weight"].data_ptr() != layer.weight.data_ptr()


@pytest.mark.usefixtures("tiny")
def test_settings_that_never_act_are_the_baseline(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree")
    shared(TrialConfig(workload="tiny", epochs=EPOCHS, method="none"), sharing)
    trial = assert_equals_alone(auto("tiny", START_THR=-1.0), sharing)
    assert trial.trained_steps == 0
    trial = assert_equals_alone(auto("tiny", START_THR=0.01), sharing)
    assert trial.trained_steps == 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("behind", rest_thorough([(), ("cpu",)]))
def test_a_fork_trains_no_more_than_from_the_checkpoint_before_it(
    behind: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all steps, those from the last checkpoint at or before the first new intervention on are trained."""
    monkeypatch.setattr(keeping_module, "WRITTEN_BEHIND", behind)
    sharing = Sharing(tree=tmp_path / "tree", trials=10**9)
    dense = shared(TrialConfig(workload="tiny", epochs=EPOCHS, method="none"), sharing)[1]
    root = dense.store.root
    steps = {entry.step for entry in dense.checkpoints.entries(root)}
    nearest = max((step for step in steps if step <= 9), default=0)
    manual = TrialConfig(workload="tiny", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(2,), CAC_STOP_LAYER_ITR=(9,))
    trial = assert_equals_alone(manual, sharing)
    assert trial.trained_steps == TOTAL - nearest
    # The rule acted at step 9, so there is a checkpoint there now: another action there costs no step more.
    assert 9 in {entry.step for entry in trial.checkpoints.entries(root)}
    braked = assert_equals_alone(replace(manual, CAC_BRAKING_DISTANCE=4), sharing)
    assert braked.trained_steps == TOTAL - 9
    # Equal up to the second stop: only what follows it.
    later = replace(manual, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=(9, 25))
    assert assert_equals_alone(later, sharing).trained_steps <= TOTAL - 10
    # Before the first step, twice: the second one is known up to the end, and a stop after it shares nothing.
    never = replace(manual, CAC_STOP_LAYER_ITR=(-1,))
    assert [assert_equals_alone(never, sharing).trained_steps for _ in range(2)] == [TOTAL, 0]
    both = replace(manual, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=(-1, 0))
    assert assert_equals_alone(both, sharing).trained_steps == TOTAL
    assert assert_equals_alone(manual, sharing).trained_steps == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("rule", ["gradient_norm", "grades", "plasticity"])
def test_rules_that_measure_something_else_share_what_was_measured(rule: str, tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=100)
    shared(TrialConfig(workload="tiny", epochs=EPOCHS, method="none"), sharing)
    config = TrialConfig(
        workload="tiny", epochs=EPOCHS, CAC_RULE=rule, CAC_RULE_START_ITR=2, CAC_RULE_INTERVAL=3, CAC_RULE_WINDOW=2,
        CAC_RULE_PERCENTILE=40.0, CAC_RULE_TOLERANCE=0.3, CAC_RULE_TAU=1e-3, CAC_WHOLE_UNITS=True,
    )  # fmt: skip
    first = assert_equals_alone(config, sharing)
    assert first.trained_steps == TOTAL  # nobody measured this signal before
    assert assert_equals_alone(config, sharing).trained_steps == 0
    other = replace(config, CAC_RULE_PERCENTILE=90.0, CAC_RULE_TOLERANCE=0.9, CAC_RULE_TAU=2e-3)
    assert assert_equals_alone(other, sharing).trained_steps < TOTAL
    # Another interval is another signal.
    assert assert_equals_alone(replace(config, CAC_RULE_INTERVAL=4), sharing).trained_steps == TOTAL


@pytest.mark.thorough
@pytest.mark.slow
def test_a_forward_cache_is_continued_only_from_before_it_began(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=50)
    config = TrialConfig(
        epochs=3, CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(8,), CAC_NORM_STATISTICS="hold",
        CAC_PREFIX_AUTOGRAD=False, forward_cache_mb=50,
    )  # fmt: skip
    assert_equals_alone(config, sharing)
    more = replace(config, CAC_STOP_LAYER_NUM=(5, 8), CAC_STOP_LAYER_ITR=(8, 20))
    trial = assert_equals_alone(more, sharing)
    assert 30 - 8 <= trial.trained_steps < 30


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("acting", rest_thorough([{"CAC_NORM_STATISTICS": "hold_all"}, {"CAC_LR_FACTOR": 2.0}]))
def test_what_acts_from_the_first_step_on_shares_nothing_with_a_run_without(
    acting: dict[str, Any], tmp_path: Path
) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=100)
    base = TrialConfig(workload="tiny", epochs=EPOCHS, method="none")
    baseline = assert_equals_alone(base, sharing)
    # The setting does nothing where there is no Gradient-Skip, and acts where its rule is off.
    same = assert_equals_alone(replace(base, **acting), sharing)
    assert (same.store.root, same.trained_steps) == (baseline.store.root, 0)
    off = replace(base, method="gradskip", CAC_VAR_START_THR=-1.0, **acting)
    held = assert_equals_alone(off, sharing)
    assert held.trained_steps == TOTAL
    assert held.store.root != baseline.store.root
    # Settings with it share with each other.
    manual = replace(off, CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(TOTAL // 2,))
    stopped = assert_equals_alone(manual, sharing)
    assert stopped.store.root == held.store.root
    assert stopped.trained_steps < TOTAL
    rows = [shared(config, sharing)[0][0] for config in (base, off, manual)]
    assert len({row[-1]["train_loss"] for row in rows}) == 3


@pytest.mark.usefixtures("tiny")
def test_the_mode_of_a_stopped_prefix_parts_runs_at_the_stop(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=100)
    config = TrialConfig(workload="tiny", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(TOTAL // 2,))
    train = assert_equals_alone(config, sharing)
    evaluating = assert_equals_alone(replace(config, CAC_PREFIX_MODE="eval"), sharing)
    assert evaluating.store.root == train.store.root
    assert 0 < evaluating.trained_steps < TOTAL
    assert assert_equals_alone(replace(config, CAC_PREFIX_MODE="eval"), sharing).trained_steps == 0


@pytest.mark.usefixtures("tiny")
def test_a_divergence_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_workload

    monkeypatch.setattr(tiny_workload.Tiny, "evaluate", lambda *_: float("nan"))
    sharing = Sharing(tree=tmp_path / "tree")
    config = TrialConfig(workload="tiny", epochs=2, method="none")
    messages, steps = [], []
    for run in (TrainingRun(config), SharedRun(config, sharing), SharedRun(config, sharing)):
        with run, pytest.raises(TrainingDiverged) as raised:
            finish(run)
        messages.append(str(raised.value))
        steps.append(getattr(run, "trained_steps", None))
    assert messages == ["the accuracy is nan in epoch 1"] * 3
    assert steps[1:] == [STEPS_PER_EPOCH, 0]


# --- several trials at once -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_one_trains_and_the_other_waits(tmp_path: Path) -> None:
    """Two trials in step: the second asks for a stage that the first has, and gets its rows."""
    sharing = Sharing(tree=tmp_path / "tree", checkpoint_every_s=0)
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="none")
    claims = Leases()
    with SharedRun(config, sharing, claims=claims, holder="first") as first:
        rows = [first.train_epoch()]
        assert holder_of(claims, first.store.root) == "first"
        second = SharedRun(config, sharing, claims=claims, holder="second")
        assert facts([second.train_epoch()]) == facts(rows)
        found: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: found.append(second.train_epoch()))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        assert not found
        rows.append(first.train_epoch())
        waiting.join(timeout=60)
        assert facts(found) == facts(rows[1:])
    assert holder_of(claims, first.store.root) is None
    rows_of_second = finish(second)  # the first has given up, so the second goes on itself
    assert facts(rows_of_second) == alone(config)[0][2:]
    assert holder_of(claims, first.store.root) is None  # it may exist for long
    second.close()
    # Every epoch begins with a checkpoint: the second goes on from the one before the last epoch of the first.
    assert 2 * STEPS_PER_EPOCH <= second.trained_steps <= 3 * STEPS_PER_EPOCH


@pytest.mark.usefixtures("tiny")
def test_a_holder_that_died_is_waited_for_no_longer_than_its_lease(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree")
    config = TrialConfig(workload="tiny", epochs=2, method="none")
    now = [0.0]
    claims = Leases(clock=lambda: now[0])
    dead = SharedRun(config, sharing, claims=claims, holder="dead")
    dead.train_epoch()
    rows_alone = alone(config)[0]  # also puts the process state in order: the dead one never closes
    found: list[Any] = []
    trial = SharedRun(config, sharing, claims=claims, holder="alive")
    thread = threading.Thread(target=lambda: found.append(facts(finish(trial))))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    now[0] = 1e6
    thread.join(timeout=60)
    assert found == [rows_alone]
    assert STEPS_PER_EPOCH <= trial.trained_steps < 2 * STEPS_PER_EPOCH  # from the dead one's last checkpoint on
    trial.close()
    dead.close()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_path_enters_a_stage_that_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that trains live and comes to a known stage replays it, and goes on from its own state where it ends."""
    monkeypatch.setattr(keeping_module, "checkpoint_interval", lambda **_: 10**6)  # only where a rule acts
    sharing = Sharing(tree=tmp_path / "tree")
    base = TrialConfig(workload="tiny", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=(6, 20))
    assert_equals_alone(base, sharing)
    # Not known: the stretch after step 20 without the second stop.
    assert_equals_alone(replace(base, CAC_STOP_LAYER_NUM=(2, 8), CAC_STOP_LAYER_ITR=(6, 25)), sharing)
    assert (
        assert_equals_alone(replace(base, CAC_STOP_LAYER_NUM=(2,), CAC_STOP_LAYER_ITR=(6,)), sharing).trained_steps < 8
    )
    assert assert_equals_alone(base, sharing).trained_steps == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_random_trials_in_random_order_with_random_crashes(tmp_path: Path) -> None:
    """Trials given up at any epoch leave nothing wrong behind."""
    rng = random.Random(5)
    sharing = Sharing(tree=tmp_path / "tree", trials=30, budget_bytes=400_000)
    executed = full = 0
    for _ in range(24):
        config = auto(
            "tiny", START_THR=rng.choice([0.95, 0.97, 0.99]), SLOPE_THR=rng.choice([0.95, 0.98]), MT_THR=0.97,
            START_ITR=rng.choice([0, 5, 9]), SAMPLES=rng.choice([1, 3]), CAC_BRAKING_DISTANCE=rng.choice([0, 3]),
        )  # fmt: skip
        if rng.random() < 0.4:
            with SharedRun(config, sharing) as given_up:
                for _ in range(rng.randint(1, 3)):
                    given_up.train_epoch()
            executed += given_up.trained_steps
            continue
        executed += assert_equals_alone(config, sharing).trained_steps
        full += TOTAL
    assert executed < full


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_where_training_does_not_repeat_a_fork_is_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernels add in changing order: nothing equals the run alone, and nothing contradicts itself."""
    import tiny_workload

    noise = random.Random(0)
    real = tiny_workload.Tiny.loss
    monkeypatch.setattr(tiny_workload.Tiny, "loss", lambda *a: real(*a) * (1 + 1e-5 * noise.random()))
    sharing = Sharing(tree=tmp_path / "tree", trials=30)
    for _ in range(12):
        config = auto(
            "tiny", START_THR=noise.choice([0.95, 0.97, 0.99]), SLOPE_THR=noise.choice([0.95, 0.98]), MT_THR=0.97,
            SAMPLES=noise.choice([1, 3]), CAC_BRAKING_DISTANCE=noise.choice([0, 3]),
        )  # fmt: skip
        (rows, _), _ = shared(config, sharing)
        assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
        stops = [json.loads(row["stop_events"]) for row in rows]
        for before, after in pairwise(stops):
            assert after[: len(before)] == before  # what was reported stays so
