"""Findings of the doctor: each fault with its cost, two variants measured in turns on one machine, and its mend."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.observation import ModelCall, StepWatch
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
_UNKNOWN = "not measured: no batch was given"
_PASSES = "forward and backward"
#: Every fault by its name: what it is and why it costs time or memory, and lines of code or words that mend it.
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data-parallel": (
        "nn.DataParallel copies the model to every GPU in each step and runs all of them from one process",
        ("torch.nn.parallel.DistributedDataParallel(model), one process a GPU, started by torchrun",),
    ),
    "float32-without-tensor-cores": (
        "matrix products run in full float32, though this GPU's tensor cores multiply TF32",
        ('torch.set_float32_matmul_precision("high")', "or torch.autocast with bfloat16"),
    ),
    "bias-before-batch-norm": (
        "{layers} a bias that the batch norm behind subtracts again: {elements:,} parameters with gradients and "
        "optimizer state without effect (outputs without them differ by {difference:.1e} of the largest)",
        ("in a state that is trained already, subtract each bias from the running mean of the norm behind it",),
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
    "host-waits-for-device": (
        "values are read in every step: {places}; the host cannot prepare the next operations meanwhile",
        ("keep sums on the device (total += loss.detach()) and read them once in many steps",),
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

    name: str
    """Short name, in words joined by hyphens."""
    what: str
    """The fault in words, and why it costs time or memory."""
    cost: str
    mend: tuple[str, ...]
    """Lines of code or words that mend it."""

    def __str__(self) -> str:
        return "\n    ".join((f"{self.name}: {self.what}", f"cost: {self.cost}", *self.mend))


def found(name: str, cost: str, **values: Any) -> Finding:
    """Return the finding of a fault of `FAULTS`, whose texts take these values."""
    what, mend = FAULTS[name]
    return Finding(name=name, what=what.format(**values), cost=cost, mend=tuple(line.format(**values) for line in mend))


def report_text(findings: Sequence[Finding]) -> str:
    """Return all findings as text; one line where there are none."""
    if not findings:
        return "recipe: nothing found that makes this training slower than it has to be (docs/recipe.md)"
    return "\n".join([f"recipe: {len(findings)} to mend (docs/recipe.md)", *map(str, findings)])


# --- Costs: two variants in turns, as ratios --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratios:
    """Times of one variant over another, pair by pair."""

    values: tuple[float, ...]

    def text(self, of: str) -> str:
        """Return the saving in words: the median pair's, with its spread."""
        low, high = 1 - max(self.values), 1 - min(self.values)
        if low <= 0 <= high and high - low > WIDEST:
            return f"cannot be told here: times of {of} vary too much ({len(self.values)} pairs)"
        if low <= 0 <= high:
            return f"none measurable here: {percent(low)} to {percent(high)} of {of} ({len(self.values)} pairs)"
        saved = 1 - median(self.values)
        return f"{percent(saved)} of {of} ({percent(low)} to {percent(high)}, {len(self.values)} pairs)"


def percent(share: float) -> str:
    """Return a share as text.

    >>> percent(0.0312)
    '3.1 %'
    """
    return f"{100 * share:.1f} %"


def ratios(mended: Callable[[], object], plain: Callable[[], object], device: torch.device) -> Ratios:
    """Run two variants in turns and return the ratios of their times."""

    def seconds(run: Callable[[], object]) -> float:
        _wait(device)
        begun = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - begun

    first = seconds(mended) + seconds(plain)
    pairs = max(3, min(PAIRS, int(BUDGET_S / max(first, 1e-9))))
    return Ratios(tuple(seconds(mended) / seconds(plain) for _ in range(pairs)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forward_and_backward(model: nn.Module, call: ModelCall, *, set_to_none: bool = True) -> None:
    """Run a model forward and backward from the mean of its outputs."""
    total = sum((tensor.mean() for tensor in _tensors(call(model))), start=torch.zeros(()))
    if total.requires_grad:
        model.zero_grad(set_to_none=set_to_none)
        total.backward()


def _tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output in float32."""
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
    """Return the layers whose bias is without effect, each with the norm behind it, by name.

    A norm takes their output in a forward pass, and no output of the model changes, in training and evaluation, when
    the bias is moved at random and the norm's running mean with it.

    Args:
        model: not changed.
        call: arguments of one forward pass.
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


def without_biases(model: nn.Module, pairs: Mapping[str, str]) -> nn.Module:
    """Return a copy of a model without these biases (`biases_before_norms`), running means less by them."""
    mended = copy.deepcopy(model)
    with torch.no_grad():
        for layer, norm in pairs.items():
            mean = mended.get_submodule(norm).running_mean
            if isinstance(mean, Tensor):
                mean.sub_(mended.get_parameter(f"{layer}.bias"))
            mended.get_submodule(layer).register_parameter("bias", None)
    return mended


def expression(model: nn.Module, name: str) -> str:
    """Return the Python expression of a module within ``model``, such as ``model.features[0]``."""
    text = "model"
    for part in name.split("."):
        indexed = isinstance(model, (nn.Sequential, nn.ModuleList)) and part.isdigit()
        text += f"[{part}]" if indexed else f".{part}" if part.isidentifier() else f'.get_submodule("{part}")'
        model = model.get_submodule(part)
    return text


# --- The single findings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Facts of a training: its networks, optimizers, loader, and lines that zero gradients."""

    device: torch.device
    networks: Mapping[nn.Module, ModelCall | None]
    """Networks that are trained together, each with the arguments of a forward pass where they are known."""
    optimizers: Iterable[Optimizer] = ()
    loader: Iterable[Any] | None = None
    loader_share: float | None = None
    """Share of a step that waits for its batch, in [0, 1]; None where it was not measured."""
    watch: StepWatch | None = None
    zeroed: Mapping[str, int] = field(default_factory=dict)
    """Lines that set gradients to zero."""


def examine(seen: Observation) -> list[Finding]:
    """Return the findings on a training."""
    findings = [*zeroed_to_none(seen), *waits_and_clipping(seen.watch)]
    for optimizer in seen.optimizers:
        findings += slow_optimizer(optimizer, seen.device)
    findings += loading(seen.loader, seen.loader_share)
    for network, call in seen.networks.items():
        of_network = [*data_parallel(network), *matmul_precision(network, call, seen.device)]
        if call is not None and (biases := biases_before_norms(network, call)):
            of_network.append(superfluous_biases(network, biases, call, seen.device))
        which = f"in {type(network).__name__}, " if len(seen.networks) > 1 else ""
        findings += [replace(finding, what=f"{which}{finding.what}") for finding in of_network]
    return findings


def data_parallel(model: nn.Module) -> Iterator[Finding]:
    """Find nn.DataParallel."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        yield found("data-parallel", "not measured: it needs several GPUs")


def matmul_precision(model: nn.Module, call: ModelCall | None, device: torch.device) -> Iterator[Finding]:
    """Find float32 products without tensor cores on a GPU that has them for float32 (Ampere and newer)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return
    if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled("cuda"):
        return
    cost = _UNKNOWN
    if call is not None:
        trained = copy.deepcopy(model).train()

        def with_tensor_cores() -> None:
            torch.set_float32_matmul_precision("high")
            try:
                forward_and_backward(trained, call)
            finally:
                torch.set_float32_matmul_precision("highest")

        cost = ratios(with_tensor_cores, lambda: forward_and_backward(trained, call), device).text(_PASSES)
    yield found("float32-without-tensor-cores", cost)


def superfluous_biases(model: nn.Module, pairs: Mapping[str, str], call: ModelCall, device: torch.device) -> Finding:
    """Report biases before batch norms."""
    mended = without_biases(model, pairs)
    difference = output_difference(model, mended, call)
    plain, fixed = copy.deepcopy(model).train(), mended.train()
    cost = ratios(lambda: forward_and_backward(fixed, call), lambda: forward_and_backward(plain, call), device)
    finding = found(
        "bias-before-batch-norm",
        cost.text(_PASSES),
        layers=f"{len(pairs)} {'layers have' if len(pairs) > 1 else 'layer has'}",
        elements=sum(model.get_parameter(f"{name}.bias").numel() for name in pairs),
        difference=difference,
    )
    lines = [
        f'{expression(model, name)}.register_parameter("bias", None)  # or built with bias=False' for name in pairs
    ]
    lines += finding.mend
    lines.append("CAC_STOP_LAYER_NUM: parameters behind a bias that goes get smaller numbers")
    return replace(finding, mend=tuple(lines))


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
        measured = ratios(fused.step, plain.step, device)
    except (UserError, RuntimeError, TypeError, ValueError):  # no fused step for this class, device or dtype
        return
    if max(measured.values) <= 1 - FASTER:
        cost = measured.text("an optimizer step")
        yield found("optimizer-on-the-slow-path", cost, kind=type(optimizer).__name__, count=len(copies))


def loading(loader: Iterable[Any] | None, share: float | None, on_gpu_machine: bool | None = None) -> Iterator[Finding]:
    """Find loaders that hold the step back; arguments as in `Observation`, ``on_gpu_machine=None`` looks for a GPU."""
    cost = "not measured" if share is None else f"{percent(share)} of a step waits for its batch here"
    if on_gpu_machine is None:
        on_gpu_machine = torch.cuda.is_available()
    if on_gpu_machine and isinstance(loader, DataLoader):
        if loader.num_workers == 0:
            yield found("loader-without-workers", cost)
        if not loader.pin_memory:
            yield found("loader-without-pinned-memory", cost)
    if share is not None and share > WAITING:
        workers = f", with num_workers={loader.num_workers}" if isinstance(loader, DataLoader) else ""
        yield found("data-loading", cost, workers=workers)


def zeroed_to_none(seen: Observation) -> Iterator[Finding]:
    """Report lines that set gradients to zero, and what it costs in all networks together."""
    if not seen.zeroed:
        return
    trained = [(copy.deepcopy(network).train(), call) for network, call in seen.networks.items() if call is not None]

    def passes(*, set_to_none: bool) -> None:
        for network, call in trained:
            forward_and_backward(network, call, set_to_none=set_to_none)

    cost = _UNKNOWN
    if trained:
        measured = ratios(lambda: passes(set_to_none=True), lambda: passes(set_to_none=False), seen.device)
        cost = measured.text(_PASSES)
    yield found("gradients-set-to-zero", cost, places=", ".join(seen.zeroed))


def waits_and_clipping(watch: StepWatch | None) -> Iterator[Finding]:
    """Report lines at which the host waits for the device in every watched step, or scaled gradients are clipped."""
    if watch is None:
        return
    regular = {place: len(steps) for place, steps in watch.waits.items() if len(set(steps)) == watch.steps}
    if regular:
        yield found(
            "host-waits-for-device",
            "not measured: what it costs depends on how far a GPU's queue is ahead; nothing on a CPU",
            places=", ".join(f"{place} ({count / watch.steps:g} a step)" for place, count in regular.items()),
        )
    if watch.clipped_scaled:
        places = ", ".join(sorted(watch.clipped_scaled))
        yield found("clipping-before-unscale", "no time: it changes the training", places=places)
