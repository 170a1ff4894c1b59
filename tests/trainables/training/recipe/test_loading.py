"""Batches by worker processes: the same ones, from any step on, and nothing left behind."""

from __future__ import annotations

import multiprocessing
from itertools import islice
from pathlib import Path

import pytest
import torch
from image_files import noise, write_parquet

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe import recipe
from trainables.training.recipe.recipe import BatchLoader
from trainables.training.run import TrainingRun
from trainables.workloads import build
from trainables.workloads.base import Batch, Workload


@pytest.fixture
def images(tmp_path: Path) -> Workload:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}-0.parquet", list(noise(30, 8)), [number % 3 for number in range(30)])
    return build("images", (f"data={tmp_path}", "batch_size=4", f"cache={tmp_path / 'cache'}"))


def equal(found: list[Batch], expected: list[Batch]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_batches_from_any_step(images: Workload, workers: int) -> None:
    loader = BatchLoader(images, seed=3, workers=workers)
    state = torch.get_rng_state()
    for epoch, start in ((0, 0), (0, 5), (2, 1)):
        expected = list(islice(images.train_batches(epoch, 3), start, None))
        assert equal(list(loader.batches(epoch, start)), expected)
    assert torch.equal(torch.get_rng_state(), state)
    loader.close()
    assert not multiprocessing.active_children()


def test_a_run_ends_its_workers_in_the_middle_of_an_epoch() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=1, loader_workers=2)) as run:
        run.begin_epoch()
        run.train_step()
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_the_default_is_the_workloads(images: Workload) -> None:
    assert BatchLoader(images, 0).workers == 0
    images.loader_workers = 1
    assert BatchLoader(images, 0).workers == 1


def test_workers_for_a_loader_of_its_own_are_refused() -> None:
    with pytest.raises(UserError, match=r"loader_workers must be 0 for workload text, .* got 2: leave it out"):
        BatchLoader(build("text"), 0, workers=2)
    assert BatchLoader(build("text"), 0, workers=0).workers == 0


def test_a_platform_that_cannot_fork_loads_in_the_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.warns(UserWarning, match="loader_workers=2 has no effect: this platform cannot fork"):
        assert BatchLoader(build("digits"), 0, workers=2).workers == 0


@pytest.mark.parametrize("workload", ["digits", "text"])
def test_pinned_batches_are_asked_for_wherever_they_come_from(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: that the memory is asked for is what can be seen."""
    pinned, options = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(1) or self)
    real = recipe.DataLoader

    def noted(*arguments: object, **keywords: object) -> object:
        options.append(keywords.pop("pin_memory"))
        return real(*arguments, **keywords)

    monkeypatch.setattr(recipe, "DataLoader", noted)
    next(iter(BatchLoader(build(workload), 0, pin_memory=True).batches(0, 0)))
    assert (options, len(pinned)) == (([True], 0) if workload == "digits" else ([], 2))
