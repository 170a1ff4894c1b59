"""Compression as a method of a run: it goes on bit for bit from any step, is shared, and costs what it costs."""

from __future__ import annotations

import io
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
import torch
from compression_schedules import (
    CONVOLUTIONS,
    EPOCHS,
    SCHEDULES,
    distilled,
    ranked,
    sections,
    span,
    text,
    trained_alone,
)
from runs import NOT_THE_RUNS, Row, finish, without
from tiny_workload import BATCH_SIZE, SAMPLES, STEPS_PER_EPOCH, Tiny, tiny  # noqa: F401 - a fixture

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.metrics import MODEL_DEFAULTS, ROW
from trainables.quality import Quality
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.filterwarnings("ignore:thinning changed")]

#: Steps at which runs are saved: before all, in the first epochs that act, at a boundary, and late.
CUTS = (11, 16, 27)
#: Columns that a clock fills.
CLOCKS = NOT_THE_RUNS | {"latency_s"}
NAMES = [*SCHEDULES, "distilled"]

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny model, as any script writes them."""
    file = tmp_path_factory.mktemp("teacher") / "teacher.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        torch.save(Tiny().make_model().state_dict(), file)
    return file


def config_of(name: str, teacher: Path, **more: Any) -> TrialConfig:
    """Every other schedule under AdamW, the others under SGD with momentum."""
    schedule = distilled(teacher) if name == "distilled" else SCHEDULES[name]
    workload = "tiny_adam" if NAMES.index(name) % 2 else "tiny"
    return TrialConfig(workload=workload, epochs=EPOCHS, method="compression", schedule=text(schedule), **more)


def alone(config: TrialConfig) -> tuple[list[Row], Weights, dict[int, bytes]]:
    return trained_alone(config, CUTS)


@cache
def plain_rows(workload: str, epochs: int = EPOCHS) -> list[Row]:
    """Of the baseline."""
    with TrainingRun(TrialConfig(workload=workload, epochs=epochs, method="none")) as run:
        return finish(run)


# --- columns --------------------------------------------------------------------------------------------------------


def test_rows_are_the_baselines_until_something_acts_and_then_say_what_is_zero(teacher: Path) -> None:
    rows, trained, _ = alone(config_of("agp", teacher))
    assert all({*row, "further_metrics"} == {metric.name for metric in ROW} for row in rows)
    assert {name: rows[0][name] for name in MODEL_DEFAULTS} == MODEL_DEFAULTS
    # s_e = s_f + (s_i - s_f) (1 - p)^3 of convolutions of 36, 144, 216 and 324 weights; the linear layer is left out.
    sizes = [36, 144, 216, 324]
    for row, progress in zip(rows[1:], (0.0, 0.5, 1.0), strict=True):
        share = 0.8 + (0.1 - 0.8) * (1 - progress) ** 3
        zeros = [int(share * size) for size in sizes]
        assert row["sparsity"] == pytest.approx(sum(zeros) / (sum(sizes) + 18))
        by_layer = json.loads(row["layer_sparsity"])
        assert by_layer == {
            **{n: round(z / size, 6) for n, z, size in zip(CONVOLUTIONS, zeros, sizes, strict=True)}, "15.weight": 0.0
        }  # fmt: skip
        dense = 36 * sum(sizes) + 18  # 36 positions each, and the linear layer once
        left = 36 * sum(size - zero for size, zero in zip(sizes, zeros, strict=True)) + 18
        assert (row["dense_macs"], row["effective_macs"]) == (dense, left)
        assert (row["inference_saved"], row["sparse_inference_saved"]) == (0, pytest.approx(1 - left / dense))
    assert [int((trained[name] == 0).sum()) for name in CONVOLUTIONS] == zeros


@pytest.mark.parametrize("nothing", [{}, {"pruning_sensitivities": ("0.weight=0",)}, {"distill_weight": 0.0}])
def test_without_policies_it_is_plain_training(nothing: dict[str, Any]) -> None:
    with TrainingRun(TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", **nothing)) as run:
        assert without(finish(run), CLOCKS) == without(plain_rows("tiny"), CLOCKS)


# --- costs ----------------------------------------------------------------------------------------------------------


def forward_flops(samples: int, widths: tuple[int, ...] = (1, 4, 4, 6, 6), classes: int = 3) -> int:
    """Two FLOPs a multiply-add: 3x3 convolutions over 6x6 positions, and the linear layer."""
    places = 36 * 9 * sum(a * b for a, b in pairwise(widths))
    return 2 * samples * (places + widths[-1] * classes)


def test_a_teachers_forward_passes_are_counted_in_its_epochs_alone(teacher: Path) -> None:
    rows, _, _ = alone(config_of("distilled", teacher))  # teaches in epochs 1 and 2, prunes from epoch 2 on
    plain = forward_flops(SAMPLES)
    for number, (row, with_teacher) in enumerate(zip(rows, (1, 3, 5, 6), strict=True)):
        assert row["forward_flops"] == with_teacher * plain, number
        assert row["executed_flops"] == row["forward_flops"] + row["backward_flops"]
        # The budget is that of the student alone, so a teacher makes compute_saved negative.
        dense = row["dense_flops"]
        epoch_cost = dense // EPOCHS
        assert row["compute_saved"] == pytest.approx(((number + 1) * epoch_cost - row["executed_flops"]) / dense)
    assert rows[-1]["compute_saved"] == pytest.approx(1 - rows[-1]["executed_flops"] / rows[-1]["dense_flops"])
    assert rows[-1]["compute_saved"] < 0


def test_after_thinning_steps_cost_less_and_the_budget_stays_that_of_the_model_as_built() -> None:
    schedule = sections(
        [span("pruner", "p", 1, 2), span("extension", "x", 1, 2)],
        pruners={"p": ranked("L1RankedStructureParameterPruner", weights=["3.weight", "6.weight"])},
        extensions={"x": {"class": "FilterRemover"}},
    )  # 2 of 4 and 3 of 6 filters go at the end of epoch 1
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", schedule=text(schedule))
    with TrainingRun(config) as run:
        rows = finish(run)
        assert [run.model[place].out_channels for place in (0, 3, 6, 9)] == [4, 2, 3, 6]  # type: ignore[index, union-attr]
    plain = plain_rows("tiny")
    full, thin = forward_flops(SAMPLES), forward_flops(SAMPLES, (1, 4, 2, 3, 6))
    expected = [full, 2 * full, 2 * full + thin, 2 * full + 2 * thin]
    assert [row["forward_flops"] for row in rows] == expected
    assert [row["dense_flops"] for row in rows] == [plain[-1]["dense_flops"]] * EPOCHS
    assert [row["executed_flops"] for row in rows[:2]] == [row["executed_flops"] for row in plain[:2]]
    # Backward: each layer's input and weight, the first layer's weight alone; the same of the thin model.
    backward = [2 * flops - forward_flops(SAMPLES, (1, 4), 0) for flops in (full, thin)]
    assert rows[-1]["backward_flops"] == 2 * sum(backward)
    last = rows[-1]
    assert last["compute_saved"] == pytest.approx(1 - last["executed_flops"] / last["dense_flops"])
    assert last["compute_saved"] > 0.2
    assert last["gradient_bytes"] < plain[-1]["gradient_bytes"]
    parameters = sum(9 * a * b + 2 * b for a, b in zip((1, 4, 2, 3), (4, 2, 3, 6), strict=True)) + 6 * 3 + 3
    assert last["parameters"] == parameters
    macs = 36 * 9 * (4 + 8 + 6 + 18) + 18
    assert last["dense_macs"] == macs
    assert last["inference_saved"] == pytest.approx(1 - macs / (36 * 9 * (4 + 16 + 24 + 36) + 18))


def test_a_thinned_model_is_timed_at_the_end_also_after_it_was_continued(teacher: Path) -> None:
    config = config_of("thinning", teacher)
    rows, _, states = alone(config)
    assert [row["latency_s"] is None for row in rows] == [True, True, True, False]
    with TrainingRun(config) as run:
        run.load_state_dict(torch.load(io.BytesIO(states[27]), weights_only=True))
        (last,) = finish(run)
    assert last["latency_s"] > 0
    assert all(row["latency_s"] is None for row in alone(config_of("agp", teacher))[0])


PLATEAU = {
    "version": 1,
    "lr_schedulers": {"plateau": {"class": "ReduceLROnPlateau", "factor": 0.5, "patience": 0, "threshold": 0.2}},
    "policies": [{"lr_scheduler": {"instance_name": "plateau"}, "starting_epoch": 0, "ending_epoch": EPOCHS}],
}


def reference() -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


def test_a_plateau_of_the_loss_is_one_of_the_validation_loss(tmp_path: Path) -> None:
    """Alone and over a stage tree, against torch's own told the loss that the model has there."""
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", schedule=text(PLATEAU))
    images, labels = tiny_workload._data(1, 100)
    of_validation, of_training = reference(), reference()
    found, expected, trained = [], [], []
    with TrainingRun(config) as run:
        while not run.finished:
            row = run.train_epoch()
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(run.model.eval()(images), labels)
            of_validation.step(float(loss))
            of_training.step(row["train_loss"])
            found.append(run.optimizer.param_groups[0]["lr"])
            expected += of_validation.get_last_lr()
            trained += of_training.get_last_lr()
    assert found == pytest.approx(expected)
    assert found != pytest.approx(trained)  # which it followed before
    with SharedRun(config, Sharing(tree=tmp_path, budget_bytes=0)) as shared:
        rows = finish(shared)
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1, *found[:-1]])  # of the epoch itself


def test_a_plateau_without_its_metric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plateau = {**PLATEAU["lr_schedulers"]["plateau"], "mode": "max"}  # type: ignore[index]
    of_accuracy = {**PLATEAU, "lr_schedulers": {"plateau": plateau}}
    monkeypatch.setattr(Tiny, "quality", Quality(name="cost", direction="min", unit=""))
    monkeypatch.setattr(Tiny, "evaluation_batches", lambda self, split: None)
    for schedule, message in (
        (of_accuracy, "that follows an accuracy must be told it"),
        (PLATEAU, "the workload has no evaluation_batches: define"),
    ):
        config = TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", schedule=text(schedule))
        with TrainingRun(config) as run, pytest.raises(UserError, match=message):
            run.train_epoch()
