"""`optimizer.gradskip.cache` in a training loop of a user's own, against the same loop without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
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

import tune_cac as cac
from trainables.errors import UserError
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.settings import Settings

#: Stem and two of three blocks, stopped in the middle of the second epoch.
STOP = Settings(stop_layer_num=(9,), stop_layer_itr=(4,), prefix_mode="eval")


def train(dataset: Any, *, cached: bool, epochs: int = 4) -> tuple[list[Tensor], list[float], Any]:
    """A plain script, which also averages its weights over copies of the model."""
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
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
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


def test_flops_are_counted_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
    found = []
    for cached in (False, True):
        monkeypatch.setattr(process_record, "_PROCESS", process_record.ProcessRecord())
        train(data(), cached=cached)
        found.append({k: v for k, v in summary_of(process_record._PROCESS).items() if "flops" in k})
        end_counting(process_record._PROCESS)
    assert found[0] == found[1]


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
