"""What is counted in training loops that others wrote, beside torch's FlopCounterMode over the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_loops import end_counting
from thorough import rest_thorough
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from trainables import gradskip
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting.process_record import ProcessRecord, process_summary

STEPS = 20
BATCH = 4
LAST: list[Any] = []  # the optimizer that was made last

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*left before.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def in_a_trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    yield
    end_counting(process_record._PROCESS)


class Images(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        image = torch.rand(1, 16, 16, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor(number % 3)}


def residual_network() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return ResNetForImageClassification(config)


def optimizer_of(model: nn.Module, stop: int | None) -> torch.optim.Optimizer:
    settings = (
        gradskip.Settings(start_itr=10**6)  # auto mode whose time does not come
        if stop is None
        else gradskip.Settings(stop_layer_num=(4,), stop_layer_itr=(stop,))
    )
    LAST[:] = [gradskip.SGD(model.parameters(), lr=0.01, settings=settings, model=model)]
    return LAST[0]


def plain_loop(stop: int | None, folder: Path) -> None:
    model = residual_network()
    optimizer = optimizer_of(model, stop)
    for batch in DataLoader(Images(), batch_size=BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]).backward()
        optimizer.step()


def trainer(stop: int | None, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = residual_network()
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Images(), optimizers=(optimizer_of(model, stop), None)).train()


def accelerate_loop(stop: int | None, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = residual_network()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model, stop), DataLoader(Images(), batch_size=BATCH)
    )
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]))
        optimizer.step()


def lightning_module(stop: int | None, folder: Path) -> None:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = residual_network()

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch["pixel_values"]).logits, batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self, stop)

    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(Classifier(), DataLoader(Images(), batch_size=BATCH))  # fmt: skip


LOOPS = [plain_loop, trainer, accelerate_loop, lightning_module]


def counted(loop: Callable[[int | None, Path], None], stop: int | None, folder: Path) -> tuple[dict[str, Any], int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FlopCounterMode(display=False) as counter:
            loop(stop, folder)
    found = process_summary()
    assert found is not None
    return found, int(counter.get_total_flops())


@pytest.mark.parametrize("stop", [7, *(pytest.param(stop, marks=pytest.mark.thorough) for stop in (None, 0))])
@pytest.mark.parametrize("loop", rest_thorough(LOOPS))
def test_what_is_executed_is_what_torch_counts(
    loop: Callable[[int | None, Path], None], stop: int | None, tmp_path: Path
) -> None:
    dense = FlopCounterMode(display=False)
    model = residual_network()
    batch = next(iter(DataLoader(Images(), batch_size=BATCH)))
    with dense:
        F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]).backward()
    found, flops = counted(loop, stop, tmp_path)
    assert found["steps"] == found["iteration"] == STEPS
    assert found["forward_flops"] + found["backward_flops"] == flops
    assert found["dense_flops"] == STEPS * dense.get_total_flops()
    assert (flops == found["dense_flops"]) == (stop is None)
    assert LAST[0].gradskip.numbering.trace is not None  # seen in the loop's own first forward pass
    assert found["optimizers"] == 1
