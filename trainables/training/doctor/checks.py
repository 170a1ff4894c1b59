"""The single findings of the doctor: each looks for one thing, measures what it costs, and says how to mend it."""

from __future__ import annotations

import copy
import inspect
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.recipe.recipe import with_kernels

# --- Arguments of a model's forward pass: as a training step gives them, or as a batch suggests -----------------------


@dataclass(frozen=True)
class ModelCall:
    """Arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    """Arguments by position."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name."""

    def __call__(self, model: nn.Module) -> Any:
        """Return what a model gives for these arguments."""
        return model(*self.positional, **self.keywords)

    def detached(self, device: torch.device | None = None) -> ModelCall:
        """Return the same arguments outside the graph that they came from, on a device if one is given."""

        def moved(value: Any) -> Any:
            return value.detach().to(device) if isinstance(value, Tensor) else value

        return ModelCall(*tree_map(moved, (self.positional, dict(self.keywords))))


def call_from_batch(model: nn.Module, batch: Any) -> ModelCall:
    """Return the call that a batch suggests.

    The values of a mapping go to the arguments of the same names, as models of Hugging Face take them; of a sequence,
    the first ones go to the arguments without defaults. Otherwise the first tensor is the model's input.

    Raises:
        UserError: the batch has no tensor.
    """
    if isinstance(batch, Tensor):
        return ModelCall((batch,))
    taken = inspect.signature(model.forward).parameters
    needed = [name for name, one in taken.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if isinstance(batch, Mapping):
        named = {name: value for name, value in batch.items() if name in taken}
        if named and named.keys() >= set(needed):
            return ModelCall(keywords=named)
        values = list(batch.values())
    else:
        values = list(batch) if isinstance(batch, (tuple, list)) else []
        first = values[: len(needed)]
        if len(needed) > 1 and len(first) == len(needed) and all(isinstance(value, Tensor) for value in first):
            return ModelCall(tuple(first))
    if not values:
        raise UserError("the doctor needs batches with a tensor, got one without")
    return call_from_batch(model, values[0])


class NetworkCalls:
    """The networks that are called with gradients, each with the arguments of its latest call.

    Parts that a recorded network calls are no networks of their own.
    """

    def __init__(self) -> None:
        self._calls: dict[nn.Module, ModelCall] = {}
        self._depth = 0
        self.trains = True
        """Training mode of the latest network that was called; True before the first call."""

    @contextmanager
    def recorded(self) -> Iterator[NetworkCalls]:
        """Record the calls inside the context."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @property
    def by_network(self) -> dict[nn.Module, ModelCall]:
        """Return the recorded calls, without networks that are parts of another recorded one."""
        parts = {part for network in self._calls for part in network.modules() if part is not network}
        return {network: call for network, call in self._calls.items() if network not in parts}

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        self._depth -= 1
        if self._depth or not any(True for _ in module.parameters()):  # a loss is no network
            return
        self.trains = module.training
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._calls[module] = ModelCall(positional, keywords).detached()


# --- Observation of training steps: where the host waits for the device, and gradients are clipped or set to zero


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_CLIPPING = str(Path(_TORCH) / "nn" / "utils" / "clip_grad.py")
_LIBRARIES = sysconfig.get_paths()["stdlib"]
#: Operations whose result the host needs, so that it waits for the device.
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
}


#: Operations by which torch.nn.utils clips: the norm, or each value's limit.
_CLIPS = {
    torch.ops.aten._foreach_norm.Scalar,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten._foreach_clamp_min_.Scalar,
    torch.ops.aten.clamp_.default,
}


class StepWatch(TorchDispatchMode):
    """Record in training steps where the host waits for a device, and where scaled gradients are clipped.

    A read waits if operations of the device came after the read before it. Reads that torch makes by itself count for
    the line that called it, except those of its optimizers, which read their own counters.

    Args:
        device: tensors of other devices are not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._busy, self._scaled = True, False  # operations from before may still run
        self._stack = ExitStack()
        self.steps = 0
        """Steps that have begun."""
        self.waits: Counter[str] = Counter()
        """Waits by ``file:line``."""
        self.steps_of: defaultdict[str, set[int]] = defaultdict(set)
        """The steps in which each line waited."""
        self.clipped_scaled: set[str] = set()
        """Lines, ``file:line``, that clip gradients which a GradScaler has not unscaled."""

    def begin_step(self) -> None:
        """Count what follows for a new step."""
        self.steps += 1

    def __enter__(self) -> Self:
        for name, scaled in (("scale", True), ("unscale_", False), ("step", False)):
            self._stack.enter_context(_noted(name, partial(setattr, self, "_scaled", scaled)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_read(operation, arguments, keywords or {}, self._device):
            place = calling_line(sys._getframe(1)) if self._busy else None
            if place is not None:
                self.waits[place] += 1
                self.steps_of[place].add(self.steps)
            self._busy = False
        elif any(isinstance(leaf, Tensor) and leaf.device.type == self._device.type for leaf in tree_leaves(arguments)):
            self._busy = True
            if self._scaled and operation in _CLIPS and _called_by_clipping(sys._getframe(1)):
                self.clipped_scaled.add(calling_line(sys._getframe(1)) or "?")
        return operation(*arguments, **(keywords or {}))


@contextmanager
def _noted(name: str, note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` before each call of a method of enabled gradient scalers."""
    original = getattr(torch.amp.GradScaler, name)

    def method(self: torch.amp.GradScaler, *arguments: Any, **keywords: Any) -> Any:
        if self.is_enabled():
            note()
        return original(self, *arguments, **keywords)

    setattr(torch.amp.GradScaler, name, method)
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, name, original)


def _called_by_clipping(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _CLIPPING:
            return True
        frame = frame.f_back
    return False


def _is_read(operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the host waits: for a value, or for a copy from the GPU, unless it is told not to."""
    if operation is torch.ops.aten._to_copy.default:
        target = keywords.get("device")
        from_gpu = arguments[0].device.type == device.type == "cuda"
        return from_gpu and target is not None and target.type == "cpu" and not keywords.get("non_blocking")
    return operation in _READS and isinstance(arguments[0], Tensor) and arguments[0].device.type == device.type


def calling_line(frame: FrameType | None) -> str | None:
    """Return ``file:line`` of the innermost frame outside torch; None for torch's optimizers and for no such frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{_TORCH}/optim/") or file.startswith(f"{_TORCH}/amp/"):
            return None
        inside = file.startswith((_TORCH, _OURS, _LIBRARIES, "<frozen"))
        if not inside or ("site-packages" in file and not file.startswith(_TORCH)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def zeroed_gradients() -> Iterator[Counter[str]]:
    """Record the lines that set gradients to zero instead of None inside the context."""
    places: Counter[str] = Counter()
    homes: list[Any] = [torch.optim.Optimizer, nn.Module]
    originals = [home.zero_grad for home in homes]

    def watched(original: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> Any:
            if not set_to_none and any(p.grad is not None for p in parameters_of(self)):
                places[calling_line(sys._getframe(1)) or "?"] += 1
            return original(self, set_to_none)

        return zero_grad

    for home, original in zip(homes, originals, strict=True):
        home.zero_grad = watched(original)
    try:
        yield places
    finally:
        for home, original in zip(homes, originals, strict=True):
            home.zero_grad = original


def parameters_of(owner: Any) -> list[nn.Parameter]:
    """Return the parameters of a module or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


# --- The single findings of the doctor --------------------------------------------------------------------------------


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
