"""A run's training recipe, as its configuration says it."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.optimizers import scale_learning_rates
from trainables.runtime.isolation import kept_generators
from trainables.training.recipe.fields import BFLOAT16, CHEAP, FLOAT16, FLOAT32
from trainables.workloads.base import Batch, Workload

# --- Mixed precision: the forward pass in a smaller number format, and gradients scaled where it would underflow ------


_DTYPES = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UserError if the device cannot train in this precision, tried on a convolution and a linear layer."""
    if precision == FLOAT32:
        return
    if device.type == "cuda" and precision == BFLOAT16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"precision=bfloat16 needs a GPU of compute capability 8.0 or newer, got {torch.cuda.get_device_name()}: "
            "take precision=float16"
        )
    with kept_generators([]):  # the run's weights must not depend on its precision
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)).to(device)
    try:
        with torch.autocast(device.type, dtype=_DTYPES[precision]):
            loss = model(torch.ones(1, 1, 4, 4, device=device)).sum()
        loss.backward()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"precision={precision} does not work on this device ({said}): take precision=float32"
        ) from error


class MixedPrecision:
    """Autocast and gradient scaling of one run; does nothing in float32.

    Raises:
        UserError: the device cannot train in this precision.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        check_precision(precision, device)
        self._dtype = _DTYPES.get(precision)
        self._device = device
        # bfloat16 has float32's range and needs no scaling.
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == FLOAT16)
        self._stepped = False

    def forward_pass(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins from."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, before anything reads them."""
        if self._scales(optimizer):
            self._scaler.unscale_(optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """Prepare for steps of this optimizer; called once."""
        if self._scaler.is_enabled():
            optimizer.register_step_post_hook(lambda *_: setattr(self, "_stepped", True))

    def step(self, optimizer: Optimizer) -> None:
        """Execute the optimizer's step; where gradients overflowed, one that changes no weight.

        GradScaler does not call the optimizer then. It is called without gradients here, so that a step of the run is
        a step of everything that hangs on the optimizer: what counts steps, such as a stop rule, never lags behind.
        """
        if not self._scales(optimizer):
            optimizer.step()
            return
        self._stepped = False
        self._scaler.step(optimizer)
        self._scaler.update()
        if not self._stepped:
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()

    def _scales(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return self._scaler.is_enabled() and any(p.grad is not None for group in groups for p in group["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its age; empty where nothing is scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)


# --- Compilation of a run's model by torch.compile, where this machine can --------------------------------------------

#: Versions of the compiled code that are kept: each stop of Gradient-Skip makes one, and so do evaluations.
MOST_VERSIONS = 64


def compile_model(model: nn.Module, mode: str, device: torch.device) -> bool:
    """Compile a model in place, with a warning where that is not possible; return whether it is compiled.

    Its names, weights and buffers stay as they are; copies of it are not compiled.
    """
    reason = why_not(device.type)
    if reason:
        warnings.warn(
            f"compile_mode={mode} has no effect: torch.compile does not work here ({reason}). The model is trained "
            "without it; install a C++ compiler, or leave compile_mode out",
            stacklevel=2,
        )
        return False
    model.__class__ = _compilable(type(model))  # type: ignore[arg-type]  # classes hash
    # Versions of other models that this process trained must not count against this one's. A version for all shapes
    # rounds differently from one for a shape, so which of them a step takes would depend on the steps before it.
    model.compile(mode=mode, dynamic=False, recompile_limit=MOST_VERSIONS, isolate_recompiles=True)
    return True


@cache
def _compilable(base: type[nn.Module]) -> type[nn.Module]:
    """Return the same class with a `forward` of this file: torch compiles none of its own, such as nn.Sequential's."""

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return base.forward(self, *arguments, **keywords)

    return _with_forward(base, forward)


def _with_forward(base: type[nn.Module], forward: Callable[..., Any], **more: Any) -> type[nn.Module]:
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {"forward": forward, **named, **more})


@cache
def why_not(device_type: str) -> str:
    """Return why torch.compile does not work in this process, tried on an addition; empty where it does."""
    try:
        torch.compile(lambda value: value + 1)(torch.ones(2, device=device_type))
    except Exception as error:  # noqa: BLE001  # of the compiler, its C++ compiler or its loader
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


# --- Loader of a run's batches: prepared by worker processes where asked for, in page-locked memory where that helps --

#: Batches that each worker prepares ahead.
AHEAD = 2


class BatchLoader(Dataset[Batch]):
    """Batches of a run, which depend on seed, epoch and step alone, whoever prepares them.

    Raises:
        UserError: workers for a workload that prepares its batches itself.
    """

    def __init__(self, workload: Workload, seed: int, *, workers: int | None = None, pin_memory: bool = False) -> None:
        self._workload, self._seed, self._pin = workload, seed, pin_memory
        self.workers = usable_workers(workload, workers)
        self._order: list[tuple[int, int]] = []  # epoch and step of each batch to come
        self._loader: DataLoader[Batch] | None = None
        # A fork shares data that lies in memory or is mapped.
        processes: dict[str, Any] = {
            "multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": AHEAD
        }  # fmt: skip
        if self.workers or (pin_memory and workload.by_step):
            self._loader = DataLoader(
                self,
                batch_size=None,
                sampler=self._order,
                num_workers=self.workers,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # else the run's would be drawn from
                **(processes if self.workers else {}),
            )

    def __getitem__(self, index: tuple[int, int]) -> Batch:
        epoch, step = index
        return self._workload.batch_at(epoch, self._seed, step)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return the batches of an epoch from a step on."""
        if self._loader is None:
            found = self._workload.train_batches_from(epoch, self._seed, start)
            return (tuple(t.pin_memory() for t in batch) for batch in found) if self._pin else found
        self._order[:] = [(epoch, step) for step in range(start, self._workload.steps_per_epoch)]
        return (tuple(batch) for batch in self._loader)

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None


def usable_workers(workload: Workload, wanted: int | None) -> int:
    """Return how many processes prepare a workload's batches; raise UserError as `BatchLoader`."""
    if wanted is None:
        wanted = workload.loader_workers
    elif wanted and not workload.by_step:
        raise UserError(
            f"loader_workers must be 0 for workload {workload.name}, whose batches come from a loader of its own, got "
            f"{wanted}: leave it out, or set num_workers of that loader"
        )
    if wanted and "fork" not in multiprocessing.get_all_start_methods():
        warnings.warn(
            f"loader_workers={wanted} has no effect: this platform cannot fork processes, so batches are prepared in "
            "the training process",
            stacklevel=2,
        )
        return 0
    return wanted


# --- Activation checkpointing: parts of a block's forward pass are computed again in the backward pass, not kept ------
# Modules take and return what they do without it. Weights, names and buffers stay as they are; only the class of the
# chosen modules changes, to one of the same name that runs `forward` under torch.utils.checkpoint.

#: Products whose outputs sum fewer terms are computed again: they take as long as it takes to read their inputs.
SMALL_DEPTH = 64
#: Modules that only hold others.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_KIND = "activation_checkpointing"
_aten = torch.ops.aten
#: Matrix products and convolutions, and which argument's size beyond its first dimension is the depth of the sum.
_PRODUCTS = {
    _aten.convolution.default: 1,
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 2,
}
#: Attention as one operation: dear, whatever its sizes.
_ATTENTION = {
    getattr(_aten, name).default
    for name in dir(_aten)
    if name.startswith("_scaled_dot_product") and "backward" not in name and hasattr(getattr(_aten, name), "default")
}


def apply_checkpointing(model: nn.Module, kind: str) -> None:
    """Checkpoint the blocks of a model (`blocks_of`), in place; raise UserError if it has none."""
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"activation_checkpointing={kind} needs a model with blocks (modules of several layers, or nn.Sequential), "
            f"got {type(model).__name__}: leave it out"
        )
    for block in blocks.values():
        for module in block.modules():  # what is kept must not be overwritten
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]
        block.__class__ = _checkpointed(type(block), kind, _is_chain(block))  # type: ignore[arg-type]  # classes hash


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are checkpointed, by name: residual or transformer blocks, and chains of layers.

    A block is the outermost module of several layers that is no container and holds no container of further blocks. An
    nn.Sequential of plain layers is a chain, which is cut before each layer with weights.
    """
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        if _is_chain(module):
            found[name] = module
        elif module is model or isinstance(module, _CONTAINERS) or _holds_blocks(module):
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)
        elif _is_composite(module) and any(True for _ in module.parameters()):
            found[name] = module

    visit("", model)
    return found


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_chain(module: nn.Module) -> bool:
    """Return whether a module is an nn.Sequential of at least two layers without children."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return len(module) > 1 and not any(_is_composite(child) for child in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(part, _CONTAINERS) and sum(_is_composite(child) for child in part.children()) > 1
        for part in module.modules()
    )


@cache
def _checkpointed(base: type[nn.Module], kind: str, is_chain: bool) -> type[nn.Module]:
    """Return the class of checkpointed modules of a class: one for all models, so that copies have it, too."""

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *arguments, **keywords)
        if not is_chain:
            return _computed_again(kind, [self], partial(base.forward, self), *arguments, **keywords)
        (value,) = arguments
        for segment in _segments(self):
            value = _computed_again(kind, segment, partial(reduce, lambda value, layer: layer(value), segment), value)
        return value

    return _with_forward(base, forward, **{_KIND: kind})


def _segments(chain: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of a chain, cut before each layer that has weights with more than one dimension."""
    segments: list[list[nn.Module]] = [[]]
    for layer in chain.children():
        if any(p.dim() > 1 for p in layer.parameters(recurse=False)) and segments[-1]:
            segments.append([])
        segments[-1].append(layer)
    return segments


def _computed_again(kind: str, modules: list[nn.Module], function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return what a function of these modules gives, which is computed again in the backward pass."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if kind == CHEAP:
            forward, again = create_selective_checkpoint_contexts(_policy)
        return forward, _second_pass(again, modules)

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, **keywords)


@contextmanager
def _second_pass(selective: AbstractContextManager[Any], modules: list[nn.Module]) -> Iterator[None]:
    """Run the second forward pass; it leaves buffers such as a norm's running statistics as the first left them."""
    held = [(part, dict(part._buffers)) for module in modules for part in module.modules() if part._buffers]
    for part, buffers in held:
        part._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        with selective:  # sees every operation from here on
            yield
    finally:
        for part, buffers in held:
            part._buffers.update(buffers)


def _policy(_: Any, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    """Keep the outputs of attention and of products that sum many terms; everything else is computed again."""
    keep = operation in _ATTENTION
    if operation in _PRODUCTS:
        factor = arguments[_PRODUCTS[operation]]
        depth = math.prod(factor.shape[1:]) if operation is _aten.convolution.default else factor.shape[-2]
        keep = depth >= SMALL_DEPTH
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def computed_again(model: nn.Module) -> tuple[str, ...]:
    """Return a key, equal for models whose same blocks are checkpointed in the same way: "name kind" of each block."""
    modules = model.named_modules()
    return tuple(f"{name} {getattr(type(m), _KIND)}" for name, m in modules if hasattr(type(m), _KIND))


class Recipe:
    """The recipe of one run; UserError if the device cannot train in its precision."""

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.precision = MixedPrecision(config.precision or FLOAT32, device)  # autocast and gradient scaling
        self.compiled = False

    def set_process(self) -> None:
        """Set what holds for the process; `ProcessState` restores it after the run."""
        config = self._config
        if config.deterministic:
            if self._device.type == "cuda":  # without which torch before 2.10 raises
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = bool(config.cudnn_benchmark)

    def prepare_model(self, model: nn.Module, before_change: Callable[[], None], changed: Callable[[], None]) -> None:
        """Set the memory format, and what is computed again in the backward pass."""
        if self._config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # left out of its stubs
        if self._config.activation_checkpointing is not None:
            before_change()
            apply_checkpointing(model, self._config.activation_checkpointing)
            changed()

    def prepare_optimizer(self, optimizer: Optimizer, batch_factor: float) -> Optimizer:
        """Return the optimizer with the recipe's kernels and learning rates; it must not have stepped yet.

        Learning rates follow the batch size linearly with SGD (Goyal et al. 2017, section 2.1), with its square root
        with other optimizers, whose steps do not grow with the gradient (Malladi et al. 2022, section 5).
        ``batch_factor`` is the batch size over the workload's own. UserError: an optimizer without fused steps.
        """
        if self._config.fused_optimizer is not None:
            optimizer = with_kernels(optimizer, fused=self._config.fused_optimizer)
        skips = self._config.skips_gradients
        scale_learning_rates(optimizer, self._config.gradskip_settings().lr_factor if skips else 1.0)
        if batch_factor != 1.0:
            factor = batch_factor if isinstance(optimizer, SGD) else batch_factor**0.5
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
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
        config, on_gpu = self._config, self._device.type == "cuda"
        if config.pin_memory and not on_gpu:
            warnings.warn("pin_memory=True has no effect on the CPU: nothing is transferred", stacklevel=2)
        pin = on_gpu and config.pin_memory is not False
        return BatchLoader(workload, config.seed, workers=config.loader_workers, pin_memory=pin)

    def on_device(self, batch: Batch) -> Batch:
        """Return the batch on the device; from page-locked memory without waiting for the transfer."""
        last: dict[str, Any] = {"memory_format": torch.channels_last} if self._config.channels_last else {}
        return tuple(t.to(self._device, non_blocking=True, **(last if t.dim() == 4 else {})) for t in batch)

    def after_backward(self, optimizer: Optimizer) -> None:
        """Unscale and clip the gradients, before anything else reads them."""
        self.precision.unscale(optimizer)
        if self._config.clip_grad_norm is not None:
            # Those of the optimizer: a method that removes structures replaces the model's.
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            nn.utils.clip_grad_norm_(parameters, self._config.clip_grad_norm)


def has_kernels(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class has fused steps (`with_kernels`)."""
    return "fused" in inspect.signature(type(optimizer).__init__).parameters


def with_kernels(
    optimizer: Optimizer, *, fused: bool | None = None, parameters: Mapping[Any, nn.Parameter] | None = None
) -> Optimizer:
    """Return an optimizer like this one, without its state, whose step is one kernel or one kernel an operation.

    ``fused=None`` keeps its kernels; ``parameters`` has what stands for each of its parameters, None for themselves.

    Raises:
        UserError: its class has no fused step.
    """
    kind = type(optimizer)
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
    taken = inspect.signature(kind.__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return kind(groups, **{**defaults, **kernels})
