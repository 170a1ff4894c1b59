"""Execution order of a model's layers, and the parameters upstream of each, as recorded in one forward pass.

A model may register its layers in another order than it runs them, and the saving of a stop depends on which parameters
still train before it. Both are recorded in the first training forward pass, without an additional pass.

Sets of parameters are bit masks: bit n stands for parameter n.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from trainables.gradskip.advice import users_level
from trainables.gradskip.layers import own_children, own_parameters
from trainables.runtime.isolation import kept_generators
from trainables.runtime.model_copy import copy_of
from trainables.runtime.operator_flops import uncompiled
from trainables.workloads.batch_structure import tensors_in

if TYPE_CHECKING:
    from typing import Self


# --- Hooks that must not act on copies of their module, nor be saved with it ------------------------------------------

#: Dictionaries of a module by a hook's id: hooks before its forward and after it, and their options.
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _Hooks(OrderedDict[int, Any]):
    """One of these; hidden hooks are called, but no part of copies, pickles and what TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()

    def values(self) -> Any:
        return dict(self._open()).values()

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self._open())

    def _open(self) -> list[tuple[int, Any]]:
        return [(key, call) for key, call in self.items() if key not in self.hidden]


def hook(module: nn.Module, call: Callable[..., Any], *, after: bool = False, **options: bool) -> RemovableHandle:
    """Register a hook before (or after) a module's forward that stays hidden in copies, pickles and TorchScript.

    Beside a user's own hooks it is not hidden: their handles refer to the module's dictionary. Options are torch's.
    """
    names, own = _AFTER if after else _BEFORE, vars(module)  # a compiled module sets attributes of what it wraps
    if all(name in own and not own[name] for name in names):
        own.update({name: _Hooks() for name in names})
    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(call, **options)
    for name in names:
        if isinstance(there := own.get(name), _Hooks):
            there.hidden.add(handle.id)
    return handle


class InertInCopies:
    """Base class whose copies and pickles are built without arguments; subclasses built so do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class OwnedHooks(InertInCopies):
    """Hooks that call a method of an object which they do not keep alive; removed once it was collected."""

    def __init__(self, tell: Callable[..., None] | None = None) -> None:
        self._tell = None if tell is None else weakref.WeakMethod(tell)
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listener(self) -> Callable[..., None] | None:
        """Return the method to call; None, with all hooks removed, where there is none."""
        listener = None if self._tell is None else self._tell()
        if listener is None:
            self.remove()
        return listener


# --- Result of one recorded forward pass -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Execution order and upstream parameters, by parameter number, as recorded in one forward pass."""

    ranks: tuple[int, ...]
    """Rank of the first call of the module that owns the parameter, from 0; ascending in execution order."""
    upstream: tuple[int, ...]
    """Mask of the parameters that the owner's input depends on, in the first of several uses: their gradients pass
    through the owner."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Mask of a module's input by its name, over all its calls; modules in the order in which they were called."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """Mask of the parameters whose owner's input depends on all calls of a module, by its name, of modules without any
    parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the trace in plain types; masks in hexadecimal, as torch.load refuses integers of so many digits."""
        return {
            "ranks": list(self.ranks),
            "upstream": [f"{mask:x}" for mask in self.upstream],
            "before": {name: f"{mask:x}" for name, mask in self.before.items()},
            "behind": {name: f"{mask:x}" for name, mask in self.behind.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ModelTrace:
        return cls(
            ranks=tuple(state["ranks"]),
            upstream=tuple(int(mask, 16) for mask in state["upstream"]),
            before={name: int(mask, 16) for name, mask in state["before"].items()},
            behind={name: int(mask, 16) for name, mask in state.get("behind", {}).items()},  # older ones lack it
        )

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.ranks)), key=lambda number: (self.ranks[number], number)))

    def left_upstream(self, stopped: Collection[int]) -> set[int]:
        """Return the numbers of parameters outside ``stopped`` whose gradients pass through a stopped layer."""
        mask = 0
        for number in stopped:
            mask |= self.upstream[number]
        mask &= ~mask_of(stopped)
        return {number for number, digit in enumerate(f"{mask:b}"[::-1]) if digit == "1"}


def mask_of(numbers: Iterable[int]) -> int:
    """Return the mask with these numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


# --- Recording --------------------------------------------------------------------------------------------------------


def trace_model(model: nn.Module, parameters: Sequence[Tensor], forward: Callable[[nn.Module], Any]) -> ModelTrace:
    """Run ``forward`` once on a copy of the model in which everything trains; model and generators stay unchanged.

    Parameters are in numbering order. Passes on any error of the copy or of the forward pass.
    """
    with kept_generators(p.device for p in parameters), torch.enable_grad(), _disable_current_modes():
        twin = training_copy(model)
        twin_of = dict(zip(map(id, model.parameters()), twin.parameters(), strict=True))
        recorder = ExecutionRecorder(twin, [twin_of.get(id(p), p) for p in parameters])
        try:
            with uncompiled():
                forward(twin)
        finally:
            recorder.remove()
    return recorder.trace()


def training_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model in which everything trains, without gradients."""
    twin = copy_of(model)
    for parameter in twin.parameters():
        parameter.grad = None
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return twin


class ExecutionRecorder(OwnedHooks):
    """Recorder of a forward pass while it runs, by hooks on every module; the hooks are inert on copies of the model.

    A pass begins where a module is called with gradients enabled, outside of a backward pass, or where the model is
    called in one and nothing was seen before. The record is complete when the model itself has returned; of a model
    that is called in parts, when `trace` is called.

    A parameter that does not train is not in autograd's graph. If gradients pass through its module, it is marked on
    the graph node behind that module; if it precedes everything that trains, it counts as upstream of every module that
    is called with inputs without a graph. What runs without gradients counts as before whatever is called after it;
    from the first reentrant checkpoint on, whose parts autograd does not record, everything does, as in a chain.

    Args:
        model: its modules are hooked.
        parameters: in numbering order.
        complete: method called once, when the model itself has returned; its object is weakly referenced.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        parameters: Sequence[Tensor] = (),
        complete: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(complete)
        self._number_of = {id(p): number for number, p in enumerate(parameters)}
        self._parameters = parameters
        self._modules = [] if model is None else list(_called_modules(model, {}).values())
        self._masks = _GraphMasks(self._number_of)
        self._all_numbers = (1 << len(parameters)) - 1
        self._bare = {n for n, module in enumerate(self._modules) if next(module.parameters(), None) is None}
        self._bare_calls: list[int] = []  # indices of modules; each call has a digit behind those of the parameters
        #: For each running module: index, mask of its input, and mask of the frozen parameters around its parts.
        self._running: list[tuple[int, int, int]] = []
        self._calls: dict[int, _Calls] = {}  # by index of the module
        self._without_graph = 0  # mask of frozen parameters whose modules returned tensors without a graph
        self._unrecorded = 0  # mask of those whose modules ran without gradients, as in reentrant checkpoints
        self._ran = 0  # mask of those whose modules have returned
        self._is_chain = False  # whether what has run counts as upstream of what follows
        for index, module in enumerate(self._modules):
            self._handles.append(hook(module, partial(self._enter, index), with_kwargs=True))
            self._handles.append(hook(module, partial(self._leave, index), after=True, always_call=True))

    @property
    def has_seen(self) -> bool:
        return bool(self._calls)

    def remove(self) -> None:
        super().remove()
        self._masks.forget()

    def trace(self) -> ModelTrace:
        """Return the recorded trace.

        A layer whose parent uses its weights without calling it (attention's output projection) gets its parent's
        place; a parameter that no called module owns comes last.
        """
        calls = {id(self._modules[index]): place for index, place in self._calls.items()}
        ranks = [len(calls)] * len(self._parameters)
        upstream = [0] * len(self._parameters)
        for module, place in _with_callers(self._modules[0], calls):
            for number in self._numbers(module):
                if place.rank < ranks[number]:
                    ranks[number] = place.rank
                    upstream[number] = place.first & self._all_numbers & ~(1 << number)
        names = [(calls[id(m)], name) for name, m in self._modules[0].named_modules() if id(m) in calls]
        before = {name: place.all & self._all_numbers for place, name in sorted(names, key=lambda one: one[0].rank)}
        owners = [(place.all, mask_of(self._numbers(m))) for m, place in _with_callers(self._modules[0], calls)]
        behind: dict[int, int] = {}
        for digit, index in enumerate(self._bare_calls, start=len(self._parameters)):
            readers = reduce(or_, (numbers for mask, numbers in owners if mask >> digit & 1), 0)
            behind[id(self._modules[index])] = behind.get(id(self._modules[index]), -1) & readers
        named = self._modules[0].named_modules()
        behind_names = {name: behind[id(module)] for name, module in named if id(module) in behind}
        return ModelTrace(ranks=tuple(ranks), upstream=tuple(upstream), before=before, behind=behind_names)

    def _numbers(self, module: nn.Module) -> Iterator[int]:
        for parameter in own_parameters(module):
            if id(parameter) in self._number_of:
                yield self._number_of[id(parameter)]

    def _frozen(self, module: nn.Module) -> int:
        return mask_of(n for n in self._numbers(module) if not self._parameters[n].requires_grad)

    def _enter(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        # Replicas of a module are other modules. Where a hook before this one has removed it, torch gives no kwargs.
        if is_traced() or not self._handles or module is not self._modules[index]:
            return
        is_again = in_backward() and (index != 0 or self.has_seen)  # activations are computed again
        if not self._running and (not torch.is_grad_enabled() or is_again):
            return
        if not self._running and index == 0:  # modules called separately before are not part of this pass
            self._calls.clear()
            self._bare_calls.clear()
            self._without_graph = self._unrecorded = self._ran = 0
            self._is_chain = False
            self._masks.forget()
        try:
            if not self._running and index == 0:
                self._masks.mark((args, kwargs), 0)  # nothing lies before the model's own inputs
            mask = self._masks.of((args, kwargs), without_graph=self._without_graph)
        except Exception as error:  # noqa: BLE001 - a graph of another kind must not end a training
            warn_unseen(error)
            self._calls.clear()
            self.remove()
            return
        # A frozen parameter of a container itself may be used before any of its children; autograd does not record it.
        mask |= self._running[-1][2] if self._running else 0
        self._is_chain |= not torch.is_grad_enabled() and in_autograd_function()
        mask |= self._ran if self._is_chain else 0
        above = (self._running[-1][2] if self._running else 0) | self._frozen(module)
        self._running.append((index, mask, above))
        known = self._calls.setdefault(index, _Calls(rank=len(self._calls), first=mask, all=0))
        known.all |= mask | self._unrecorded  # which of them its input depends on, nobody knows

    def _leave(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_traced() or not self._running or self._running[-1][0] != index:
            return
        _, mask, _ = self._running.pop()
        if not torch.is_grad_enabled():
            self._unrecorded |= mask_of(self._numbers(module))
        self._ran |= mask_of(self._numbers(module))
        hidden = mask & (self._without_graph | ~self._all_numbers) | self._frozen(module)
        own = 0
        if index in self._bare:
            own = 1 << (len(self._parameters) + len(self._bare_calls))
            self._bare_calls.append(index)
        if not self._masks.mark(output, hidden | own):
            self._without_graph |= hidden & self._all_numbers
        if self._running:
            return
        if index != 0:  # a model that is called in parts: the next call may use this output
            self._masks.forget_behind(output)
            return
        self._masks.forget()
        if sys.exc_info()[0] is not None:  # the pass raised: the next one is recorded instead
            self._calls.clear()
        elif self._tell is not None and (complete := self._listener()) is not None:
            complete()


def warn_unseen(error: Exception) -> None:
    """Warn that layers stop in the order of registration, and why."""
    warnings.warn(f"the execution order of the layers could not be seen: {error}", stacklevel=users_level())


def is_traced() -> bool:
    """Return whether torch.compile, `torch.jit.trace` or an export records what runs, so that hooks must not act."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def in_backward() -> bool:
    """Return whether autograd's backward pass is running this code."""
    return bool(torch._C._current_graph_task_id() != -1)


#: The code of `torch.autograd.Function.apply`, which runs a forward pass with gradients switched off.
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def in_autograd_function() -> bool:
    """Return whether an autograd function runs forward: compiled code, a reentrant checkpoint, or the user's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


@dataclass(kw_only=True)
class _Calls:
    """Rank of a module's first call, and masks of its inputs: of the first call, and of all calls."""

    rank: int
    first: int
    all: int


def _with_callers(
    module: nn.Module, calls: dict[int, _Calls], above: _Calls | None = None
) -> Iterator[tuple[nn.Module, _Calls]]:
    place = calls.get(id(module), above or _Calls(rank=0, first=0, all=0))
    yield module, place
    for child in own_children(module):
        yield from _with_callers(child, calls, place)


def _called_modules(module: nn.Module, known: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """Add the module and those below it to the known ones, by id, and return them; parents come first."""
    if id(module) not in known:
        known[id(module)] = module
        for child in own_children(module):
            _called_modules(child, known)
    return known


#: Outputs of a model's parts whose graphs are kept until an optimizer steps.
_MOST_ENDS = 64


class _GraphMasks:
    """Masks of the parameters that a tensor's autograd graph reaches, cached by node until `forget`."""

    def __init__(self, number_of: dict[int, int]) -> None:
        self._number_of = number_of
        self._masks: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}  # those of nodes that `forget_behind` keeps
        self._plain: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of tensors without a graph, by id

    def forget(self) -> None:
        self._plain.clear()
        self._masks.clear()
        self._ends.clear()

    def forget_behind(self, value: Any) -> None:
        """Release the graph but the nodes that made these tensors, and those of the latest such calls."""
        for tensor in tensors_in(value):
            if tensor.grad_fn is not None:
                self._ends[tensor.grad_fn] = self._of_node(tensor.grad_fn)
        self._ends = dict([*self._ends.items()][-_MOST_ENDS:])
        self._masks = dict(self._ends)

    def of(self, value: Any, *, without_graph: int = 0) -> int:
        """Return the mask of the tensors in a nest; ``without_graph`` for one without gradient and mark."""
        mask = 0
        for tensor in tensors_in(value):
            if tensor.grad_fn is not None:
                mask |= self._of_node(tensor.grad_fn)
            elif tensor.requires_grad:
                mask |= self._of_leaf(tensor)
            else:
                mask |= self._of_plain(tensor, without_graph)
        return mask

    def mark(self, value: Any, mask: int) -> bool:
        """Add a mask to these tensors, or to the nodes that made them; return whether there is a node."""
        nodes = []
        for tensor in tensors_in(value):
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
            elif not tensor.requires_grad:
                self._plain[id(tensor)] = (weakref.ref(tensor), mask | self._of_plain(tensor, 0))
        for node in nodes if mask else ():
            self._masks[node] = self._of_node(node) | mask
        return bool(nodes)

    def _of_plain(self, tensor: Tensor, unknown: int) -> int:
        marked, mask = self._plain.get(id(tensor), (None, unknown))
        return mask if marked is None or marked() is tensor else unknown

    def _of_leaf(self, leaf: Any) -> int:
        number = self._number_of.get(id(leaf))
        return 0 if number is None else 1 << number

    def _of_node(self, root: Any) -> int:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self._masks:
                stack.pop()
                continue
            before = [n for n, _ in node.next_functions if n is not None]
            pending = [n for n in before if n not in self._masks]
            if pending:
                stack.extend(pending)
                continue
            mask = self._of_leaf(getattr(node, "variable", None))
            for earlier in before:
                mask |= self._masks[earlier]
            self._masks[node] = mask
            stack.pop()
        return self._masks[root]


class ForwardHook(OwnedHooks):
    """Forward pre-hook that passes on a training step's inputs to a method; inert on copies of the model.

    ``on_other`` is called before calls without gradients, and where `torch.jit.trace` or an export records the module.
    """

    def __init__(self, tell: Callable[..., None] | None = None, on_other: Callable[[], None] | None = None) -> None:
        super().__init__(tell)
        self._on_other = on_other

    def watch(self, *modules: nn.Module) -> None:
        self._handles += [hook(module, self, with_kwargs=True) for module in modules]

    def watch_once(self, module: nn.Module) -> None:
        """Watch a module unless one is watched."""
        if not self._handles:
            self.watch(module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced() or not torch.is_grad_enabled():
            if self._on_other is not None and not torch.compiler.is_compiling():
                self._on_other()
            return
        seen = self._listener()
        if seen is not None:
            seen(args, kwargs)
