"""Forward caches of a user's own model and data, which nobody described to the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from residual_factory import COUNT, Network
from thorough import rest_thorough
from torch import nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.prefix_cuts import recorded_cuts
from trainables.runtime.operator_flops import flop_counter
from trainables.training.run import TrainingRun
from trainables.workloads.factory import load

#: Stem and two of three blocks, which never train.
STOP = {"CAC_STOP_LAYER_NUM": (9,), "CAC_STOP_LAYER_ITR": (-1,)}
MEASURED = ("train_time_s", "train_energy_j", "wall_time_s", "peak_memory_bytes")


def config_of(how: str = "shuffled", **more: Any) -> TrialConfig:
    return TrialConfig(
        workload="residual_factory:make",
        workload_options=(f"how={how}",),
        **{"epochs": 4, "forward_cache_mb": 5, **more},
    )


def finish(run: TrainingRun) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    rows = []
    while not run.finished:
        rows.append({name: value for name, value in run.train_epoch().items() if name not in MEASURED})
    return rows, [tensor.clone() for tensor in run.model.state_dict().values()]


def without_modes(module: nn.Module) -> None:
    for part in module.modules():
        part.training = False
    module.train = lambda mode=True: module  # type: ignore[method-assign, assignment, misc]


@pytest.mark.parametrize("how", rest_thorough(["shuffled", "list", "workers"]))
def test_it_trains_what_the_frozen_part_in_eval_mode_trains(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingRun(config_of(how, **STOP)) as run:
        rows, cached = finish(run)
        assert run.forward_cache is not None
        assert run.forward_cache.cuts[run.forward_cache.cached_through].names[-1] == "blocks.1"
        computed = run.forward_cache.misses
        assert run.forward_cache.rows(False) == COUNT
    assert capsys.readouterr().err == f"forward cache: kept the prefix's outputs of {COUNT} samples, 0 MB\n"
    assert computed == COUNT
    with TrainingRun(config_of(how, method="none", forward_cache_mb=0)) as run:
        for module in (run.model.stem, run.model.blocks[0], run.model.blocks[1]):  # type: ignore[index]
            without_modes(module.requires_grad_(False))  # type: ignore[arg-type, operator]
        plain_rows, plain = finish(run)
    assert all(torch.equal(a, b) for a, b in zip(cached, plain, strict=True))
    assert [row["quality"] for row in rows] == [row["quality"] for row in plain_rows]
    assert rows[-1]["compute_saved"] > plain_rows[-1]["compute_saved"] + 0.1


@pytest.mark.parametrize("how", rest_thorough(["augmented", "augmented by workers"]))
def test_views_of_augmented_samples_repeat_and_are_read(how: str) -> None:
    """Two views: the third and fourth epoch read what the first two computed, and train as without a cache."""
    workload = load("residual_factory:make", (f"how={how}",))
    epochs = [sorted(row.sum().item() for batch in workload.train_batches(e, 7) for row in batch[0]) for e in range(3)]
    assert epochs[0] == epochs[2] != epochs[1]
    hold = {**STOP, "CAC_PREFIX_MODE": "eval", "seed": 7}
    trained = []
    for megabytes in (5, 0):
        with TrainingRun(config_of(how, **hold, forward_cache_mb=megabytes)) as run:
            run.train_epoch()
            trained.append(finish(run)[1])
            if run.forward_cache is not None:
                assert run.forward_cache.rows(True) == 2 * COUNT
                assert run.forward_cache.hits >= 2 * COUNT - 16
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_flops_are_those_that_torch_counts_over_all_steps() -> None:
    def train(how: str) -> int:
        with TrainingRun(config_of(how, **STOP)) as run, flop_counter() as counter:
            for _ in run.each_step():
                run.train_step()
        counted.append(run.executed_flops)
        return int(counter.get_total_flops())

    counted: list[int] = []
    train("shuffled")  # counts the steps' costs, which all later runs share
    assert train("shuffled") == counted[-1] == counted[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_resumed_run_trains_the_same_weights(tmp_path: Path) -> None:
    with TrainingRun(config_of(**STOP)) as run:
        run.train_epoch()
        run.save(tmp_path)
        _, whole = finish(run)
    with TrainingRun(config_of(**STOP)) as run:
        run.load(tmp_path)
        _, resumed = finish(run)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("noisy", "whose inputs do not repeat: sample 0 had other values when it was drawn again: .*"),
        ("doubled", "whose inputs do not repeat: collate_fn must make a row of each sample, got 2 of sample 0"),
        ("padded", "whose inputs do not repeat: sample 0 had other values beside others, as where each batch is pad.*"),
        ("stream", "whose train is a _Stream: give a DataLoader, or a list of batches"),
    ],
)
def test_inputs_that_do_not_repeat_are_refused(how: str, message: str) -> None:
    with pytest.raises(UserError, match=f"forward_cache_mb must be 0, got 5, for workload .*, {message}"):
        TrainingRun(config_of(how))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_data_set_that_varies_only_later_is_found() -> None:
    with (
        TrainingRun(config_of("noisy later", **STOP)) as run,
        pytest.warns(UserWarning, match="forward cache off: inputs must repeat, but there are more"),
    ):
        finish(run)
    assert run.forward_cache is not None
    assert not run.forward_cache.enabled


def test_the_model_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = Network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cuts = recorded_cuts(model, lambda m: m(torch.randn(4, 1, 6, 6)).sum())
    assert [cut.names[-1] for cut in cuts] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [cut.names for cut in cuts][2] == ("stem", "blocks.0", "blocks.1")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
