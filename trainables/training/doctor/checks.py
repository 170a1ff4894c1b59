"""The single findings of the doctor: each looks for one thing, measures what it costs, and says how to mend it."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.model_calls import ModelCall
from trainables.training.doctor.step_watch import StepWatch
from trainables.training.recipe.recipe import with_kernels

# --- Findings of the doctor, and the measurement of their costs: two variants in turns on one machine, as ratios ------

#: Pairs of runs that a cost is measured from, after one pair that is not counted.
PAIRS = 7
#: Seconds that the pairs of one measurement may take together; three are run even if they exceed it.
BUDGET_S = 10.0
#: Widest range of savings, from below zero to above it, that is still an answer.
WIDEST = 0.5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that makes a training slower than it has to be."""

    name: str
    """Short name, in words joined by hyphens."""
    what: str
    """The fault in words, and why it costs time or memory."""
    cost: str
    """Its cost here, as measured."""
    mend: tuple[str, ...]
    """Lines of code or words that mend it."""

    def __str__(self) -> str:
        return "\n    ".join((f"{self.name}: {self.what}", f"cost: {self.cost}", *self.mend))


@dataclass(frozen=True)
class Ratios:
    """Times of one variant over another, pair by pair."""

    values: tuple[float, ...]
    """Each pair's ratio."""

    @property
    def saved(self) -> float:
        """Return the share of the second variant's time that the first saves; the median pair's."""
        return 1 - median(self.values)

    def text(self, of: str) -> str:
        """Return the saving in words, with its spread."""
        low, high = 1 - max(self.values), 1 - min(self.values)
        if low <= 0 <= high and high - low > WIDEST:
            return f"cannot be told here: times of {of} vary too much ({len(self.values)} pairs)"
        if low <= 0 <= high:
            return f"none measurable here: {percent(low)} to {percent(high)} of {of} ({len(self.values)} pairs)"
        return f"{percent(self.saved)} of {of} ({percent(low)} to {percent(high)}, {len(self.values)} pairs)"


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


def report_text(findings: Sequence[Finding]) -> str:
    """Return all findings as text; one line where there are none."""
    if not findings:
        return "recipe: nothing found that makes this training slower than it has to be (docs/recipe.md)"
    return "\n".join([f"recipe: {len(findings)} to mend (docs/recipe.md)", *map(str, findings)])


# --- Layers with a bias directly before a batch norm, which subtracts it again with the batch's mean ------------------
# Shapes: x (B, C, ...) a layer's output without its bias b (C,); a batch norm in training mode gives the same for x and
# x + b, and in evaluation mode with a running mean m the same for (x + b, m) and (x, m - b).


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Dimensions of a batched output of a layer, by the end of its class's name; a linear layer's must be (B, C).
_DIMENSIONS = {"1d": 3, "2d": 4, "3d": 5}

StateConverter = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def biases_before_norms(model: nn.Module, call: ModelCall) -> dict[str, str]:
    """Return the layers whose bias is without effect in training, each with the norm behind it, by name.

    The model is traced (torch.fx); where it cannot be, neighbours in an nn.Sequential are found. Only biases are
    returned of which nothing else can depend: the layer and the norm run once in a pass, on each other's output, the
    bias is no other module's, and the norm takes the batch's statistics in training.

    Args:
        model: not changed.
        call: arguments of one forward pass.
    """
    model = copy.deepcopy(model).train()
    candidates = _traced(model)
    if candidates is None:
        candidates = _neighbours(model)
    if not candidates:
        return {}
    hooked = {name: bool(model.get_submodule(name)._forward_hooks) for name in candidates}
    calls = _one_pass(model, call)
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {}
    for name, norm_name in candidates.items():
        layer, norm = model.get_submodule(name), model.get_submodule(norm_name)
        alone = calls.count[layer] == calls.count[norm] == 1 and shared[id(layer.bias)] == 1
        output: Any = calls.output.get(layer)
        follows = isinstance(output, Tensor) and calls.input.get(norm) is output and not hooked[name]
        if alone and follows and norm.training and _same_channels(layer, output):
            found[name] = norm_name
    return found


def _has_bias(module: Any) -> bool:
    return isinstance(module, (*_CONVOLUTIONS, nn.Linear)) and isinstance(module.bias, nn.Parameter)


def _traced(model: nn.Module) -> dict[str, str] | None:
    """Return pairs by the traced graph; None where the model cannot be traced."""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception:  # noqa: BLE001  # control flow that depends on values, and whatever else a model does
        return None
    modules = dict(model.named_modules())
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    found = {}
    for node in graph.nodes:
        if node.op != "call_module" or not _has_bias(modules.get(str(node.target))):
            continue
        users = list(node.users)
        if len(users) != 1 or users[0].op != "call_module" or f"{node.target}.bias" in read:
            continue
        if isinstance(modules[str(users[0].target)], _BatchNorm):
            found[str(node.target)] = str(users[0].target)
    return found


def _neighbours(model: nn.Module) -> dict[str, str]:
    """Return pairs of neighbours in an nn.Sequential that runs its modules one after the other."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            continue
        children = list(module.named_children())
        for (first_name, first), (second_name, second) in pairwise(children):
            if _has_bias(first) and isinstance(second, _BatchNorm):
                beginning = f"{name}." if name else ""
                found[f"{beginning}{first_name}"] = f"{beginning}{second_name}"
    return found


@dataclass
class _Calls:
    """Inputs, outputs and number of calls of each module in a forward pass."""

    count: Counter[nn.Module] = field(default_factory=Counter)
    input: dict[nn.Module, Any] = field(default_factory=dict)
    output: dict[nn.Module, Any] = field(default_factory=dict)


def _one_pass(model: nn.Module, call: ModelCall) -> _Calls:
    """Run a forward pass and return what each module did."""
    calls = _Calls()

    def note(module: nn.Module, given: Any, output: Any) -> None:
        calls.count[module] += 1
        calls.input[module], calls.output[module] = given[0] if given else None, output

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
        call(model)
    for handle in handles:
        handle.remove()
    return calls


def _same_channels(layer: nn.Module, output: Tensor) -> bool:
    """Return whether the bias adds to the dimension that the norm treats: the second one of its input."""
    return output.dim() == _DIMENSIONS.get(type(layer).__name__[-2:], 2)


def without_biases(model: nn.Module, pairs: Mapping[str, str]) -> tuple[nn.Module, StateConverter]:
    """Return a copy of a model without these biases, and a function that converts states of the model to its own.

    Args:
        model: not changed.
        pairs: of `biases_before_norms`.
    """
    mended = copy.deepcopy(model)

    def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(state)
        for layer, norm in pairs.items():
            bias = found.pop(f"{layer}.bias")
            mean = f"{norm}.running_mean"
            if found.get(mean) is not None:
                found[mean] = found[mean] - bias
        return found

    state = converted(mended.state_dict())
    for layer in pairs:
        mended.get_submodule(layer).register_parameter("bias", None)
    mended.load_state_dict(state)
    return mended, converted


def renumbered(model: nn.Module, pairs: Mapping[str, str]) -> dict[int, int]:
    """Return the new number of each parameter that stays, by its old one; `CAC_STOP_LAYER_NUM` takes these numbers."""
    gone = {f"{layer}.bias" for layer in pairs}
    names = [name for name, _ in model.named_parameters()]
    kept = [number for number, name in enumerate(names) if name not in gone]
    return {old: new for new, old in enumerate(kept)}


# --- The single findings of the doctor --------------------------------------------------------------------------------

#: Share of a step that waiting for data may take without a finding.
WAITING = 0.1
#: Share of an optimizer's step that other kernels must save to be a finding.
FASTER = 0.1
#: Largest difference of outputs with and without a bias, relative to the largest output: float32's rounding.
CLOSE = 1e-3


def data_parallel(model: nn.Module) -> Iterator[Finding]:
    """Find nn.DataParallel."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        yield Finding(
            name="data-parallel",
            what="nn.DataParallel copies the model to every GPU in each step and runs all of them from one process",
            cost="not measured: it needs several GPUs",
            mend=("torch.nn.parallel.DistributedDataParallel(model), one process a GPU, started by torchrun",),
        )


def matmul_precision(model: nn.Module, call: ModelCall | None, device: torch.device) -> Iterator[Finding]:
    """Find float32 products without tensor cores on a GPU that has them for float32 (Ampere and newer)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return
    if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled("cuda"):
        return
    cost = "not measured: no batch was given"
    if call is not None:
        trained = copy.deepcopy(model).train()

        def with_tensor_cores() -> None:
            torch.set_float32_matmul_precision("high")
            try:
                forward_and_backward(trained, call)
            finally:
                torch.set_float32_matmul_precision("highest")

        cost = ratios(with_tensor_cores, lambda: forward_and_backward(trained, call), device).text(
            "forward and backward"
        )
    yield Finding(
        name="float32-without-tensor-cores",
        what="matrix products run in full float32, though this GPU's tensor cores multiply TF32",
        cost=cost,
        mend=('torch.set_float32_matmul_precision("high")', "or torch.autocast with bfloat16"),
    )


def of_model(model: nn.Module, call: ModelCall | None, device: torch.device) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings on a model by itself, and its superfluous biases (`biases_before_norms`).

    Args:
        model: not changed.
        call: arguments of one forward pass, if they are known.
        device: of the model.
    """
    findings = [*data_parallel(model), *matmul_precision(model, call, device)]
    pairs = {} if call is None else biases_before_norms(model, call)
    if call is None or not pairs:
        return findings, {}
    mended, _ = without_biases(model, pairs)
    difference = output_difference(model, mended, call)
    if not difference <= CLOSE:  # something depends on a bias after all
        return findings, {}
    return [*findings, superfluous_biases(model, mended, pairs, difference, call, device)], pairs


def of_networks(
    networks: Mapping[nn.Module, ModelCall | None], device: torch.device
) -> tuple[list[Finding], dict[nn.Module, dict[str, str]]]:
    """Return the findings on each of the networks that are trained together, and its superfluous biases."""
    findings, pairs = [], {}
    for network, call in networks.items():
        found, pairs[network] = of_model(network, call, device)
        which = f"in {type(network).__name__}, " if len(networks) > 1 else ""
        findings += [replace(finding, what=f"{which}{finding.what}") for finding in found]
    return findings, pairs


def superfluous_biases(
    model: nn.Module, mended: nn.Module, pairs: Mapping[str, str], difference: float, call: ModelCall,
    device: torch.device,
) -> Finding:  # fmt: skip
    """Report biases before batch norms.

    Args:
        model: not changed.
        mended: the same without these biases.
        pairs: their layers, and the norm behind each.
        difference: of the outputs of both (`output_difference`).
        call: arguments of one forward pass.
        device: of the model.
    """
    plain, fixed = copy.deepcopy(model).train(), mended.train()
    measured = ratios(lambda: forward_and_backward(fixed, call), lambda: forward_and_backward(plain, call), device)
    elements = sum(model.get_parameter(f"{name}.bias").numel() for name in pairs)
    moved = {old: new for old, new in renumbered(model, pairs).items() if old != new}
    first, last = next(iter(moved.items()), None), next(reversed(moved.items()), None)
    shift = () if first is None or last is None else (
        f"CAC_STOP_LAYER_NUM: later parameters get smaller numbers, such as {first[0]} becomes {first[1]} and "
        f"{last[0]} becomes {last[1]}",
    )  # fmt: skip
    return Finding(
        name="bias-before-batch-norm",
        what=f"{len(pairs)} {'layers have' if len(pairs) > 1 else 'layer has'} a bias that the batch norm behind "
        f"subtracts again: {elements:,} parameters with gradients and optimizer state without effect (outputs without "
        f"them differ by {difference:.1e} of the largest)",
        cost=measured.text("forward and backward"),
        mend=(
            *(
                f'{expression(model, name)}.register_parameter("bias", None)  # or built with bias=False'
                for name in pairs
            ),
            "a state that is trained already: tune_cac.doctor(..., fix=True) converts it (running mean minus bias)",
            *shift,
        ),
    )


def expression(model: nn.Module, name: str) -> str:
    """Return the Python expression of a module within ``model``, such as ``model.features[0]``."""
    text = "model"
    for part in name.split("."):
        indexed = isinstance(model, (nn.Sequential, nn.ModuleList)) and part.isdigit()
        text += f"[{part}]" if indexed else f".{part}" if part.isidentifier() else f'.get_submodule("{part}")'
        model = model.get_submodule(part)
    return text


def output_difference(model: nn.Module, mended: nn.Module, call: ModelCall) -> float:
    """Return the largest difference of outputs in training and evaluation mode, relative to the largest output."""
    worst = 0.0
    for mode in (True, False):
        outputs = []
        for one in (model, mended):
            trial = copy.deepcopy(one).train(mode)
            with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
                outputs.append(_tensors(call(trial)))
        for first, second in zip(*outputs, strict=True):
            scale = float(first.abs().max()) or 1.0
            worst = max(worst, float((first - second).abs().max()) / scale)
    return worst


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.float()] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def forward_and_backward(model: nn.Module, call: ModelCall, *, set_to_none: bool = True) -> None:
    """Run a model forward and backward from the mean of its outputs."""
    total = sum((tensor.mean() for tensor in _tensors(call(model))), start=torch.zeros(()))
    if total.requires_grad:
        model.zero_grad(set_to_none=set_to_none)
        total.backward()


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
    if max(measured.values) > 1 - FASTER:
        return
    yield Finding(
        name="optimizer-on-the-slow-path",
        what=f"{type(optimizer).__name__} updates {len(copies)} parameters by several kernels each",
        cost=measured.text("an optimizer step"),
        mend=(f"torch.optim.{type(optimizer).__name__}(..., fused=True)",),
    )


def loading(loader: Iterable[Any] | None, share: float | None, on_gpu_machine: bool | None = None) -> Iterator[Finding]:
    """Find loaders that hold the step back.

    Args:
        loader: of the training, if it is known.
        share: measured share of a step that waits for the batch; None where it was not measured.
        on_gpu_machine: whether there is a GPU; None to look.
    """
    cost = "not measured" if share is None else f"{percent(share)} of a step waits for its batch here"
    if on_gpu_machine is None:
        on_gpu_machine = torch.cuda.is_available()
    if on_gpu_machine and isinstance(loader, DataLoader):
        if loader.num_workers == 0:
            yield Finding(
                name="loader-without-workers",
                what="batches are prepared in the training process, while the GPU waits",
                cost=cost,
                mend=("DataLoader(..., num_workers=2, persistent_workers=True)",),
            )
        if not loader.pin_memory:
            yield Finding(
                name="loader-without-pinned-memory",
                what="batches are copied to the GPU from pageable memory, so that no transfer overlaps the computation",
                cost=cost,
                mend=("DataLoader(..., pin_memory=True)", "batch.to(device, non_blocking=True)"),
            )
    if share is not None and share > WAITING:
        workers = f", with num_workers={loader.num_workers}" if isinstance(loader, DataLoader) else ""
        yield Finding(
            name="data-loading",
            what=f"the training waits for its data{workers}",
            cost=cost,
            mend=("more num_workers in the DataLoader, or data that is decoded once",),
        )


def zeroed_to_none(
    networks: Mapping[nn.Module, ModelCall | None], places: Mapping[str, int], device: torch.device
) -> Iterator[Finding]:
    """Report lines that set gradients to zero, and what it costs in all networks together."""
    if not places:
        return
    cost = "not measured: no batch was given"
    trained = [(copy.deepcopy(network).train(), call) for network, call in networks.items() if call is not None]
    if trained:

        def passes(*, set_to_none: bool) -> None:
            for network, call in trained:
                forward_and_backward(network, call, set_to_none=set_to_none)

        measured = ratios(lambda: passes(set_to_none=True), lambda: passes(set_to_none=False), device)
        cost = measured.text("forward and backward")
    yield Finding(
        name="gradients-set-to-zero",
        what=f"zero_grad(set_to_none=False) in {', '.join(places)}: each gradient is written, read and added to, where "
        "the first one could be kept as it is",
        cost=cost,
        mend=("optimizer.zero_grad()",),
    )


def waits(watch: StepWatch) -> Iterator[Finding]:
    """Report lines at which the host waits for the device in every watched step."""
    regular = {place: count for place, count in watch.waits.items() if len(watch.steps_of[place]) == watch.steps}
    if regular:
        listed = ", ".join(f"{place} ({count / watch.steps:g} a step)" for place, count in regular.items())
        yield Finding(
            name="host-waits-for-device",
            what=f"values are read in every step: {listed}; the host cannot prepare the next operations meanwhile",
            cost="not measured: what it costs depends on how far a GPU's queue is ahead; nothing on a CPU",
            mend=("keep sums on the device (total += loss.detach()) and read them once in many steps",),
        )


def clipping(watch: StepWatch) -> Iterator[Finding]:
    """Report lines that clip gradients while they are multiplied by a GradScaler's scale."""
    if watch.clipped_scaled:
        yield Finding(
            name="clipping-before-unscale",
            what=f"gradients are clipped before GradScaler.unscale_ in {', '.join(sorted(watch.clipped_scaled))}: the "
            "limit applies to gradients times the loss scale, so that nearly every step is cut short by another factor",
            cost="no time: it changes the training",
            mend=("scaler.unscale_(optimizer)  # before clipping",),
        )
