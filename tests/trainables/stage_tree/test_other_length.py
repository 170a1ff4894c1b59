"""A cut run takes the start that it has in common with the full run, and is the run alone all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import facts, finish
from tiny_workload import STEPS_PER_EPOCH, Tiny, TinyAdam
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
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
from trainables.stage_tree.leases import Leases
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun

FULL, CUT = 6, 3
CUT_STEPS = CUT * STEPS_PER_EPOCH
WARM_UP = 10


def constant(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0)


def drops_at_fixed_epochs(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [2 * STEPS_PER_EPOCH, 4 * STEPS_PER_EPOCH], gamma=0.1)


def drops_at_shares(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [total_steps // 2], gamma=0.1)


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
    warm_up_and_cosine: WARM_UP + 1,
    flat_then_linear: CUT_STEPS * 2 // 3 + 1,
    cosine: 1,
    one_cycle: 1,
}


@pytest.fixture(
    params=[(make, kind) for make in SCHEDULES for kind in (Tiny, TinyAdam)],
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


def over(tree: Path, config: TrialConfig, **sharing: int) -> SharedRun:
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
        sharing = Sharing(tree=tmp_path, of_epochs=of_epochs, trials=10**6, checkpoint_every_s=0)
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
