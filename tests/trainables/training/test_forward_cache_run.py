"""Runs with a forward cache: what is counted, what is trained, what a resumed run gives.

Digits: 599 samples in batches of 64, 10 steps an epoch; layer 11 ends the fourth of six convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thorough import rest_thorough
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training import run as run_module
from trainables.training.run import TrainingRun
from trainables.workloads.digits import Digits

SAMPLES = 599
STOP = {"CAC_STOP_LAYER_NUM": (11,), "CAC_STOP_LAYER_ITR": (9,)}  # at the end of the first epoch
MEASURED = ("train_time_s", "train_energy_j", "wall_time_s", "peak_memory_bytes")


def config_of(**more: Any) -> TrialConfig:
    return TrialConfig(**{"epochs": 4, "forward_cache_mb": 10, **more})


def weights(run: TrainingRun) -> list[Tensor]:
    return [tensor.clone() for tensor in run.model.state_dict().values()]


def train(config: TrialConfig) -> tuple[list[dict[str, Any]], list[Tensor]]:
    rows = []
    with TrainingRun(config) as run:
        while not run.finished:
            rows.append({name: value for name, value in run.train_epoch().items() if name not in MEASURED})
        return rows, weights(run)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("method", rest_thorough(["none", "gradskip"]))
def test_with_nothing_stopped_it_is_the_run_without(method: str) -> None:
    rows, trained = train(config_of(method=method, epochs=2))
    plain_rows, plain = train(config_of(method=method, epochs=2, forward_cache_mb=0))
    assert rows == plain_rows
    assert same(trained, plain)


@pytest.mark.slow
def test_it_trains_what_a_prefix_in_eval_mode_trains() -> None:
    """Against a run without the cache whose prefix is put in eval mode by hand."""
    rows, cached = train(config_of(**STOP))
    with TrainingRun(config_of(forward_cache_mb=0, **STOP)) as run:
        evaluated = [run.train_epoch()["quality"]]
        stopped = list(run.model.children())[:12]  # four convolutions, norms and ReLUs
        for module in stopped:
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, assignment, misc]
            module.training = False
        while not run.finished:
            evaluated.append(run.train_epoch()["quality"])
        by_hand = weights(run)
    assert same(cached, by_hand)
    assert [row["quality"] for row in rows] == evaluated


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("stops", [STOP, {"CAC_STOP_LAYER_NUM": (5, 11), "CAC_STOP_LAYER_ITR": (9, 23)}])
def test_a_resumed_run_trains_the_same_weights_bit_for_bit(stops: dict[str, Any], tmp_path: Path) -> None:
    """Its cache starts empty, so it computes more; everything else is equal."""
    config = config_of(**stops)
    rows, trained = train(config)
    for cut in (1, 2, 3):
        folder = tmp_path / str(cut)
        folder.mkdir()
        with TrainingRun(config) as run:
            for _ in range(cut):
                run.train_epoch()
            run.save(folder)
        with TrainingRun(config) as run:
            run.load(folder)
            while not run.finished:
                row = run.train_epoch()
            assert same(weights(run), trained)
        assert {name for name in rows[-1] if row[name] != rows[-1][name]} <= {
            "forward_flops", "executed_flops", "search_flops", "compute_saved"
        }  # fmt: skip
        assert row["forward_flops"] >= rows[-1]["forward_flops"]


@pytest.mark.thorough
@pytest.mark.slow
def test_flops_are_those_that_run() -> None:
    """Counted on the real steps: the epoch of the stop, the one that computes and those that read."""
    config = config_of(**STOP)
    train(config)  # counts every set of stopped layers, and keeps the counts
    with TrainingRun(config) as run:
        for epoch in range(4):
            for batch in run._batches():
                before = run.executed_flops
                with FlopCounterMode(display=False) as counter:
                    run._step(batch)
                assert run.executed_flops - before == counter.get_total_flops(), run.cost.counts["step"]
            run.epoch = epoch + 1
        assert run.forward_cache is not None
        assert (run.forward_cache.hits, run.forward_cache.misses) == (2 * SAMPLES, SAMPLES)
        assert run.forward_cache.bytes == SAMPLES * 4096


@pytest.mark.thorough
@pytest.mark.slow
def test_savings_pass_two_thirds() -> None:
    """Everything but the classifier stopped: without a cache the forward pass remains, a third of the FLOPs."""
    config = {"epochs": 10, "CAC_STOP_LAYER_NUM": (17,), "CAC_STOP_LAYER_ITR": (9,)}
    cached, _ = train(config_of(**config))
    plain, _ = train(config_of(**config, forward_cache_mb=0))
    assert plain[-1]["compute_saved"] < 2 / 3 < 0.75 < cached[-1]["compute_saved"] < 0.9
    assert cached[-1]["dense_flops"] == plain[-1]["dense_flops"]
    assert cached[-1]["backward_flops"] == plain[-1]["backward_flops"]
    # An epoch's reading costs the classifier alone, and its gradients of weight and input (of none: all is stopped).
    classifier = 2 * 32 * 10
    assert cached[-1]["executed_flops"] - cached[-2]["executed_flops"] == SAMPLES * 2 * classifier


@pytest.mark.slow
@pytest.mark.thorough
def test_the_file_is_gone_after_the_run() -> None:
    with TrainingRun(config_of(**STOP)) as run:
        run.train_epoch()
        run.train_epoch()
        cache = run.forward_cache
        assert cache is not None
        assert (cache.rows(True), cache.rows(False)) == (SAMPLES, SAMPLES)
        assert cache.bytes == 2 * SAMPLES * 4096
    assert (cache.bytes, cache.enabled) == (0, False)


class Shifted(Digits):
    """Digits moved by up to a pixel, another way each epoch: augmentation by a workload that denies it."""

    def train_batches(self, epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in super().train_batches(epoch, seed):
            yield images.roll(epoch % 3 - 1, dims=-1), labels


@pytest.mark.slow
@pytest.mark.thorough
def test_augmentation_makes_it_the_run_without_after_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "build_for", lambda *_: Shifted())
    with TrainingRun(config_of(**STOP)) as run:
        run.train_epoch()
        run.train_epoch()
        assert run.forward_cache is not None
        assert run.forward_cache.enabled
        run.model.train()
        with pytest.warns(UserWarning, match="forward cache off: inputs must repeat"):
            run._step(next(run._batches()))
        batch = next(run._batches())
        at_that_time = copy.deepcopy(run.model)
        assert torch.equal(run._step(batch), F.cross_entropy(at_that_time(batch[0]), batch[1]))
        run.train_epoch()
        assert run.forward_cache.hits == 0


def test_inputs_that_nobody_says_repeat_are_refused() -> None:
    message = "forward_cache_mb must be 0, got 10, for workload text, whose inputs do not repeat"
    with pytest.raises(UserError, match=message):
        TrainingRun(config_of(workload="text"))
