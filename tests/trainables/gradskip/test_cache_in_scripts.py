"""`optimizer.gradskip.cache` in a training loop of a user's own, against the same loop without it."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from counted_loops import end_counting, summary_of
from prefix_caches import one_warning
from residual_factory import COUNT, Augmented, Network, data
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import tune_cac as cac
from trainables.errors import UserError
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.settings import OFF, Settings

#: Two layers, from the start.
FROZEN = Settings(stop_layer_num=(3,), stop_layer_itr=(-1,))
#: Stem and two of three blocks, stopped in the middle of the second epoch.
STOP = Settings(stop_layer_num=(9,), stop_layer_itr=(4,), prefix_mode="eval")


def train(
    dataset: Any, *, cached: bool, epochs: int = 4, counter: AbstractContextManager[Any] | None = None
) -> tuple[list[Tensor], list[float], Any]:
    """A plain script, which also averages its weights over copies of the model; its passes run inside of `counter`."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = Network()
    optimizer = cac.gradskip.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), STOP, model=model)
    average = copy.deepcopy(model)

    def over(loader: Iterable[Any]) -> Iterable[Any]:
        return optimizer.gradskip.cache(loader) if cached else loader  # type: ignore[attr-defined]

    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in over(DataLoader(dataset, batch_size=16, shuffle=True)):
            optimizer.zero_grad()
            with counter or nullcontext():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            for mine, new in zip(average.parameters(), copy.deepcopy(model).parameters(), strict=True):
                mine.data.lerp_(new.data, 0.1)
        model.eval()
        with torch.no_grad():
            losses += [float(F.cross_entropy(model(x), y)) for x, y in over(DataLoader(data(), batch_size=12))]
            losses += [float(average.eval()(x).sum()) for x, _ in over(DataLoader(data(), batch_size=12))]
    return [*model.state_dict().values()], losses, optimizer.gradskip  # type: ignore[attr-defined]


def test_it_trains_and_evaluates_as_without_bit_for_bit() -> None:
    weights, losses, gradskip = train(data(), cached=True)
    plain, plain_losses, _ = train(data(), cached=False)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert losses == plain_losses
    cache = gradskip._cache
    assert (cache.rows(True), cache.rows(False)) == (COUNT, COUNT)
    assert cache.hits >= COUNT
    assert math.isclose(cache.budget_bytes, psutil.virtual_memory().available / 5, rel_tol=0.5)


class Counted(AbstractContextManager[None]):
    """Torch's counter over each pass but the first, in which a cache looks at the model without any mode."""

    def __init__(self) -> None:
        self.flops: list[int] = []
        self._mode: FlopCounterMode | None = None

    def __enter__(self) -> None:
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *args: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*args)
            self.flops.append(self._mode.get_total_flops())
        self._mode = FlopCounterMode(display=False)


def test_flops_are_counted_as_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is executed equals torch's counter over every pass; the dense run is that without a cache."""
    executed, found = [], []
    for cached in (False, True):
        with monkeypatch.context() as inside:
            inside.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
            inside.setattr(process_record, "_PROCESS", process_record.ProcessRecord())
            train(data(), cached=cached)
            found.append(summary_of(process_record._PROCESS))
            end_counting(process_record._PROCESS)
        train(data(), cached=cached, counter=(counter := Counted()))
        executed.append(counter.flops[0] + sum(counter.flops))  # the first two passes are alike
    assert [one["forward_flops"] + one["backward_flops"] for one in found] == executed
    assert executed[1] < executed[0]
    names = ("backward_flops", "dense_flops", "dense_backward_flops", "sizes")
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


def counted(loop: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the optimizers of a loop count in a search."""
    with monkeypatch.context() as inside:
        inside.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
        inside.setattr(process_record, "_PROCESS", process_record.ProcessRecord())
        loop()
        found = summary_of(process_record._PROCESS)
        end_counting(process_record._PROCESS)
    return found


def layers(*widths: int) -> torch.nn.Sequential:
    pairs = itertools.pairwise(widths)
    return torch.nn.Sequential(*(part for a, b in pairs for part in (torch.nn.Linear(a, b), torch.nn.ReLU())))


def train_cached(net: torch.nn.Module, optimizer: Any, batches: list[Tensor], *, epochs: int) -> None:
    for _ in range(epochs):
        for x in optimizer.gradskip.cache(batches, budget_bytes=10**6):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    optimizer.gradskip._cache.close()


def test_a_prefix_that_the_user_froze_is_read_by_the_dense_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        net = layers(8, 8, 8, 8, 2)
        net[:4].requires_grad_(False)
        optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=OFF)
        batches = [torch.randn(4, 8) for _ in range(6)]
        train_cached(net, optimizer, batches, epochs=5)

    found = counted(loop, monkeypatch)
    assert found["forward_flops"] + found["backward_flops"] == found["dense_flops"]
    assert found["forward_flops"] < 5 * 6 * 2 * 4 * (3 * 64 + 16)  # and it was read


def test_the_dense_run_of_a_prefix_that_never_trained_computes_it_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loop() -> None:
        net = layers(8, 8, 8, 2)
        frozen = replace(FROZEN, stop_layer_num=(1,))
        optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=frozen)
        train_cached(net, optimizer, [torch.randn(4, 8) for _ in range(6)], epochs=5)

    found = counted(loop, monkeypatch)
    # 120 rows, three products a weight but for the gradient of the inputs.
    assert found["dense_flops"] == 120 * 2 * (3 * (64 + 64 + 16) - 64)
    assert found["forward_flops"] + found["backward_flops"] < 120 * 2 * (64 + 3 * (64 + 16) - 64)


def test_what_the_model_of_a_second_optimizer_reads_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        encoder, head = layers(8, 8, 8, 8), layers(8, 8, 2)
        last = cac.gradskip.SGD(head.parameters(), lr=1e-5, model=head, settings=OFF)
        first = cac.gradskip.SGD(encoder.parameters(), lr=1e-5, model=encoder, settings=FROZEN)
        batches = [torch.randn(4, 8) for _ in range(6)]
        for _ in range(5):
            for x in first.gradskip.cache(batches, budget_bytes=10**6):
                head(encoder(x)).sum().backward()
                for optimizer in (first, last):
                    optimizer.step()
                    optimizer.zero_grad()
        first.gradskip._cache.close()

    found = counted(loop, monkeypatch)
    # The first two passes are computed, those of 23 steps without the two layers of the prefix.
    assert found["forward_flops"] == 2 * 4 * (30 * (3 * 64 + 64 + 16) - 23 * 2 * 64)
    assert found["has_model"]


@pytest.mark.slow
@pytest.mark.thorough
def test_reads_of_many_sizes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        net = layers(8, 8, 8, 8, 2)
        optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
        batches = [torch.randn(rows, 8) for rows in range(16, 26)]  # fewer round otherwise
        train_cached(net, optimizer, batches, epochs=5)

    found = counted(loop, monkeypatch)
    rows = sum(range(16, 26))
    assert found["forward_flops"] < 0.75 * 5 * 2 * rows * (3 * 64 + 16)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("how", ["before", "in place", "afterwards"])
def test_compiled_models_are_counted_as_executed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(how: str) -> None:
        torch.manual_seed(0)
        net: Any = layers(8, 8, 8, 8, 2)
        called = torch.compile(net, backend="eager") if how == "before" else net
        if how == "in place":
            net.compile(backend="eager")
        optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
        if how == "afterwards":
            called = torch.compile(net, backend="eager")
        train_cached(called, optimizer, [torch.randn(16, 8) for _ in range(6)], epochs=3)
        torch.compiler.reset()

    found, plain = (counted(partial(loop, one), monkeypatch) for one in (how, "never"))
    names = ("forward_flops", "backward_flops", "dense_flops")
    assert [found[name] for name in names] == [plain[name] for name in names]
    assert plain["forward_flops"] == 2 * 16 * (18 * (3 * 64 + 16) - 11 * 2 * 64)  # seven of 18 steps compute the prefix


def test_steps_of_which_some_calls_read_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls a step; of the second epoch's steps one reads once, which alone is measured, the others twice."""

    def loop() -> None:
        net = layers(8, 8, 8, 8, 2)
        optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
        batches = [torch.randn(4, 8) for _ in range(6)]
        for _ in range(2):
            for number, x in enumerate(optimizer.gradskip.cache(batches, budget_bytes=10**6)):
                net(x).sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.gradskip._cache.close()

    found = counted(loop, monkeypatch)
    assert found["measured_steps"] < 6
    assert found["forward_flops"] == 2 * 4 * (12 * (3 * 64 + 16) - 5 * 2 * 64)


def test_a_dropout_behind_the_prefix_does_not_drop_what_is_kept() -> None:
    """The cut is one in training and in evaluation, though dropout does nothing in the latter."""
    net = torch.nn.Sequential(*layers(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=replace(FROZEN, stop_layer_num=(1,)))
    batches = [torch.randn(4, 8) for _ in range(3)]
    for _ in range(3):
        for x in optimizer.gradskip.cache(batches, budget_bytes=10**6):
            net.train()(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for x in optimizer.gradskip.cache(batches):
                net.eval()(x)
    assert optimizer.gradskip._cache.hits == 2 * 3 * 4
    optimizer.gradskip._cache.close()


def test_a_diverged_training_reads_on() -> None:
    net = layers(8, 8, 8, 2)
    net[0].weight.data.fill_(float("nan"))
    optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
    batches = [torch.randn(4, 8) for _ in range(3)]
    train_cached(net, optimizer, batches, epochs=3)
    assert optimizer.gradskip._cache.hits > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_augmentation_switches_off_and_trains_as_without() -> None:
    with one_warning("forward cache off: inputs must repeat, but none of this epoch's were"):
        weights, losses, gradskip = train(Augmented(data()), cached=True)
    assert gradskip._cache.bytes == 0
    plain, plain_losses, _ = train(Augmented(data()), cached=False)
    assert gradskip._cache.hits == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert losses == plain_losses


def test_a_prefix_that_is_in_training_mode_without_a_cache_is_named() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2)
    )
    net[:2].requires_grad_(False)
    optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=OFF)
    with one_warning("in training mode without a cache, are in evaluation mode: CAC_PREFIX_MODE=eval"):
        train_cached(net, optimizer, [torch.randn(4, 8) for _ in range(3)], epochs=2)


def test_loops_may_end_in_any_order_and_have_lengths() -> None:
    net = layers(8, 8, 8, 2)
    forward = net.forward
    optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
    few, many = (optimizer.gradskip.cache([torch.randn(4, 8) for _ in range(count)]) for count in (2, 3))
    assert [len(few), len(many)] == [2, 3]
    others = iter(many)
    for x in few:
        assert torch.equal(net(x), forward(x))
        assert torch.equal(net(read := next(others)), forward(read))
    assert net(next(others)).shape == (4, 2)
    assert next(others, None) is None
    assert "forward" not in vars(net)


def test_evaluation_alone_is_kept() -> None:
    net = layers(8, 8, 8, 2)
    optimizer = cac.gradskip.SGD(net.parameters(), lr=1e-5, model=net, settings=FROZEN)
    plain, batches = copy.deepcopy(net).eval(), [torch.randn(20, 8) for _ in range(3)]
    for _ in range(3):
        net.train()(batches[0]).sum().backward()
        optimizer.step()
        plain.load_state_dict(net.state_dict())
        with torch.no_grad():
            for x in optimizer.gradskip.cache(batches):
                assert torch.equal(net.eval()(x), plain(x))
    assert optimizer.gradskip._cache.rows(False) == 60


def test_it_needs_the_model() -> None:
    model = Network()
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    with pytest.raises(UserError, match=r"gradskip\.cache keeps outputs of the model: give the optimizer model="):
        optimizer.gradskip.cache([])
