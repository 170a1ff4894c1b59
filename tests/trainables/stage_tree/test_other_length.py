"""A cut run takes the start that it has in common with the full run, and is the run alone all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import facts, finish
from tiny_workload import STEPS_PER_EPOCH, Tiny, TinyAdam
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from trainables.config import TrialConfig
from trainables.registry import WORKLOADS, Entry
from trainables.stage_tree import checkpoint_policy
from trainables.stage_tree.leases import Leases
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun

pytestmark = pytest.mark.thorough

FULL, CUT = 6, 3
CUT_STEPS = CUT * STEPS_PER_EPOCH
WARM_UP = 10


def constant(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0)


def drops_at_fixed_epochs(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [2 * STEPS_PER_EPOCH, 4 * STEPS_PER_EPOCH], gamma=0.1)


def drops_at_shares(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [total_steps // 2], gamma=0.1)


def drops_at_the_end_of_an_epoch(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [total_steps // 3], gamma=0.1)


def table(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    rates = [1.0] * (total_steps + 1)  # one for each state, and no more
    return LambdaLR(optimizer, lambda step: rates[step])


def chained(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer, factor=0.5, total_iters=6), MultiStepLR(optimizer, [12])])


def warm_up_and_cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, 1.0, WARM_UP), CosineAnnealingLR(optimizer, total_steps - WARM_UP)]
    return SequentialLR(optimizer, parts, [WARM_UP])


def one_cycle(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=total_steps + 1)


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=total_steps)


def flat_then_linear(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Momentum and rate that fall over the last third."""
    return LambdaLR(optimizer, lambda step: min(1.0, 3 * (total_steps - step) / total_steps))


#: Schedules, and the first step before which rates of 3 and 6 epochs differ; a step after the end for none.
SCHEDULES: dict[Callable[[Optimizer, int], LRScheduler], int] = {
    constant: CUT_STEPS + 1,
    drops_at_fixed_epochs: CUT_STEPS + 1,
    drops_at_shares: CUT_STEPS // 2,
    drops_at_the_end_of_an_epoch: CUT_STEPS // 3,
    table: CUT_STEPS + 1,
    chained: CUT_STEPS + 1,
    warm_up_and_cosine: WARM_UP + 1,
    flat_then_linear: CUT_STEPS * 2 // 3 + 1,
    cosine: 1,
    one_cycle: 1,
}


@pytest.fixture(
    params=[
        pytest.param((make, kind), marks=[pytest.mark.thorough] if kind is TinyAdam and number else [])
        for kind in (Tiny, TinyAdam)
        for number, make in enumerate(SCHEDULES)
    ],
    ids=lambda p: f"{p[0].__name__}-{p[1].name}",
)
def schedule(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Optimizer, int], LRScheduler]:
    """One of them, used by the workload ``scheduled``."""
    make, kind = request.param
    use(kind, make, monkeypatch)
    found: Callable[[Optimizer, int], LRScheduler] = make
    return found


def use(kind: type[Tiny], make: Callable[[Optimizer, int], LRScheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        WORKLOADS, "scheduled", Entry(home=f"{__name__}:Scheduled", default_epochs=FULL, description="")
    )
    monkeypatch.setitem(
        globals(),
        "Scheduled",
        type(
            "Scheduled",
            (kind,),
            {
                "name": "scheduled",
                "make_scheduler": lambda self, optimizer, total_steps: make(optimizer, total_steps),
            },
        ),
    )


def dense(epochs: int) -> TrialConfig:
    return TrialConfig(workload="scheduled", epochs=epochs, method="none")


def stops(epochs: int, threshold: float) -> TrialConfig:
    given = {f"CAC_VAR_{name}_THR": threshold for name in ("START", "MT", "SLOPE")}
    return replace(dense(epochs), method="gradskip", CAC_VAR_START_ITR=2, CAC_VAR_SAMPLES=1, **given)


def over(tree: Path, config: TrialConfig, **sharing: Any) -> SharedRun:
    """Train over the tree in a study of ``FULL`` epochs; rows and weights must be those of the run alone."""
    of_epochs = FULL if config.epochs < FULL else None
    with SharedRun(config, Sharing(tree=tree, of_epochs=of_epochs, **{"trials": 10**6, **sharing})) as trial:
        rows = facts(finish(trial))
        with TrainingRun(config) as alone:
            assert rows == facts(finish(alone))
            if trial.run is not None:
                own = trial.run.model.state_dict()
                assert all(torch.equal(value, own[name]) for name, value in alone.model.state_dict().items())
                assert trial.run.scheduler.state_dict() == alone.scheduler.state_dict()
    return trial


@pytest.mark.slow
def test_it_trains_from_the_first_step_that_differs(
    schedule: Callable[[Optimizer, int], LRScheduler], tmp_path: Path
) -> None:
    full = over(tmp_path, dense(FULL), checkpoint_every_s=0)  # a checkpoint every epoch
    common = min(SCHEDULES[schedule], CUT_STEPS)
    entries = [entry.step for entry in full.checkpoints.entries(full.store.root)]
    begin = max((step for step in entries if step < SCHEDULES[schedule] and step < CUT_STEPS), default=0)
    begin = begin if common > 1 else 0
    cut = over(tmp_path, dense(CUT))
    assert cut.trained_steps == CUT_STEPS - begin
    assert cut.store.root != full.store.root
    assert over(tmp_path, dense(CUT)).trained_steps == 0
    # What the rule read there is what it reads alone.
    for threshold in (0.97, 0.99, 0.999):
        over(tmp_path, stops(CUT, threshold))


def test_it_is_counted_as_what_it_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    over(tmp_path, dense(FULL), checkpoint_every_s=0)
    cut = over(tmp_path, dense(CUT))
    assert cut.row is not None
    assert 0 < cut.row["search_flops"] <= cut.row["executed_flops"] / CUT  # the last epoch at most


@pytest.mark.parametrize(("planned", "trained"), [((CUT,), 1), ((), CUT_STEPS - 1)])
def test_where_checkpoints_are_rare_there_is_one_before_the_last_step_of_a_planned_cut_run(
    planned: tuple[int, ...], trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer to write than many steps to train."""
    monkeypatch.setattr(checkpoint_policy, "checkpoint_interval", lambda **_: 10**9)
    use(Tiny, constant, monkeypatch)
    over(tmp_path, dense(FULL), cut_epochs=planned)
    assert over(tmp_path, dense(CUT)).trained_steps == trained


def test_without_checkpoints_signals_and_rows_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    over(tmp_path, dense(FULL), budget_bytes=0)
    with SharedRun(dense(CUT), Sharing(tree=tmp_path, of_epochs=FULL, budget_bytes=0)) as trial:
        rows = [trial.train_epoch() for _ in range(CUT - 1)]
        assert trial.trained_steps == 0
        assert [row["epoch"] for row in rows] == [1, 2]


def test_one_that_begins_beside_the_full_run_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    claims, trained = Leases(), {}

    def train(name: str, config: TrialConfig, of_epochs: int | None, go_on: threading.Event) -> None:
        sharing = Sharing(
            tree=tmp_path,
            of_epochs=of_epochs,
            trials=10**6,
            checkpoint_every_s=0,
            awaits_full_run=of_epochs is not None,
        )
        with SharedRun(config, sharing, claims=claims, holder=name) as trial:
            while not trial.finished:
                trial.train_epoch()
                go_on.wait(timeout=30)
            trained[name] = trial.trained_steps

    go_on = threading.Event()
    cut = threading.Thread(target=train, args=("cut", dense(CUT), FULL, go_on))
    cut.start()  # even a little earlier
    full = threading.Thread(target=train, args=("full", dense(FULL), None, go_on))
    full.start()
    go_on.set()
    for thread in (full, cut):
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert trained["full"] == FULL * STEPS_PER_EPOCH
    assert trained["cut"] <= STEPS_PER_EPOCH


def test_one_of_other_schedules_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, cosine, monkeypatch)
    claims = Leases()
    full = SharedRun(dense(FULL), Sharing(tree=tmp_path), claims=claims, holder="full")
    full.train_epoch()
    with SharedRun(dense(CUT), Sharing(tree=tmp_path, of_epochs=FULL), claims=claims, holder="cut") as trial:
        finish(trial)
        assert trial.trained_steps == CUT_STEPS
    full.close()


def test_a_full_run_that_ended_halfway_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    with SharedRun(dense(FULL), Sharing(tree=tmp_path, trials=10**6, checkpoint_every_s=0), claims=Leases()) as full:
        full.train_epoch()
        full.train_epoch()
    cut = over(tmp_path, dense(CUT))
    assert cut.trained_steps <= 2 * STEPS_PER_EPOCH
    assert StageStore(tmp_path, cut.store.root).first().refresh()


def test_nothing_is_taken_where_it_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    over(tmp_path, dense(FULL))
    with SharedRun(dense(CUT), Sharing(tree=tmp_path)) as trial:
        finish(trial)
        assert trial.trained_steps == CUT_STEPS


def interpolated(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """A schedule whose state has numbers of numpy, which no checkpoint is read with."""
    return LambdaLR(optimizer, lambda step: np.interp(step, [0, 10], [0.1, 1.0]))


def test_checkpoints_that_cannot_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, interpolated, monkeypatch)
    over(tmp_path, dense(FULL), checkpoint_every_s=0)
    with pytest.warns(UserWarning, match="a checkpoint of the stage tree cannot be loaded"):
        cut = over(tmp_path, dense(CUT))
    assert cut.trained_steps == CUT_STEPS


class Scaled(SGD):
    """An optimizer with a tensor of several elements in its groups."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        for group in self.param_groups:
            group["scale"] = torch.ones(2)


class WithTensors(Tiny):
    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return Scaled(named_parameters, lr=0.1, momentum=0.9)


def test_groups_may_have_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(WithTensors, constant, monkeypatch)
    over(tmp_path, dense(FULL), checkpoint_every_s=0)
    assert over(tmp_path, dense(CUT)).trained_steps <= STEPS_PER_EPOCH


class Anneals(ConstantLR):
    """A schedule whose step does more than to set learning rates."""

    def __init__(self, optimizer: Optimizer, total_steps: int) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer, factor=1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step()
        self.optimizer.state["anneal"]["share"] = self.last_epoch / self.total_steps


def test_a_schedule_that_acts_on_more_than_rates_has_no_common_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Tiny, Anneals, monkeypatch)
    over(tmp_path, dense(FULL), checkpoint_every_s=0)
    assert over(tmp_path, dense(CUT)).trained_steps == CUT_STEPS


def test_a_schedule_that_cannot_be_compared_is_said_and_trained_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def once_a_length(optimizer: Optimizer, total_steps: int) -> LRScheduler:
        made.append(total_steps)
        if made.count(FULL * STEPS_PER_EPOCH) > 2 and total_steps > CUT_STEPS:  # trained twice, here and alone
            raise RuntimeError("no more")
        return constant(optimizer, total_steps)

    use(Tiny, once_a_length, monkeypatch)
    over(tmp_path, dense(FULL))
    with pytest.warns(
        UserWarning, match="3 epochs is trained from its start, .* with that of 6: RuntimeError: no more"
    ):
        cut = over(tmp_path, dense(CUT))
    assert cut.trained_steps == CUT_STEPS


def test_nobody_waits_for_a_run_that_was_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    with SharedRun(dense(CUT), Sharing(tree=tmp_path, of_epochs=FULL), claims=Leases(), holder="cut") as trial:
        monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("it waited"))
        finish(trial)
    assert trial.trained_steps == CUT_STEPS


def test_rows_that_come_late_are_taken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Tiny, constant, monkeypatch)
    stopped = replace(
        dense(FULL), method="gradskip", CAC_STOP_LAYER_NUM=(0,), CAC_STOP_LAYER_ITR=(STEPS_PER_EPOCH - 1,)
    )
    over(tmp_path, stopped, checkpoint_every_s=0)  # the first epoch's steps without its row
    with SharedRun(dense(CUT), Sharing(tree=tmp_path, of_epochs=FULL)) as trial:
        assert trial._common is not None
        assert trial._common.take(trial.path.here)
        assert (trial.path.here.known_until, list(trial.path.here.rows)) == (STEPS_PER_EPOCH, [])
    over(tmp_path, dense(FULL), checkpoint_every_s=0)
    assert over(tmp_path, dense(CUT)).trained_steps <= STEPS_PER_EPOCH
