"""Cuts: the points of a model's forward pass up to which its outputs can be kept and need not be computed again.

The output of a module may be kept in place of everything that ran before it, if nothing that runs later uses another
result of what ran before. One forward pass of a copy of the model is recorded, with what each operation reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from trainables.errors import UserError
from trainables.gradskip.execution_order import training_copy
from trainables.runtime.isolation import kept_generators
from trainables.runtime.operator_flops import uncompiled
from trainables.workloads.batch_structure import tensors_in


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """A module whose output may be kept in place of what ran before it."""

    modules: tuple[nn.Module, ...]
    """Modules that need not run again, in the order in which they run; the output of the last one is kept."""
    names: tuple[str, ...]
    """Their names in the model."""
    parameters: tuple[Tensor, ...] = ()
    """Parameters that were read before it, outside of the modules too."""
    shared: tuple[nn.Module, ...] = ()
    """Dropouts before it that run behind it, too, or whose output it is."""

    def all_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the kept output depends on, some perhaps twice."""
        yield from self.parameters
        for module in self.modules:
            yield from module.parameters()


#: Modules without parameters that compute each sample by itself, the same each time, and never enlarge it.
_ENDS = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS) and module.p > 0


def may_end_prefix(module: Any) -> bool:
    """Return whether a stopped prefix may be extended by this module, which has no parameters.

    Dropout is accepted only where it never has an effect: a mask that is drawn once and reused would be another
    regularization, and evaluation has the cut of training. Classes are compared exactly, because a subclass may behave
    differently.
    """
    kind = type(module)
    if kind in _DROPOUTS:
        return bool(module.p == 0)
    if kind is nn.Sequential:
        return all(map(may_end_prefix, module))
    if kind is nn.Flatten:
        return bool(module.start_dim >= 1)
    return kind in _ENDS and not getattr(module, "return_indices", False)


# --- The cuts that a recorded forward pass shows ----------------------------------------------------------------------
# Times count calls of modules and operations. A *value* is what a tensor holds between two changes of it.

#: Reads of a tensor that need no numbers: a tensor of the same shape and kind gives the same.
_METADATA = frozenset(
    [vars(torch._C.TensorBase)[name].__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse",
        "is_quantized", "is_leaf", "requires_grad", "grad_fn", "itemsize", "nbytes",
    )]
    + [Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size,
       Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.stride, Tensor.get_device,
       torch.is_floating_point, torch.is_complex, torch.numel]
)  # fmt: skip


@dataclass(eq=False)
class _Call:
    """A call of a module."""

    module: nn.Module
    name: str
    around: tuple[_Call, ...]  # calls that were running, from the outermost
    seen: int  # tensors that were known at its begin
    end: float = math.inf
    output: _Value | None = None
    rows: int = 0  # first dimension of the output
    is_computed_again: bool = False  # whether it ends in a part that the backward pass runs again (checkpointing)


@dataclass(eq=False)
class _Value:
    """Numbers of a tensor between two changes of it, and the operation that made them."""

    born: int  # -1: it was there before the pass
    around: tuple[_Call, ...] = ()
    sources: tuple[_Value, ...] = ()
    is_opaque: bool = False  # made by something that was not recorded
    parameter: int | None = None  # place among the model's parameters


@dataclass(frozen=True)
class _Read:
    time: float
    value: _Value
    around: tuple[_Call, ...]
    takes_numbers: bool  # into Python, where they may decide what runs


class _Recorder(TorchFunctionMode):
    """Recorder of a copy's forward pass: calls of modules, and what each operation reads and makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.reads: list[_Read] = []
        self.values: list[_Value] = []
        self._running: list[_Call] = []
        self._time = 0
        self._kept: dict[int, tuple[int, Tensor]] = {}  # by id, which no other tensor gets meanwhile; in their order
        self._with_storage: dict[int, list[Tensor]] = {}  # by its address
        self._value_of: dict[int, _Value] = {}
        self.inputs: list[_Value] = []  # of the model
        self.rows = 0  # first dimension of the first of them
        for number, parameter in enumerate(model.parameters()):
            self._set(parameter, _Value(-1, parameter=number))
        self._hooks_outside = _saved_tensor_hooks()
        for name, module in model.named_modules():
            # The user's own hooks run after the module has ended, as they do where its output is kept.
            module.register_forward_pre_hook(partial(_unrecorded(self._enter), name), with_kwargs=True)
            module.register_forward_hook(_unrecorded(self._leave), prepend=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        around = tuple(self._running)
        given = [*tensors_in((args, kwargs))]
        sources, versions = tuple(map(self._value, given)), [t._version for t in given]
        result = func(*args, **kwargs)
        self._time += 1
        made = [*tensors_in(result)]
        changed = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        for value in sources:
            self.reads.append(_Read(self._time, value, around, takes_numbers=not made and not changed))
        for tensor in changed:  # and whatever else looks at the same numbers
            for other in self._with_storage[tensor.untyped_storage().data_ptr()]:
                self._set(other, _Value(self._time, around, (self._value(other), *sources)))
        for tensor in made:
            if not any(tensor is other for other in changed):
                self._set(tensor, _Value(self._time, around, sources))
        return result

    def returned(self, result: Any) -> None:
        """Record what the pass returned, which may be read."""
        with torch._C.DisableTorchFunction():
            self.reads += [_Read(math.inf, self._value(t), (), takes_numbers=False) for t in tensors_in(result)]

    def _set(self, tensor: Tensor, value: _Value) -> _Value:
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = len(self._kept), tensor
            self._with_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._value_of[id(tensor)] = value
        self.values.append(value)
        return value

    def _value(self, tensor: Tensor) -> _Value:
        known = self._value_of.get(id(tensor))
        if known is not None:
            return known
        opaque = tensor.grad_fn is not None
        return self._set(tensor, _Value(self._time if opaque else -1, tuple(self._running), is_opaque=opaque))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._time += 1
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        if name == "":
            self.inputs += map(self._value, tensors)
            self.rows = len(tensors[0]) if tensors else 0
        call = _Call(module, name, tuple(self._running), seen=len(self._kept))
        self.calls.append(call)
        self._running.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._time += 1
        call = self._running.pop()
        call.end = self._time
        call.is_computed_again = _saved_tensor_hooks() is not self._hooks_outside
        if not isinstance(output, Tensor) or not output.dim():
            return None
        call.rows = len(output)
        if self._kept.get(id(output), (call.seen, output))[0] >= call.seen:
            call.output = self._value(output)
            return None
        # It returns a tensor that its caller had before: what is kept takes the place of the returned one alone.
        source, returned, around = self._value(output), output.view_as(output), (*call.around, call)
        self.reads.append(_Read(self._time, source, around, takes_numbers=False))
        call.output = self._set(returned, _Value(self._time, around, (source,)))
        return returned


def _unrecorded(method: Callable[..., Any]) -> Callable[..., Any]:
    def hook(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args)

    return hook


def _saved_tensor_hooks() -> Any:
    """Return what torch does with tensors that are saved for a backward pass now, such as computing them again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def recorded_cuts(model: nn.Module, forward: Callable[[nn.Module], Any], *, is_training: bool = True) -> list[Cut]:
    """Return the cuts that one forward pass of a copy of the model shows, in which everything trains, in their order.

    Args:
        model: stays as it is, as do random generators.
        forward: runs the model that it gets on a batch; tensors that it returns may be read in any way.
        is_training: whether the copy is in training mode, or in evaluation mode.

    Raises:
        UserError: a copy of the model cannot be made or run so, runs more than once, or has no cut.
    """
    generators = kept_generators(p.device for p in model.parameters())
    with generators, torch.enable_grad(), uncompiled(), _disable_current_modes():  # whoever counts does not count this
        try:
            twin = training_copy(model).train(is_training)
            with _Recorder(twin) as recorder:
                recorder.returned(forward(twin))
        except UserError:
            raise
        except Exception as error:  # the user's model may raise anything
            text = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"forward cache: a copy of {type(model).__name__} in which everything trains could not be run: "
                f"{type(error).__name__}: {text}"
            ) from error
    return _cuts_in(recorder, model)


def _cuts_in(recorder: _Recorder, model: nn.Module) -> list[Cut]:
    whole = [call for call in recorder.calls if call.name == ""]
    if len(whole) != 1:
        raise UserError(
            f"forward cache: forward must run the model once, got {len(whole)} calls of {type(model).__name__}"
        )
    of_inputs: dict[_Value, bool] = {}
    for value in recorder.values:  # sources come first
        of_inputs[value] = value in recorder.inputs or any(of_inputs[source] for source in value.sources)
    ends: dict[_Value, _Call] = {}  # of several calls that return one value, the last
    for call in sorted(recorder.calls, key=lambda call: call.end):
        output = call.output
        if output is not None and of_inputs[output] and whole[0] in call.around and call.rows == recorder.rows:
            ends.pop(output, None)
            ends[output] = call
    found = []
    for call in ends.values():
        if not _is_cut(recorder, call):
            continue
        before = [one for one in recorder.calls if one.end <= call.end and all(a.end > call.end for a in one.around)]
        later = {one.module for one in recorder.calls if one.end >= call.end and one not in call.around}
        drops = {
            one.name for one in recorder.calls if one.end <= call.end and _drops(one.module) and one.module in later
        }
        read = {r.value.parameter for r in recorder.reads if r.time < call.end} - {None}
        found.append(
            Cut(
                modules=tuple(model.get_submodule(one.name) for one in before),
                names=tuple(one.name for one in before),
                parameters=tuple(parameter for number, parameter in enumerate(model.parameters()) if number in read),
                shared=tuple(map(model.get_submodule, sorted(drops))),
            )
        )
    if not found:
        raise UserError(
            f"forward cache: no output of a module of {type(model).__name__} can be kept, for later parts of the model "
            "use what was computed before it, too"
        )
    return found


def _is_cut(recorder: _Recorder, cut: _Call) -> bool:
    """Return whether what runs after this call reads nothing that was computed before its end but its output."""
    time = cut.end
    if cut.output is None or cut.is_computed_again:
        return False

    def is_skipped(around: Iterable[_Call]) -> bool:
        return any(call.end <= time for call in around)

    real: dict[_Value, bool] = {}
    for value in recorder.values:  # sources come first
        real[value] = (
            value is cut.output
            or (value.born < 0 and not value.is_opaque)
            or (value.born > time and not value.is_opaque)
            or (not value.is_opaque and not is_skipped(value.around) and all(real[source] for source in value.sources))
        )
    return all(
        real[read.value]
        for read in recorder.reads
        if read.time > time or (read.takes_numbers and not is_skipped(read.around))
    )
