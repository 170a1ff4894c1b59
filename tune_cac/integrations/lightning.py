"""Gradient-Skip in Lightning's `Trainer`.

from tune_cac.integrations.lightning import GradientSkipCallback
Trainer(..., callbacks=[GradientSkipCallback()])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.parallel import DistributedDataParallel

from trainables.errors import UserError
from trainables.gradskip.settings import Settings
from tune_cac.integrations.trainer_skip import TrainerSkip


class GradientSkipCallback(Callback):
    """Stop layers of a training, and log, save and restore what has stopped.

    The trainer's loggers get ``train/stopped_share`` and ``train/compute_saved`` after every stop and epoch, its
    checkpoints the rule's state, and a search that runs the script the metrics of every validation.

    Args:
        settings: None reads the ``CAC_*`` variables when the training begins.

    Raises:
        UserError: in ``fit()``, for several optimizers, for DDP that does not look for unused parameters, for a
            checkpoint without our state, and as `trainables.gradskip.wrap`; in a validation, for a search of another
            metric.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._skip = TrainerSkip(settings)
        self._stops = 0  # that were logged

    @property
    def gradskip(self) -> Any:
        """Return the `GradientSkip` of the latest training; None before the first."""
        return self._skip.gradskip

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizer."""
        if len(trainer.optimizers) != 1:
            raise UserError(
                f"GradientSkipCallback needs one optimizer, got {len(trainer.optimizers)}: wrap those whose layers may "
                "stop in configure_optimizers (tune_cac.gradskip.wrap)"
            )
        outer = trainer.strategy.model
        if isinstance(outer, DistributedDataParallel) and not outer.find_unused_parameters:
            raise UserError(
                "the strategy must be ddp_find_unused_parameters_true, got ddp, which waits for gradients of what stops"
            )
        total = trainer.estimated_stepping_batches
        self._skip.begin(
            trainer.optimizers[0], pl_module, steps=trainer.global_step,
            total_steps=int(total) if total != float("inf") else None,
        )  # fmt: skip
        self._stops = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log a stop."""
        if self.gradskip is not None and len(self.gradskip.events) > self._stops:
            self._stops = len(self.gradskip.events)
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what has stopped and is saved by now."""
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        values = {f"train/{name}": value for name, value in self._skip.logged().items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a validation to the search."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        monitors = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint) and one.monitor]
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        chosen, direction = (monitors[0].monitor, monitors[0].mode) if monitors else (None, "max")
        self._skip.report(
            {name: value for name, value in found.items() if not name.startswith("test_")}, chosen, direction
        )

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the test split to the search."""
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
        self._skip.report(found, None, "max")
