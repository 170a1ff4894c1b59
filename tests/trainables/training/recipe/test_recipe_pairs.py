"""Every pair of values of the training recipe, with every kind of method: trains `digits` and resumes bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MEASURED, Row, finish, without
from schedule_texts import PRUNING
from torch import nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe.fields import CHECKPOINTING, PRECISIONS, RECIPE_FIELDS
from trainables.training.run import TrainingRun

STOPS = {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (5, 9), "CAC_BRAKING_DISTANCE": 3}
SCHEDULE = {"schedule": PRUNING}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "gradskip": STOPS,
    "compression": SCHEDULE,
    "gradskip+compression": {**STOPS, **SCHEDULE},
}
#: Values of each field that differ in what they do on a CPU; of the compiler's modes one, since others are for GPUs.
VALUES: dict[str, tuple[Any, ...]] = {
    "method": tuple(METHODS),
    "precision": PRECISIONS,
    "activation_checkpointing": (None, *CHECKPOINTING),
    "fused_optimizer": (None, True, False),
    "compile_mode": (None, "default"),
    "batch_size": (None, 100),
    "clip_grad_norm": (None, 0.5),
    "channels_last": (None, True),
    "loader_workers": (None, 2),
    "pin_memory": (None, False),
    "cudnn_benchmark": (None, True),
    "deterministic": (None, True),
}
Combination = dict[str, Any]


def is_allowed(given: Combination) -> bool:
    try:
        config_of({"method": "none", **given})
    except UserError:
        return False
    return True


def config_of(given: Combination) -> TrialConfig:
    return TrialConfig(workload="digits", epochs=2, **METHODS[given["method"]], **given)


def covering() -> list[Combination]:
    """Combinations in which each allowed pair of values occurs; greedy, so a few more than the least."""
    names = list(VALUES)
    missing = {
        pair
        for first, second in itertools.combinations(names, 2)
        for pair in itertools.product(
            [(first, value) for value in VALUES[first]], [(second, value) for value in VALUES[second]]
        )
        if is_allowed(dict(pair))
    }
    rows = []
    while missing:
        row = dict(min(missing, key=str))
        for name in names:
            if name in row:
                continue
            allowed = [value for value in VALUES[name] if is_allowed({**row, name: value})]
            row[name] = max(allowed, key=lambda value: len(_pairs({**row, name: value}) & missing))
        missing -= _pairs(row)
        rows.append(row)
    return rows


def _pairs(row: Combination) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    names = [name for name in VALUES if name in row]
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}


ROWS = covering()


def test_every_field_is_in_the_pairs() -> None:
    assert set(VALUES) == {"method", *RECIPE_FIELDS}
    assert len(ROWS) <= 16


def train(run: TrainingRun) -> tuple[list[Row], list[torch.Tensor]]:
    return without(finish(run), MEASURED), [t.clone() for t in run.model.state_dict().values()]


def only_graphs(model: nn.Module, compile_as_usual: Callable[..., None], *, mode: str, **options: Any) -> None:
    """Compile a model up to where code would be generated."""
    compile_as_usual(model, backend="aot_eager", **options)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pin_memory", "ignore:cudnn_benchmark")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_a_pair_trains_and_resumes_bit_exactly_in_the_middle_of_an_epoch(
    row: Combination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(row)
    if row["compile_mode"] and row["method"] != "gradskip":
        # One row, and the tests of compiling.py, generate code; the graphs alone are made in a tenth of the time.
        monkeypatch.setattr(nn.Module, "compile", partialmethod(only_graphs, nn.Module.compile))
    with TrainingRun(config) as run:
        rows, weights = train(run)
        assert run.recipe.compiled == (row["compile_mode"] is not None)
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    with TrainingRun(config) as run:
        run.begin_epoch()
        for _ in range(4):
            run.train_step()
        run.save(tmp_path)
    torch.manual_seed(99)  # what another process's generators would hold
    with TrainingRun(config) as run:
        run.load(tmp_path)
        resumed, weights_again = train(run)
    assert resumed == rows
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))
    if "gradskip" in row["method"]:
        assert rows[-1]["stopped_through"] == 9
        assert rows[-1]["compute_saved"] > (0.1 if row["activation_checkpointing"] is None else -0.2)
    if "compression" in row["method"]:
        assert rows[-1]["sparsity"] > 0.1
