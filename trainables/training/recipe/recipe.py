"""A run's training recipe, as its configuration says it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe.checkpointing import apply_checkpointing
from trainables.training.recipe.compiling import compile_model
from trainables.training.recipe.fields import FLOAT32
from trainables.training.recipe.loading import BatchLoader
from trainables.training.recipe.precision import MixedPrecision
from trainables.workloads.base import Batch, Workload


class Recipe:
    """The recipe of one run.

    Args:
        config: whose `RECIPE_FIELDS` are read.
        device: of the run.

    Raises:
        UserError: the device cannot train in this precision.
    """

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.precision = MixedPrecision(config.precision or FLOAT32, device)
        """Autocast and gradient scaling."""
        self.compiled = False
        """True if the model is compiled."""

    def set_process(self) -> None:
        """Set what holds for the process; `ProcessState` restores it after the run."""
        config = self._config
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        wanted = bool(config.cudnn_benchmark)
        if wanted and torch.are_deterministic_algorithms_enabled():
            warnings.warn(
                "cudnn_benchmark=True has no effect: deterministic algorithms are asked for, and the fastest one is "
                "measured anew in each run",
                stacklevel=2,
            )
            wanted = False
        if self._device.type == "cuda" or wanted:
            torch.backends.cudnn.benchmark = wanted

    def prepare_model(self, model: nn.Module, before_change: Callable[[], None], changed: Callable[[], None]) -> None:
        """Set the memory format, and what is computed again in the backward pass."""
        if self._config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # left out of its stubs
        kind = self._config.activation_checkpointing
        if kind is not None:
            before_change()
            apply_checkpointing(model, kind)
            changed()

    def prepare_optimizer(self, optimizer: Optimizer, batch_factor: float) -> Optimizer:
        """Return the optimizer with the recipe's kernels and learning rates; it must not have stepped yet.

        Raises:
            UserError: an optimizer without fused steps.
        """
        if self._config.fused_optimizer is not None:
            optimizer = with_kernels(optimizer, fused=self._config.fused_optimizer)
        scale_learning_rates(optimizer, batch_factor)
        self.precision.watch(optimizer)
        return optimizer

    def compile(self, model: nn.Module) -> None:
        """Compile the model, once everything that looks at its layers has done so."""
        if self._config.compile_mode is not None:
            self.compiled = compile_model(model, self._config.compile_mode, self._device)

    def evaluation(self) -> AbstractContextManager[Any]:
        """Return the block in which the model is evaluated: in float32 and as it is, whatever it is trained with."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def loader(self, workload: Workload) -> BatchLoader:
        """Return the loader of the run's batches."""
        config, on_gpu = self._config, self._device.type == "cuda"
        if config.pin_memory and not on_gpu:
            warnings.warn("pin_memory=True has no effect on the CPU: nothing is transferred", stacklevel=2)
        pin = on_gpu and config.pin_memory is not False
        return BatchLoader(workload, config.seed, workers=config.loader_workers, pin_memory=pin)

    def on_device(self, batch: Batch) -> Batch:
        """Return the batch on the device; from page-locked memory without waiting for the transfer."""
        if not self._config.channels_last:
            return tuple(t.to(self._device, non_blocking=True) for t in batch)
        return tuple(
            t.to(self._device, non_blocking=True, memory_format=torch.channels_last)
            if t.dim() == 4
            else t.to(self._device, non_blocking=True)
            for t in batch
        )

    def after_backward(self, optimizer: Optimizer) -> None:
        """Unscale and clip the gradients, before anything else reads them."""
        self.precision.unscale(optimizer)
        if self._config.clip_grad_norm is not None:
            # Those of the optimizer: a method that removes structures replaces the model's.
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            nn.utils.clip_grad_norm_(parameters, self._config.clip_grad_norm)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        self.precision.scaled(loss).backward()


def scale_learning_rates(optimizer: Optimizer, batch_factor: float) -> None:
    """Multiply the learning rates by what the batch size asks for.

    They follow it linearly with SGD (Goyal et al. 2017, section 2.1), with its square root with other optimizers, whose
    steps do not grow with the gradient (Malladi et al. 2022, section 5).

    Args:
        optimizer: that has not stepped yet.
        batch_factor: batch size over the workload's own.
    """
    if batch_factor != 1.0:
        factor = batch_factor if isinstance(optimizer, SGD) else batch_factor**0.5
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def has_kernels(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class has fused steps (`with_kernels`)."""
    return "fused" in inspect.signature(type(optimizer).__init__).parameters


def with_kernels(
    optimizer: Optimizer, *, fused: bool | None = None, parameters: Mapping[Any, nn.Parameter] | None = None
) -> Optimizer:
    """Return an optimizer like this one, without its state, whose step is one kernel or one kernel an operation.

    Args:
        optimizer: not changed.
        fused: True for one kernel a step, False for one an operation, None for this one's kernels.
        parameters: what stands for each of its parameters; None for themselves.

    Raises:
        UserError: its class has no fused step.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind.__init__).parameters
    if not has_kernels(optimizer):
        raise UserError(
            f"fused_optimizer must be left out for {kind.__name__}, which has no fused step, got {fused}: torch's SGD, "
            "Adam and AdamW have one"
        )
    kernels: dict[str, Any] = {} if fused is None else {"fused": fused, "foreach": not fused}
    groups = []
    for group in optimizer.param_groups:
        own = [p if parameters is None else parameters[p] for p in group["params"]]
        names = group.get("param_names")
        rest = {name: value for name, value in group.items() if name not in ("params", "param_names", *kernels)}
        groups.append({**rest, "params": list(zip(names, own, strict=True)) if names else own})
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return kind(groups, **{**defaults, **kernels})
