"""The scheduler's state: a loop that goes on from any step, thinned weights, and what has not acted."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from compression_schedules import ranked, sections, span
from torch import nn

from trainables.compression.scheduler import CompressionScheduler


def step(scheduler: CompressionScheduler, epoch: int, minibatch: int, per_epoch: int = 3) -> None:
    model, optimizer = scheduler.model, scheduler.optimizer
    assert optimizer is not None
    if minibatch == 0:
        scheduler.on_epoch_begin(epoch)
    scheduler.on_minibatch_begin(epoch, minibatch, per_epoch)
    x = torch.sin(torch.arange(4 * 2 * 3 * 3) * (1.0 + epoch * per_epoch + minibatch)).view(4, 2, 3, 3)
    loss = scheduler.before_backward_pass(epoch, minibatch, per_epoch, model(x).square().mean())
    optimizer.zero_grad()
    loss.backward()
    scheduler.before_parameter_optimization(epoch, minibatch, per_epoch)
    optimizer.step()
    scheduler.on_minibatch_end(epoch, minibatch, per_epoch)
    if minibatch == per_epoch - 1:
        scheduler.on_epoch_end(epoch, metrics={"min": 1.0 / (epoch + 1), "max": 0.5})


def small(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
        )
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


EVERYTHING = sections(
    [
        span("pruner", "s", 0, 3, use_double_copies=True, mini_batch_pruning_frequency=2),
        span("pruner", "g", 1, 3),
        span("regularizer", "r", 0, 2),
        span("lr_scheduler", "l", 0, 4),
        span("extension", "x", 1, 2),
        span("quantizer", "q", 2, 4),
    ],
    pruners={
        "s": {"class": "SplicingPruner", "sensitivities": {"5.weight": 0.1}, "low_thresh_mult": 0.5,
              "hi_thresh_mult": 0.8},
        "g": ranked("RandomRankedFilterPruner", weights=["0.weight"]),
    },
    regularizers={"r": {"class": "L1Regularizer", "reg_regims": {"2.weight": 0.02}, "threshold_criteria": "Max"}},
    lr_schedulers={"l": {"class": "ReduceLROnPlateau", "patience": 0}},
    extensions={"x": {"class": "FilterRemover"}},
    quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:thinning changed")
@pytest.mark.parametrize("cut", range(1, 12))
def test_a_loop_of_the_users_goes_on_from_any_step(cut: int) -> None:
    """Model, optimizer and scheduler through a file, in a process with another seed's model."""
    model, optimizer = small(0)
    scheduler = CompressionScheduler.from_schedule(model, optimizer, EVERYTHING)
    file = io.BytesIO()
    for number in range(12):
        if number == cut:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "scheduler": scheduler.state_dict()}, file)
        step(scheduler, number // 3, number % 3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, again_optimizer = small(1)
    other = CompressionScheduler.from_schedule(again, again_optimizer, EVERYTHING)
    other.prepare_structure(state["scheduler"])
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    other.load_state_dict(state["scheduler"])
    for number in range(cut, 12):
        step(other, number // 3, number % 3)
    assert isinstance(again, nn.Sequential)
    assert again[0].out_channels == 2  # thinned
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in again_optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:thinning changed")
def test_what_is_left_of_a_thinned_weight_stays_pruned() -> None:
    """Masks and unmasked copies are cut as their weights are, and outlive that, too."""
    for args in ({}, {"use_double_copies": True}):
        model, optimizer = small(0)
        with torch.no_grad():  # half of each filter and channel is small
            small_ones = (torch.arange(4).view(4, 1) + torch.arange(4)) % 2
            model.get_parameter("2.weight").copy_((0.9 * small_ones + 0.1).view(4, 4, 1, 1))
        schedule = sections(
            [span("pruner", "e", 0, 1, **args), span("pruner", "f", 1, 2), span("extension", "x", 1, 2)],
            pruners={
                "e": {"class": "SparsityLevelParameterPruner", "levels": {"2.weight": 0.5}},
                "f": ranked("L1RankedStructureParameterPruner", weights=["0.weight"]),
            },
            extensions={"x": {"class": "FilterRemover"}},
        )
        scheduler = CompressionScheduler.from_schedule(model, optimizer, schedule)
        for minibatch in range(3):
            step(scheduler, 0, minibatch)
        before = scheduler.masks.get("2.weight")
        assert before is not None
        assert int((before == 0).sum()) == 8
        scheduler.on_epoch_begin(1)
        kept = scheduler.masks.get("0.weight").flatten(1).any(1)  # type: ignore[union-attr]
        assert int(kept.sum()) == 2
        for number in range(3, 12):
            step(scheduler, number // 3, number % 3)
        weight = model.get_parameter("2.weight")
        assert weight.shape == (4, 2, 1, 1)
        assert torch.equal(weight == 0, before[:, kept] == 0)


def test_what_has_not_acted_has_no_state() -> None:
    """Schedules that differ in what comes later go on from one state, other classes included."""
    early = span("pruner", "s", 0, 1)
    first = sections(
        [early, span("pruner", "b", 2, 3)],
        pruners={"s": {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}},
                 "b": ranked("BernoulliFilterPruner", weights=["2.weight"])},
    )  # fmt: skip
    second = sections(
        [early, span("quantizer", "q", 2, 3)],
        pruners={"s": {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}}},
        quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
    )
    model, optimizer = small(0)
    writer = CompressionScheduler.from_schedule(model, optimizer, first)
    for number in range(6):
        step(writer, number // 3, number % 3)
    state = writer.state_dict()
    assert set(state["components"]) == {"pruners.s"}
    assert set(state["policies"]) == {"0"}
    reader = CompressionScheduler.from_schedule(copy.deepcopy(model), optimizer, second)
    reader.prepare_structure(state)
    reader.load_state_dict(state)
    assert reader.has_acted
    assert torch.equal(reader.masks.get("0.weight"), writer.masks.get("0.weight"))  # type: ignore[arg-type]


def test_before_change_comes_before_the_first_change_and_model_changed_after_each() -> None:
    log: list[Any] = []
    model, optimizer = small(0)
    schedule = sections(
        [span("pruner", "g", 1, 2), span("quantizer", "q", 2, 3)],
        pruners={"g": ranked("GradientRankedFilterPruner", weights=["0.weight"])},
        quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
    )
    scheduler = CompressionScheduler.from_schedule(
        model,
        optimizer,
        schedule,
        before_change=lambda: log.append(("before", bool(model[0].weight._backward_hooks))),
        model_changed=lambda: log.append(("changed", [type(m).__name__ for m in model])),
    )
    for number in range(12):
        step(scheduler, number // 3, number % 3)
        if number == 0:
            assert log == [("before", False)]  # in the epoch before the first that prunes it looks already
    assert [what for what, _ in log] == ["before", "changed"]
    assert log[1][1] == [type(m).__name__ for m in model]
