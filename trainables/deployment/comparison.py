"""Compare an exported file with the model that it was made of: outputs, metrics, size and latency."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainables.compression.quantizers.quantized_modules import INPUT, OUTPUT
from trainables.deployment.call import Call
from trainables.deployment.exporting import ExportedModel, IntegerActivations, IntegerTensor
from trainables.errors import UserError
from trainables.workloads.base import Workload

#: Greatest difference of outputs that do not depend on rounding, as a share of their root mean square.
TOLERANCE = 1e-3
#: By how much of its root mean square an activation is moved before a quantizer rounds it, to see what comes of that:
#: more than int32 biases and another order of sums move it.
MOVED = 1e-3


def call_of(model: nn.Module, pass_through: Callable[[], object]) -> Call:
    """Return the arguments of the model's first call, on the CPU; the model is not run.

    Args:
        model: the model.
        pass_through: calls it, such as an evaluation.

    Raises:
        UserError: it does not call the model itself.
    """

    class _Seen(BaseException):
        pass

    found: list[Call] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Call(args, kwargs).changed(lambda tensor: tensor.detach().cpu()))
        raise _Seen

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        pass_through()
    except _Seen:
        return found[0]
    finally:
        handle.remove()
    raise UserError(
        "the workload's evaluation must call its model to be exported, as one of two networks does not: give the part "
        "that you need to tune_cac.export_model(part, (inputs,), 'model.onnx')"
    )


class Compared(NamedTuple):
    """Two models on the batches of a split."""

    difference: float
    """Root mean square of the difference of all outputs, over that of the first model's."""
    samples: int
    metrics: dict[str, float]
    """Of the second model, by name."""


def compare(
    first: nn.Module, second: nn.Module, workload: Workload, metric: str, split: str = "validation"
) -> Compared:
    """Evaluate the second model on a split, and the first beside it on every batch; both in eval mode on the CPU."""
    sums = {"apart": 0.0, "whole": 0.0, "samples": 0}

    class Both(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            theirs, ours = first(*args, **kwargs), second(*args, **kwargs)
            sums["samples"] += Call(args, kwargs).size
            for a, b in zip(pytree.tree_leaves(theirs), pytree.tree_leaves(ours), strict=True):
                if isinstance(a, Tensor) and a.is_floating_point():
                    sums["apart"] += float((a.double() - b.double()).square().sum())
                    sums["whole"] += float(a.double().square().sum())
            return ours

        def __getattr__(self, name: str) -> Any:
            return getattr(first, name)

    with torch.no_grad():
        metrics = workload.metrics_on(Both(), split, torch.device("cpu"), metric)
    difference = (sums["apart"] / sums["whole"]) ** 0.5 if sums["whole"] else sums["apart"] ** 0.5
    return Compared(difference, int(sums["samples"]), metrics)


#: How far from the middle of two steps, as a share of a step, a value may be that falls on either: more than int32
#: biases and another order of sums move it.
BETWEEN = 0.02


class RoundedAlike(nn.Module):
    """Run the trained model with every activation rounded as an ONNX file rounds it, where it may be rounded so.

    A value in the middle of two steps, within `BETWEEN`, may fall on either, and what follows moves by whole steps, the
    more the fewer the bits. With the file's choice in the model, too, outputs must be alike whatever the bits. A
    value that the file rounds otherwise is left as the model rounds it, and counted.

    Args:
        model: on the CPU, in eval mode.
        exported: its file.
        as_written: whether the file is run as it is written, else as onnxruntime executes it.
    """

    def __init__(self, model: nn.Module, exported: ExportedModel, *, as_written: bool) -> None:
        super().__init__()
        self.model, self._integers = model, IntegerActivations(exported, as_written=as_written)
        self.activations = self.between = self.wrong = 0
        """Rounded so far; of these rounded to another step than the model's by the file, and where it must not."""
        self.quantizers = frozenset(one.quantizer for one in self._integers.found)
        """Names of the quantizers whose integers the file has, since the first batch those of all their calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.quantizers and not self.activations:
            called = Counter[str]()
            self._hooked(lambda name, *_: called.update([name]), args, kwargs)
            called.subtract(one.quantizer for one in self._integers.found)  # it has no equal or idle ones
            self.quantizers = frozenset(name for name in self.quantizers if not called[name])
        calls: dict[str, list[tuple[IntegerTensor, Tensor]]] = {name: [] for name in self.quantizers}
        for one, integers in self._integers(args, kwargs):
            if one.quantizer in calls:
                calls[one.quantizer].append((one, integers))

        def follow(name: str, module: nn.Module, given: tuple[Tensor], rounded: Tensor) -> Tensor:
            one, integers = calls[name].pop(0)
            values, step, (x,) = (integers.to(rounded.dtype) - one.zero) * one.step, one.step, given
            apart, middle = (values - rounded).abs(), (values + rounded) / 2
            other = apart > step / 2
            allowed = (apart < 1.5 * step) & ((x - middle).abs() <= BETWEEN * step)
            self.activations += x.numel()
            self.between += int(other.sum())
            self.wrong += int((other & ~allowed).sum())
            return torch.where(other & allowed, values, rounded)

        return self._hooked(follow, args, kwargs)

    def _hooked(self, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        names = self.quantizers
        handles = [self.model.get_submodule(name).register_forward_hook(partial(act, name)) for name in names]
        try:
            return self.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


def tolerance(model: nn.Module, workload: Workload, metric: str, alike: Container[str] = ()) -> float:
    """Return how far outputs of a file may be from the model's, as `Compared.difference`; the model is on the CPU.

    Quantizers ``alike`` are left as they are, for `RoundedAlike` sees to them. Others move what follows by whole steps
    where the file rounds otherwise: it may be half again as far from the model as that is from itself with moved
    activations. Of those in the very middle this moves one half and a file may move all, which makes sqrt(2) of it.
    """
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)

    def move(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        return x + MOVED * x.square().mean().sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    for name, module in moved.named_modules():
        if name.rpartition(".")[2] in (INPUT, OUTPUT) and name not in alike:
            module.register_forward_pre_hook(move)
    return TOLERANCE + 1.5 * compare(model, moved, workload, metric).difference


class Latency(NamedTuple):
    """Seconds of two models' forward passes, measured in turns."""

    first_s: float
    second_s: float
    ratio: float
    """Median of the rounds' ratios, second over first."""
    low: float
    """First quartile of the ratios."""
    high: float
    """Third quartile."""


def latencies(first: nn.Module, second: nn.Module, call: Call, *, rounds: int = 21, round_s: float = 0.03) -> Latency:
    """Measure both models in turns, so that what else the machine does meets both; each round takes about round_s."""
    times: dict[str, list[float]] = {"first": [], "second": []}
    with torch.no_grad():

        def once(model: nn.Module) -> float:
            start = perf_counter()
            model(*call.args, **call.kwargs)
            return perf_counter() - start

        repeats = {name: max(1, int(round_s / min(once(model) for _ in range(3))))
                   for name, model in (("first", first), ("second", second))}  # fmt: skip
        for _ in range(rounds):
            for name, model in (("first", first), ("second", second)):
                times[name].append(median(once(model) for _ in range(repeats[name])))
    ratios = sorted(b / a for a, b in zip(times["first"], times["second"], strict=True))
    quarter = len(ratios) // 4
    return Latency(
        median(times["first"]), median(times["second"]), median(ratios), ratios[quarter], ratios[-1 - quarter]
    )
