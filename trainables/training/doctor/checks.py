"""Findings of the doctor: each fault with its cost, two variants measured in turns on one machine, and its mend."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.observation import ModelCall
from trainables.training.recipe.recipe import with_kernels

#: Pairs of runs that a cost is measured from, after one pair that is not counted.
PAIRS = 7
#: Seconds that the pairs of one measurement may take together; three are run even if they exceed it.
BUDGET_S = 10.0
#: Widest range of savings, from below zero to above it, that is still an answer.
WIDEST = 0.5
#: Share of a step that waiting for data may take without a finding.
WAITING = 0.1
#: Share of an optimizer's step that other kernels must save to be a finding.
FASTER = 0.1
#: Largest difference of outputs with and without a bias, relative to the largest output: float32's rounding.
CLOSE = 1e-3
#: Every fault by its name: what it is and why it costs time or memory, and lines of code or words that mend it.
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data-parallel": (
        "nn.DataParallel copies the model to every GPU in each step and runs all of them from one process",
        ("torch.nn.parallel.DistributedDataParallel(model), one process a GPU, started by torchrun",),
    ),
    "bias-before-batch-norm": (
        "{layers} a bias that the batch norm behind subtracts again: {elements:,} parameters with gradients and "
        "optimizer state without effect",
        (),
    ),
    "optimizer-on-the-slow-path": (
        "{kind} updates {count} parameters by several kernels each",
        ("torch.optim.{kind}(..., fused=True)",),
    ),
    "loader-without-workers": (
        "batches are prepared in the training process, while the GPU waits",
        ("DataLoader(..., num_workers=2, persistent_workers=True)",),
    ),
    "loader-without-pinned-memory": (
        "batches are copied to the GPU from pageable memory, so that no transfer overlaps the computation",
        ("DataLoader(..., pin_memory=True)", "batch.to(device, non_blocking=True)"),
    ),
    "data-loading": (
        "the training waits for its data{workers}",
        ("more num_workers in the DataLoader, or data that is decoded once",),
    ),
    "gradients-set-to-zero": (
        "zero_grad(set_to_none=False) in {places}: each gradient is written, read and added to, where the first one "
        "could be kept as it is",
        ("optimizer.zero_grad()",),
    ),
    "clipping-before-unscale": (
        "gradients are clipped before GradScaler.unscale_ in {places}: the limit applies to gradients times the loss "
        "scale, so that nearly every step is cut short by another factor",
        ("scaler.unscale_(optimizer)  # before clipping",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that makes a training slower than it has to be."""

    name: str  # short name, in words joined by hyphens
    what: str  # the fault in words, and why it costs time or memory
    cost: str
    mend: tuple[str, ...]  # lines of code or words that mend it

    def __str__(self) -> str:
        return "\n    ".join((f"{self.name}: {self.what}", f"cost: {self.cost}", *self.mend))


@dataclass(frozen=True)
class Diagnosis:
    """Each thing to mend; printed, the whole report."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if not self.findings:
            return "recipe: nothing found that makes this training slower than it has to be (docs/recipe.md)"
        return "\n".join([f"recipe: {len(self.findings)} to mend (docs/recipe.md)", *map(str, self.findings)])


def found(name: str, cost: str, **values: Any) -> Finding:
    """Return the finding of a fault of `FAULTS`, whose texts take these values."""
    what, mend = FAULTS[name]
    return Finding(name=name, what=what.format(**values), cost=cost, mend=tuple(line.format(**values) for line in mend))


def saving_text(ratios: Sequence[float], of: str) -> str:
    """Return the saving in words, the median pair's with its spread, from the times of one variant over another's."""
    low, high = 1 - max(ratios), 1 - min(ratios)
    if low <= 0 <= high and high - low > WIDEST:
        return f"cannot be told here: times of {of} vary too much ({len(ratios)} pairs)"
    if low <= 0 <= high:
        return f"none measurable here: {percent(low)} to {percent(high)} of {of} ({len(ratios)} pairs)"
    return f"{percent(1 - median(ratios))} of {of} ({percent(low)} to {percent(high)}, {len(ratios)} pairs)"


def percent(share: float) -> str:
    """Return a share as text.

    >>> percent(0.0312)
    '3.1 %'
    """
    return f"{100 * share:.1f} %"


def time_ratios(mended: Callable[[], object], plain: Callable[[], object], device: torch.device) -> list[float]:
    """Run two variants in turns and return the ratios of their times, pair by pair."""

    def seconds(run: Callable[[], object]) -> float:
        begun = now_s(device)
        run()
        return now_s(device) - begun

    first = seconds(mended) + seconds(plain)
    pairs = max(3, min(PAIRS, int(BUDGET_S / max(first, 1e-9))))
    return [seconds(mended) / seconds(plain) for _ in range(pairs)]


def now_s(device: torch.device) -> float:
    """Return the clock when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_and_backward(model: nn.Module, call: ModelCall) -> None:
    """Run a model forward and backward from the mean of its outputs."""
    total = sum((tensor.mean() for tensor in _tensors(call(model))), start=torch.zeros(()))
    if total.requires_grad:
        model.zero_grad()
        total.backward()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.float()] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


# --- Biases directly before a batch norm, which subtracts them again with the batch's mean ----------------------------
# Shapes: x (B, C, ...) a layer's output without its bias b (C,); a batch norm in training mode gives the same for x and
# x + b, and in evaluation mode with a running mean m the same for (x + b, m) and (x, m - b).

_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


def biases_before_norms(model: nn.Module, call: ModelCall) -> dict[str, str]:
    """Return the layers whose bias is without effect, each with the norm behind it, by name; the model is not changed.

    A norm takes their output in a forward pass, and no output of the model changes, in training and evaluation, when
    the bias is moved at random and the norm's running mean with it.
    """
    candidates = _outputs_into_norms(model, call)

    def without_effect(moved: Sequence[tuple[str, str, float]]) -> bool:
        return output_difference(model, _moved(model, moved), call) <= CLOSE

    if candidates and not without_effect(candidates):
        candidates = [one for one in candidates if without_effect([one])]
    return {layer: norm for layer, norm, _ in candidates}


def _outputs_into_norms(model: nn.Module, call: ModelCall) -> list[tuple[str, str, float]]:
    """Return (layer with a bias, batch norm that takes its output and trains, the output's deviation)."""
    model = copy.deepcopy(model).train()
    hooked = {module for module in model.modules() if module._forward_hooks}
    calls: Counter[nn.Module] = Counter()
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # the outputs, by their address
    followed: dict[nn.Module, tuple[nn.Module, float]] = {}

    def note(module: nn.Module, given: Any, output: Any) -> None:
        calls[module] += 1
        if isinstance(module, _LAYERS) and isinstance(module.bias, nn.Parameter) and module not in hooked:
            made[id(output)] = module, output
        elif isinstance(module, _BatchNorm) and module.training and given and id(given[0]) in made:
            layer, value = made[id(given[0])]
            followed[layer] = module, float(value.std(correction=0)) or 1.0

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
        call(model)
    for handle in handles:
        handle.remove()
    names = {module: name for name, module in model.named_modules()}
    return [
        (names[layer], names[norm], scale)
        for layer, (norm, scale) in followed.items()
        if calls[layer] == calls[norm] == 1
    ]


def _moved(model: nn.Module, biases: Sequence[tuple[str, str, float]]) -> nn.Module:
    """Return a copy whose biases, and running means with them, are moved by random numbers of these deviations."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer, norm, scale in biases:
            bias, mean = moved.get_parameter(f"{layer}.bias"), getattr(moved.get_submodule(norm), "running_mean", None)
            step = (torch.randn(bias.shape, generator=generator) * scale).to(bias)
            bias.add_(step)
            if isinstance(mean, Tensor):
                mean.add_(step)
    return moved


def output_difference(model: nn.Module, other: nn.Module, call: ModelCall) -> float:
    """Return the largest difference of outputs in training and evaluation mode, relative to the largest output."""
    worst = 0.0
    for mode in (True, False):
        outputs = []
        for one in (model, other):
            trial = copy.deepcopy(one).train(mode)
            with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
                outputs.append(_tensors(call(trial)))
        for first, second in zip(*outputs, strict=True):
            scale = float(first.abs().max()) or 1.0
            worst = max(worst, float((first - second).abs().max()) / scale)
    return worst


def examine(
    device: torch.device,
    networks: Mapping[nn.Module, ModelCall | None],
    optimizers: Iterable[Optimizer],
    *,
    loader: Iterable[Any] | None = None,
    loader_share: float | None = None,
    zeroed: Collection[str] = (),
    clipped: Collection[str] = (),
) -> Diagnosis:
    """Return the findings on networks that are trained together, each with a call of it where that is known.

    ``loader_share`` is the share of a step that waits for its batch, in [0, 1], None where it was not measured;
    ``zeroed`` and ``clipped`` are lines that set gradients to zero and that clip scaled gradients.
    """
    findings = []
    for name, cost, places in (
        ("gradients-set-to-zero", "a write and a read of each gradient", zeroed),
        ("clipping-before-unscale", "no time: it changes the training", clipped),
    ):
        if places:
            findings.append(found(name, cost, places=", ".join(sorted(places))))
    for optimizer in optimizers:
        findings += slow_optimizer(optimizer, device)
    findings += loading(loader, loader_share, on_gpu_machine=torch.cuda.is_available())
    for network, call in networks.items():
        of_network = []
        if any(isinstance(module, nn.DataParallel) for module in network.modules()):
            of_network.append(found("data-parallel", "not measured: it needs several GPUs"))
        if call is not None:
            of_network += superfluous_biases(network, call, device)
        which = f"in {type(network).__name__}, " if len(networks) > 1 else ""
        findings += [replace(finding, what=f"{which}{finding.what}") for finding in of_network]
    return Diagnosis(tuple(findings))


def superfluous_biases(model: nn.Module, call: ModelCall, device: torch.device) -> Iterator[Finding]:
    """Find biases before batch norms."""
    layers = list(biases_before_norms(model, call))
    if not layers:
        return
    plain, mended = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    for name in layers:
        mended.get_submodule(name).register_parameter("bias", None)
    ratios = time_ratios(lambda: forward_and_backward(mended, call), lambda: forward_and_backward(plain, call), device)
    finding = found(
        "bias-before-batch-norm",
        saving_text(ratios, "forward and backward"),
        layers=f"{len(layers)} {'layers have' if len(layers) > 1 else 'layer has'}",
        elements=sum(model.get_parameter(f"{name}.bias").numel() for name in layers),
    )
    lines = (
        f'model.get_submodule("{name}").register_parameter("bias", None)  # or built with bias=False' for name in layers
    )
    yield replace(finding, mend=(*lines, "CAC_STOP_LAYER_NUM: parameters behind a bias that goes get smaller numbers"))


def slow_optimizer(optimizer: Optimizer, device: torch.device) -> Iterator[Finding]:
    """Find an optimizer that would be faster with one kernel a step, measured on copies of its parameters."""
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups) or not any(group["params"] for group in groups):
        return
    copies = {p: nn.Parameter(p.detach().clone()) for group in groups for p in group["params"]}
    for parameter in copies.values():
        parameter.grad = torch.ones_like(parameter)
    try:
        plain = with_kernels(optimizer, parameters=copies)
        fused = with_kernels(optimizer, fused=True, parameters=copies)
        ratios = time_ratios(fused.step, plain.step, device)
    except (UserError, RuntimeError, TypeError, ValueError):  # no fused step for this class, device or dtype
        return
    if max(ratios) <= 1 - FASTER:
        cost = saving_text(ratios, "an optimizer step")
        yield found("optimizer-on-the-slow-path", cost, kind=type(optimizer).__name__, count=len(copies))


def loading(loader: Iterable[Any] | None, share: float | None, *, on_gpu_machine: bool) -> Iterator[Finding]:
    """Find loaders that hold the step back; arguments as in `examine`."""
    cost = "not measured" if share is None else f"{percent(share)} of a step waits for its batch here"
    if on_gpu_machine and isinstance(loader, DataLoader):
        if loader.num_workers == 0:
            yield found("loader-without-workers", cost)
        if not loader.pin_memory:
            yield found("loader-without-pinned-memory", cost)
    if share is not None and share > WAITING:
        workers = f", with num_workers={loader.num_workers}" if isinstance(loader, DataLoader) else ""
        yield found("data-loading", cost, workers=workers)
