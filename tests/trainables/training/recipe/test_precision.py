"""Mixed precision against torch's own loop, and steps whose gradients overflow."""

from __future__ import annotations

import pytest
import torch
from thorough import rest_thorough
from torch import nn
from torch.nn import functional as F

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe import recipe as module
from trainables.training.recipe.recipe import MixedPrecision
from trainables.training.run import TrainingRun

CPU = torch.device("cpu")
STEPS = 4


def plain_loop(precision: str, clip: float | None) -> list[torch.Tensor]:
    """The loop of torch's documentation: autocast, scale, unscale, clip, step, update."""
    with TrainingRun(TrialConfig(method="none", epochs=1)) as run:  # model, data and seed
        model, optimizer, scheduler = run.model, run.optimizer, run.scheduler
        model.train()
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
        for (images, labels), _ in zip(run.workload.train_batches(0, 0), range(STEPS), strict=False):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("clip", rest_thorough([0.3, None]))
@pytest.mark.parametrize("precision", rest_thorough(["bfloat16", "float32", "float16"]))
def test_a_run_is_the_loop_of_torchs_documentation(precision: str, clip: float | None) -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, precision=precision, clip_grad_norm=clip)) as run:
        run.begin_epoch()
        for _ in range(STEPS):
            run.train_step()
        found = [p.detach().clone() for p in run.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, plain_loop(precision, clip), strict=True))


def overflowing() -> tuple[MixedPrecision, nn.Linear, torch.optim.Optimizer, list[int]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    precision = MixedPrecision("float16", CPU)
    precision.watch(optimizer)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return precision, model, optimizer, calls


def test_a_step_that_overflows_changes_nothing_and_is_still_a_step() -> None:
    precision, model, optimizer, calls = overflowing()
    before = [p.detach().clone() for p in model.parameters()]
    scale = precision.state_dict()["scale"]
    precision.scaled(model(torch.ones(1, 2)).sum() * 1e38).backward()
    precision.unscale(optimizer)
    precision.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert precision.state_dict()["scale"] == scale / 2
    assert calls == [1]


def test_the_scale_continues_from_a_state() -> None:
    precision, model, optimizer, _ = overflowing()
    precision.scaled(model(torch.ones(1, 2)).sum() * 1e38).backward()
    precision.step(optimizer)
    again = MixedPrecision("float16", CPU)
    again.load_state_dict(precision.state_dict())
    assert again.state_dict() == precision.state_dict()


def test_a_step_in_which_nothing_trains_is_no_error() -> None:
    precision, _, optimizer, calls = overflowing()
    precision.unscale(optimizer)
    precision.step(optimizer)
    assert calls == [1]


def test_a_device_that_cannot_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError('"slow_conv2d_cpu" not implemented for Half\nmore')

    monkeypatch.setattr(module.nn.Conv2d, "forward", refuse)
    with pytest.raises(UserError, match=r"precision=float16 does not work on this device .*Half\): take .*float32"):
        MixedPrecision("float16", CPU)
    MixedPrecision("float32", CPU)


def test_a_gpu_without_bfloat16_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(UserError, match=r"compute capability 8\.0 or newer, got Tesla T4: take precision=float16"):
        MixedPrecision("bfloat16", torch.device("cuda"))


@pytest.mark.slow
def test_evaluations_are_of_the_weights_in_float32() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, precision="bfloat16")) as run:
        kinds = []
        run.model.register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
        run.train_epoch()
    assert kinds[0] == torch.bfloat16
    assert kinds[-1] == torch.float32
