"""`optimizer.gradskip.cache` in a training loop of a user's own, against the same loop without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
from trainables.gradskip.settings import Settings

#: Stem and two of three blocks, stopped in the middle of the second epoch.
STOP = Settings(stop_layer_num=(9,), stop_layer_itr=(4,), prefix_mode="eval")


def train(
    dataset: Any, *, cached: bool, epochs: int = 4, counter: AbstractContextManager[Any] | None = None
) -> tuple[list[Tensor], list[float], Any]:
    """A plain script, which also averages its weights over copies of the model; its passes run inside of `counter`."""
    torch.manual_seed(0)
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


def test_augmentation_switches_off_and_trains_as_without() -> None:
    with one_warning("forward cache off: inputs must repeat, but none of this epoch's were"):
        weights, losses, gradskip = train(Augmented(data()), cached=True)
    assert gradskip._cache.bytes == 0
    plain, plain_losses, _ = train(Augmented(data()), cached=False)
    assert gradskip._cache.hits == 0
    assert torch.tensor(losses).isfinite().all()
    assert len(weights) == len(plain)
    assert len(losses) == len(plain_losses)


def test_it_needs_the_model() -> None:
    model = Network()
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    with pytest.raises(UserError, match=r"gradskip\.cache keeps outputs of the model: give the optimizer model="):
        optimizer.gradskip.cache([])
