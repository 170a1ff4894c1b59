"""Gradient-Skip in Lightning's `Trainer`.

from tune_cac.integrations.lightning import GradientSkipCallback
Trainer(..., callbacks=[GradientSkipCallback()])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.settings import Settings
from tune_cac.integrations.trainer_skip import TrainerSkip


def _network_of(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return the smallest module that has all parameters of an optimizer: Lightning does not call its own as a module.

    Hooks see the inputs of a module that is called, which `ModuleList` and `ModuleDict` are not.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for child in module.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_called and wanted <= {id(parameter) for parameter in child.parameters()}:
            return _network_of(child, optimizer) if isinstance(child, LightningModule) else child
    return module


def _measured(trainer: Trainer, *, test: bool) -> dict[str, float]:
    """Return the metrics of the trainer, of the test split or of all others, by name."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.startswith(("test_", "test/")) == test and name not in ("step", "epoch")
    }


class GradientSkipCallback(Callback):
    """Stop layers of a training, and log, save and restore what has stopped.

    The trainer's loggers get ``train/stopped_share`` and ``train/compute_saved`` after every stop and epoch, its
    checkpoints the rule's state, and a search that runs the script the metrics of every validation. When the training
    ends, what has stopped can train again.

    Args:
        settings: None reads the ``CAC_*`` variables when the training begins.

    Raises:
        UserError: in ``fit()``, for several optimizers or one that a `BaseFinetuning` adds to, for DDP that does not
            look for unused parameters, for a checkpoint without our state of its last step, for an optimizer that has
            Gradient-Skip already, and as `trainables.gradskip.wrap`; in a validation, for a search of another metric.
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
        optimizer, total = trainer.optimizers[0], trainer.estimated_stepping_batches
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        adding = [type(one).__name__ for one in callbacks if isinstance(one, BaseFinetuning)]
        if adding and any(id(parameter) not in given for parameter in pl_module.parameters()):
            raise UserError(
                f"the optimizer must have all parameters from the start, and {adding[0]} adds some later: give it all "
                "in configure_optimizers, and switch their requires_grad in on_train_epoch_start instead"
            )
        self._skip.begin(
            optimizer, _network_of(pl_module, optimizer), steps=lambda: trainer.global_step,
            is_resumed=trainer.ckpt_path is not None, total_steps=int(total) if total != float("inf") else None,
            named_in=pl_module, schedulers=[one.scheduler for one in trainer.lr_scheduler_configs],
        )  # fmt: skip
        self._stops = 0
        rule = self._skip.gradskip.settings.mode if self._skip.gradskip is not None else ""
        if pl_module.automatic_optimization and rule in ("grades", "gradient_norm"):
            raise UserError(
                f"CAC_RULE={rule} sees gradients before the step, which Lightning's automatic optimization takes with "
                "a closure: set automatic_optimization = False, or take another rule"
            )

    def on_train_batch_start(self, *_: Any) -> None:
        """Report what was validated since the last step."""
        self._skip.begin_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last validation, and whether the training ended early."""
        # Other callbacks change what is expected (averaging adds an epoch), and manual steps may come less often.
        self._skip.end(
            early=trainer.should_stop and trainer.global_step < trainer.estimated_stepping_batches < float("inf")
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let what has stopped train in the next training of the module."""
        self._skip.let_go()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the step's time, and log a stop."""
        self._skip.end_step()
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
        chosen, direction = (monitors[0].monitor, monitors[0].mode) if monitors else (None, "max")
        self._skip.take(_measured(trainer, test=False), chosen, direction)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the test split to the search."""
        self._skip.take(_measured(trainer, test=True))
