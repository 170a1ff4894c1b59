"""Two gloo processes: they stop as one, equal one process on the joint batch, and send what is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_worker
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from trainables.errors import UserError
from trainables.gradskip import SGD, DistributedDataParallel, Settings

WORKER = Path(parallel_worker.__file__)


#: Stops that each case comes to.
CASES = {
    "auto": 3, "braking": 2, "whole": 3, "accumulating": 2, "norms": None, "sharded-auto": 3, "sharded-braking": 2,
    "sharded-norms": None, "static": 3, "static-later": 2, "no-sync-at-a-stop": 2,
}  # fmt: skip


def run(folder: Path, *cases: str) -> str:
    """Train them in two processes; what these printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(WORKER), str(folder), *cases], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def results(folder: Path, case: str) -> list[dict[str, Any]]:
    """Of both processes."""
    return [torch.load(folder / f"{case}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every case that ends well, in the same two processes; where the results are, and what was printed."""
    folder = tmp_path_factory.mktemp("together")
    return folder, run(folder, *CASES, "disagreeing", "join", "join-after")


def one_process(case: str) -> dict[str, Any]:
    """The same training in this process, on the joint batch, and torch knows of no other."""
    kind, settings = parallel_worker.CASES[case]
    model = parallel_worker.make_model()
    optimizer: Any = parallel_worker.make_optimizer(kind, model, settings)
    for x, y in parallel_worker.joint_batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {
        "weights": [p.detach() for p in model.parameters()],
        "events": [(e.iteration, e.layer, e.name) for e in optimizer.gradskip.events],
        "requires_grad": [p.requires_grad for p in model.parameters()],
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_processes_agree_and_equal_one_on_the_joint_batch(case: str, together: tuple[Path, str]) -> None:
    folder, printed = together
    first, second = results(folder, case)
    alone = one_process(case)
    assert first["error"] is None
    assert "Warning: " not in printed.replace("FutureWarning", ""), printed
    assert len(alone["events"]) == CASES[case] or (CASES[case] is None and alone["events"])
    assert first["events"] == second["events"] == alone["events"]
    assert first["requires_grad"] == second["requires_grad"] == alone["requires_grad"]
    assert not all(first["requires_grad"])
    for a, b, c in zip(first["weights"], second["weights"], alone["weights"], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-12)
    if not case.startswith("sharded"):
        # Bytes sent at a step are those of the parameters that train in it, before and after every stop.
        assert first["sent"] == second["sent"] == [8 * numbers for numbers in first["live"]]
        assert len(set(first["sent"])) == len(alone["events"]) + 1
        again = {"accumulating": 16, "no-sync-at-a-stop": 2}.get(case, 0)
        assert first["forwards"] == 16 + again  # a hook of the user's outlives the stops
        assert all(key.startswith("module.") for key in first["keys"])


@pytest.mark.slow
def test_processes_whose_measurements_differ_decide_as_one(together: tuple[Path, str]) -> None:
    first, second = results(together[0], "disagreeing")
    assert first["events"] == second["events"]
    assert len(first["events"]) >= 1
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


def test_powersgd_is_refused() -> None:
    model = nn.Linear(2, 2)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        parallel = DistributedDataParallel(model, SGD(model.parameters(), lr=0.1, settings=Settings(start_thr=-1)))
        with pytest.raises(UserError, match="PowerSGD keeps what it knows of buckets that a stop changes"):
            parallel.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_uneven_processes_are_refused_while_a_stop_may_come(together: tuple[Path, str]) -> None:
    for found in results(together[0], "join"):
        assert found["steps"] == 0
        assert found["error"].startswith("join() lets processes end one by one, and a stop needs all of them: give ")
    assert [(found["steps"], found["error"]) for found in results(together[0], "join-after")] == [(2, ""), (3, "")]


@pytest.mark.parametrize("option", [{"mixed_precision": object()}, {"delay_all_reduce_named_params": []}])
def test_what_cannot_be_built_anew_is_refused(option: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(start_thr=-1))
    with pytest.raises(UserError, match=f"is built anew at every stop, which {next(iter(option))} does not allow"):
        DistributedDataParallel(model, optimizer, **option)


@pytest.mark.thorough
@pytest.mark.slow
def test_torchs_own_wrapper_is_warned_of_ours(tmp_path: Path) -> None:
    printed = run(tmp_path, "plain")
    first, _ = results(tmp_path, "plain")
    assert "use tune_cac.gradskip.DistributedDataParallel(model, optimizer)" in printed
    assert "Expected to have finished reduction" in first["error"]


@pytest.mark.thorough
@pytest.mark.slow
def test_plasticity_of_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"UserError: CAC_RULE must not be plasticity for a sharded model"):
        run(tmp_path, "sharded-plasticity")


def test_an_optimizer_without_gradient_skip_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="follows an optimizer with Gradient-Skip, got SGD without: use"):
        DistributedDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_model_is_refused() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1, settings=Settings(start_thr=-1))
    with pytest.raises(UserError, match="must be the model whose parameters the optimizer has"):
        DistributedDataParallel(nn.Linear(2, 2), optimizer)
