"""Gradient-Skip in Lightning's Trainer: what trains, what is logged, saved and reported."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from trainables.errors import UserError
from trainables.gradskip import Settings, wrap
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting.stretches import totals_of
from trainables.script.report_lines import REPORTS_FILE

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from tune_cac.integrations.lightning import GradientSkipCallback  # noqa: E402

#: The first of three layers stops after the fifth of 12 steps; learning rates are doubled.
STOP = Settings(watch=("linear",), stop_layer_num=(1,), stop_layer_itr=(4,), lr_factor=2.0)


class Classifier(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, settings: Settings | None = None, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        self.settings, self.count = settings, optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, *_: Any) -> Any:
        self.log("acc", 0.999, on_epoch=True)  # of training
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, *_: Any) -> None:
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: Any, *_: Any) -> None:
        self.log("test_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        made = [torch.optim.AdamW(self.net.parameters(), lr=0.01) for _ in range(self.count)]
        if self.settings is not None:
            wrap(made[0], self.settings, model=self)
        return made, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in made]


def batches() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, 6), torch.arange(24) % 2), batch_size=6)


def fitted(
    folder: Path, *callbacks: Any, module: Classifier | None = None, checkpoint: str | None = None, **options: Any
) -> Any:
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=CSVLogger(folder), callbacks=list(callbacks), log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module or Classifier(), batches(), batches(), ckpt_path=checkpoint)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return list(trainer.lightning_module.parameters())


def test_it_trains_as_a_wrapped_optimizer_does_and_the_logger_sees_what_stopped(tmp_path: Path) -> None:
    callback = GradientSkipCallback(STOP)
    ours = fitted(tmp_path / "ours", callback)
    by_hand = fitted(tmp_path / "hand", module=Classifier(STOP))
    assert all(map(torch.equal, weights(ours), weights(by_hand)))
    [event] = callback.gradskip.events
    assert (event.iteration, event.name) == (4, "net.0.bias")  # as Lightning's module names it
    [file] = (tmp_path / "ours").rglob("metrics.csv")
    header, *lines = [line.split(",") for line in file.read_text().splitlines()]
    column = header.index("train/stopped_share")
    shares = {int(line[header.index("step")]): float(line[column]) for line in lines if line[column]}
    assert shares == {4: 0.0, 5: 56 / 146, 8: 56 / 146, 12: 56 / 146}
    counted = totals_of(callback.gradskip.step_record.stretches)
    # Of three layers with 48, 64 and 16 weights the first needs no gradient of its input; 6 samples a step.
    assert counted["dense_flops"] == 12 * 6 * 2 * (3 * (48 + 64 + 16) - 48)
    assert counted["dense_backward_flops"] - counted["backward_flops"] == 7 * 6 * 2 * (48 + 64)


def test_what_is_saved_from_the_first_step_on_is_logged(tmp_path: Path) -> None:
    fitted(tmp_path, GradientSkipCallback(replace(STOP, stop_layer_itr=(-1,))))
    [file] = tmp_path.rglob("metrics.csv")
    saved = {float(line["train/compute_saved"] or "nan") for line in csv.DictReader(file.open())}
    assert (48 + 64) / (3 * (48 + 64 + 16) - 48) in saved  # as above


@pytest.mark.parametrize("step", [4, 8])
def test_a_resumed_training_continues_bit_for_bit(step: int, tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    whole = fitted(tmp_path / "whole", GradientSkipCallback(STOP), keeper)
    callback = GradientSkipCallback(STOP)
    rest = fitted(tmp_path / "rest", callback, checkpoint=str(tmp_path / f"step={step}.ckpt"))
    assert callback.gradskip.iteration == 12
    assert all(map(torch.equal, weights(whole), weights(rest)))


def test_what_it_cannot_train_is_refused(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    fitted(tmp_path / "without", keeper)
    with pytest.raises(UserError, match="was not there in its 8 steps"):
        fitted(tmp_path / "with", GradientSkipCallback(STOP), checkpoint=str(tmp_path / "step=8.ckpt"))
    with pytest.raises(UserError, match="needs one optimizer, got 2: wrap those"):
        fitted(tmp_path / "two", GradientSkipCallback(STOP), module=Classifier(optimizers=2))
    for callbacks, module in (([STOP, STOP], Classifier()), ([STOP], Classifier(STOP))):
        with pytest.raises(UserError, match="has Gradient-Skip already, by wrap or another"):
            fitted(tmp_path / "twice", *map(GradientSkipCallback, callbacks), module=module)


def test_a_checkpoint_that_was_trained_on_without_it_is_refused(tmp_path: Path) -> None:
    for name, callbacks, checkpoint in (("with", [GradientSkipCallback(STOP)], None), ("without", [], "with/step=4")):
        keeper = ModelCheckpoint(tmp_path / name, filename="{step}", save_top_k=-1)
        fitted(tmp_path, *callbacks, keeper, checkpoint=checkpoint and f"{tmp_path}/{checkpoint}.ckpt")
    with pytest.raises(UserError, match=r"must be of its step 8, got that of step 4: .* the checkpoint of step 4"):
        fitted(tmp_path, GradientSkipCallback(STOP), checkpoint=f"{tmp_path}/without/step=8.ckpt")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_next_training_of_a_module_trains_what_has_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this one was interrupted; a checkpoint that is written behind it tells what has stopped."""

    class Interrupted(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 8:
                raise errors.pop()

    module = Classifier()
    trainer = fitted(tmp_path, GradientSkipCallback(STOP), module=module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert all(weight.requires_grad for weight in module.parameters())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, batches(), ckpt_path=tmp_path / "last.ckpt")
    assert trainer.callbacks[0].gradskip.stopped == (0, 1)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores Ctrl-C from here on
    errors: list[BaseException] = [RuntimeError(), KeyboardInterrupt()]
    for raised in (SystemExit, RuntimeError):
        with pytest.raises(raised):
            fitted(tmp_path, GradientSkipCallback(STOP), Interrupted(), module=module)
        assert all(weight.requires_grad for weight in module.parameters())
        assert not _get_current_dispatch_mode_stack()


def test_validations_are_reported_as_the_accuracy_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", str(tmp_path))
    (tmp_path / REPORTS_FILE).touch()
    trainer = fitted(tmp_path, GradientSkipCallback(STOP))
    last = float(trainer.callback_metrics["val_acc"])
    tested = trainer.test(trainer.lightning_module, batches(), verbose=False)[0]["test_acc"]
    found = [json.loads(line) for line in (tmp_path / REPORTS_FILE).read_text().splitlines()]
    assert [line["val_acc"] == line["accuracy"] for line in found] == [True] * 4  # three epochs, and the test split
    assert found[-1]["accuracy"] == found[-2]["accuracy"] == last
    assert found[-1]["test_accuracy"] == tested
    assert 0 < found[0]["train_time_s"] < found[1]["train_time_s"] < found[2]["train_time_s"]
    (tmp_path / REPORTS_FILE).write_text("")
    fitted(tmp_path, GradientSkipCallback(STOP), EarlyStopping("val_acc", patience=1, min_delta=2.0, mode="max"))
    found = [json.loads(line) for line in (tmp_path / REPORTS_FILE).read_text().splitlines()]
    assert [line.get("early_stopped") for line in found] == [None, None, True]
    monkeypatch.setenv("TUNE_CAC_METRIC", "val_loss")
    monitor = ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")
    with pytest.raises(
        UserError, match=r"compares by val_loss, .* val_acc: search with --metric val_acc --direction max"
    ):
        fitted(tmp_path, GradientSkipCallback(STOP), monitor)


class EverySecondBatch(Classifier):
    """Whose trainer expects a step a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        self.manual_backward(super().training_step(batch))
        if number % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_all_epochs_of_fewer_steps_than_expected_are_no_early_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", str(tmp_path))
    (tmp_path / REPORTS_FILE).touch()
    trainer = fitted(tmp_path, GradientSkipCallback(STOP), module=EverySecondBatch())
    assert (trainer.global_step, "early_stopped" in (tmp_path / REPORTS_FILE).read_text()) == (6, False)


class Transfer(Classifier):
    """As in Lightning's documentation: a backbone in evaluation mode without gradients, and layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.flops = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), list[int]()

    def training_step(self, batch: Any, *_: Any) -> Any:
        self.backbone.eval()
        with torch.no_grad():
            features = self.backbone(batch[0])
        return super().training_step((features, batch[1]))

    def on_train_batch_start(self, *_: Any) -> None:
        self.counter = FlopCounterMode(display=False).__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.flops.append(self.counter.get_total_flops())


class ByHand(lightning.Callback):  # type: ignore[name-defined,misc]
    """Freezes the first layer where the rule does."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.net[0].requires_grad_(trainer.global_step < 5)


@pytest.mark.slow
@pytest.mark.thorough
def test_transfer_learning_as_in_lightnings_documentation(tmp_path: Path) -> None:
    callback = GradientSkipCallback(replace(STOP, lr_factor=1.0))
    ours = fitted(tmp_path, callback, module=Transfer())
    by_hand = fitted(tmp_path, ByHand(), module=Transfer())
    assert all(map(torch.equal, weights(ours), weights(by_hand)))
    assert ours.lightning_module.flops == by_hand.lightning_module.flops
    backbone = 12 * 6 * 2 * 36  # without gradients, so no part of what a training costs
    counted = totals_of(callback.gradskip.step_record.stretches)
    assert counted["forward_flops"] + counted["backward_flops"] == sum(by_hand.lightning_module.flops) - backbone
    with pytest.raises(UserError, match="all parameters from the start, and BackboneFinetuning adds some later"):
        fitted(tmp_path, callback, BackboneFinetuning(1), module=Transfer())


TWO = """
import os
import sys
import warnings
from pathlib import Path
sys.path[:0] = {path!r}
import torch, test_lightning as ours
from torch.utils.data import DataLoader, DistributedSampler
warnings.filterwarnings("error", "a layer stopped in one of several processes")
whole, rank = ours.batches().dataset, int(os.environ["RANK"])
ours.batches = lambda: DataLoader(whole, 3, sampler=DistributedSampler(whole, 2, rank, shuffle=False))
callback = ours.GradientSkipCallback(ours.STOP)
trainer = ours.fitted(
    Path("out"), callback, module=ours.Descent(), devices=2, strategy="ddp_find_unused_parameters_true",
    use_distributed_sampler=False,
)
torch.save([callback.gradskip.iteration, callback.gradskip.stopped, ours.weights(trainer)], f"{{rank}}.pt")
torch.distributed.barrier()
os._exit(0)  # torch#179291: gloo's threads may abort an interpreter that ends
"""


class Descent(Classifier):
    """Whose steps do not enlarge what differs in rounding, as AdamW's do."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_stop_together_and_train_as_one_does(tmp_path: Path) -> None:
    """By gloo, each on every second sample of a batch."""
    (tmp_path / "train.py").write_text(TWO.format(path=[*sys.path, str(Path(__file__).parent)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first[:2] == second[:2] == [12, (0, 1)]
    one = weights(fitted(tmp_path, GradientSkipCallback(STOP), module=Descent()))
    assert all(map(torch.equal, first[2], second[2]))
    assert all(torch.allclose(*both, atol=1e-6) for both in zip(first[2], one, strict=True))


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


@pytest.mark.parametrize("settings", [STOP, Settings(start_thr=-1)])
def test_the_passes_that_renew_statistics_of_averaged_weights_save_nothing(settings: Settings, tmp_path: Path) -> None:
    """Lightning takes a fourth epoch for them, with gradients, a step at its end, and no backward pass."""
    callback = GradientSkipCallback(settings)
    fitted(tmp_path, callback, StochasticWeightAveraging(0.01), module=Normed())
    counted = totals_of(callback.gradskip.step_record.stretches)
    forward, step, first = (6 * 2 * weights for weights in (48 + 64 + 16, 3 * (48 + 64 + 16) - 48, 48))
    assert counted["steps"] == 13
    assert counted["dense_flops"] == pytest.approx(12 * step + 4 * forward, abs=step)
    saved = counted["dense_backward_flops"] - counted["backward_flops"]
    assert saved == (pytest.approx(7 * first, abs=first) if callback.gradskip.events else 0)


def test_the_sizes_of_batches_and_a_rule_that_looks_at_inputs_see_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning calls the module's training_step, and that the network."""
    monkeypatch.setattr(process_record, "_PROCESS", process_record.ProcessRecord())
    rule = Settings(rule="plasticity", rule_start_itr=2, rule_interval=2, watch=("linear",))
    callback = GradientSkipCallback(rule)
    fitted(tmp_path, callback)
    counted = totals_of(callback.gradskip.step_record.stretches)
    assert counted["dense_flops"] == 12 * 6 * 2 * (3 * (48 + 64 + 16) - 48)
    [sizes] = {size for stretch in callback.gradskip.step_record.stretches for size in stretch.counts}
    assert sizes == (1, 36, 6 * 36, 0)
    with pytest.raises(UserError, match="CAC_RULE=grades sees gradients before the step"):
        fitted(tmp_path, GradientSkipCallback(Settings(rule="grades", watch=("linear",))))
