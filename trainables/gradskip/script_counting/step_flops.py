"""Count the FLOPs of a user's training from inside its process, forward and backward separately.

FLOPs follow the formulas of `runtime.operator_flops` and count as backward while autograd's backward pass runs.
Operations without gradients outside of it, such as an evaluation between two steps, are not counted. What a backward
pass ends before, since weights have been stopped, is counted in the forward pass: the gradient of each factor of a
product costs as much as the product, and so does the product itself where activation checkpointing computes it again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from trainables.gradskip.execution_order import in_autograd_function, in_backward
from trainables.gradskip.stops import LET_GO_OF, checkpointed_region
from trainables.runtime.operator_flops import formula_of

#: Parts of the names of expensive operations without a formula: recurrences on Apple's GPUs, attention, products.
_COSTLY = ("lstm_mps", "dot_product", "flash_att", "efficient_attention", "_mm.", "deform_conv")
#: The operation by which autocast converts a weight.
_CAST = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default
#: FLOPs of attention's backward pass by those of its forward pass: five products for two.
_ATTENTION_BACKWARD = 2.5
#: Operations whose backward pass needs neither inputs nor results, so that nothing is computed again for them.
_SAVE_NOTHING = (
    "_to_copy", "_unsafe_view", "add", "add_", "alias", "cat", "clone", "copy_", "detach", "expand", "mean", "neg",
    "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "sub", "sum", "t", "transpose",
    "unbind", "unsqueeze", "view",
)  # fmt: skip
#: Tensors that have a storage of their own.
_PLAIN = (Tensor, nn.Parameter)


@dataclass
class _Region:
    """Operations that activation checkpointing computes again together, up to the last that saves anything."""

    is_now: Callable[[], Any] = lambda: None  # whatever `checkpointed_region` returns inside of it, while that exists
    waiting: float = 0.0  # FLOPs that are computed again if anything behind them saves something
    again: float = 0.0  # FLOPs that would be computed again if nothing were stopped
    is_anyway: bool = False  # whether it is computed again as it is


class StepFlops(TorchDispatchMode):
    """Dispatch mode that sums the forward and backward FLOPs of the operations executed while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_flops = 0  # FLOPs of operations that autograd records
        self.backward_flops = 0  # FLOPs of operations inside a backward pass, recomputed activations included
        self.uncounted: set[str] = set()  # names of expensive operations whose FLOPs are unknown
        #: Numbers of the attributed weights, by the address of their storage, or of their first number where several
        #: share one, as cuDNN's recurrent layers do.
        self._weight_at: dict[int, int] = {}
        self._of_weights = Counter[int]()  # forward FLOPs by number, in steps that were taken
        self._of_step = Counter[int]()
        self._copies: dict[int, tuple[int, TensorWeakRef]] = {}  # autocast's of weights; another may take their place
        self.left_flops = 0.0  # FLOPs that the step's backward pass would have beside its own if nothing were stopped
        #: Storages of what would need a gradient then: stopped weights, and what is computed from them alone. A weak
        #: reference keeps the address from being another's.
        self._would_need: dict[int, StorageWeakRef] = {}
        self._doubtful: set[int] = set()  # of these, whatever shares memory with a detached tensor
        self._region = _Region()
        self.trains_in_backward = False  # whether the step's forward passes with gradients run in a backward pass

    def begin_step(self, stopped: Sequence[Tensor]) -> None:
        """Count what the backward pass of the next step leaves out because of these weights."""
        self.left_flops, self._would_need, self._doubtful, self._region = 0.0, {}, set(), _Region()
        self.trains_in_backward = False
        self._of_step.clear()
        for weight in stopped:
            self._note(weight)

    def end_step(self) -> None:
        """Count what was computed since the step's begin as a step's."""
        self._of_weights += self._of_step

    def attribute(self, weights: Sequence[Tensor]) -> None:
        """Count the forward FLOPs of the operations that use these weights, by weight; none ends it."""
        places = [weight.untyped_storage().data_ptr() for weight in weights]
        several = {place for place, count in Counter(places).items() if count > 1}
        self._weight_at = {
            weight.data_ptr() if place in several else place: number
            for number, (place, weight) in enumerate(zip(places, weights, strict=True))
        }
        self._of_weights.clear()
        self._of_step.clear()
        self._copies.clear()

    def attribute_moved(self, weights: Sequence[Tensor]) -> None:
        """Begin anew if these weights lie elsewhere than before, as after a conversion of the model."""
        if any(_has_storage(weight) and self._number_of(weight) is None for weight in weights):
            self.attribute(weights)

    def forget_copies(self) -> None:
        self._copies.clear()

    def shares(self, count: int) -> list[int]:
        """Return the forward FLOPs of the first ``count`` attributed weights in the steps so far, by number."""
        return [self._of_weights[number] for number in range(count)]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile still compiles; the operations that compiled code calls are counted."""
        return True

    @property
    def at_work(self) -> bool:
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def begin(self) -> None:
        """Start counting, below the modes that the user has entered, because leaving a mode pops the topmost one."""
        with _without_user_modes():
            _push_mode(self)

    def end(self) -> None:
        """Stop counting, whatever modes the user has entered since."""
        if self.at_work:
            with _without_user_modes(above=self):
                _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (
            self._weight_at
            and func is _CAST
            and torch.is_grad_enabled()
            and (number := self._number_of(args[0])) is not None
        ):
            self._copies[out.untyped_storage().data_ptr()] = number, TensorWeakRef(out)
        left = self._follow(func, args, kwargs, out) if self._would_need and torch.is_grad_enabled() else 0.0
        count = formula_of(func._overloadpacket)
        costly = count is None and any(part in str(func) for part in _COSTLY)
        if count is None and not costly:
            return out
        backward = self._is_backward()
        if not backward and not torch.is_grad_enabled() and not in_autograd_function():
            return out  # an evaluation
        if count is None:
            self.uncounted.add(str(func).removeprefix("aten.").rpartition(".")[0])
            return out
        flops = int(count(*args, **kwargs, out_val=out))
        if backward:
            self.backward_flops += flops
        else:
            self.forward_flops += flops
            self.left_flops += left * flops
            if left and self._region.is_now() is not None and not self._region.is_anyway:
                self._region.waiting += flops
            if self._weight_at:
                self._add_to_weight(args, flops)
        return out

    def _is_backward(self) -> bool:
        return in_backward() and not (self.trains_in_backward and torch.is_grad_enabled())

    def _note(self, value: Tensor, *, is_doubtful: bool = False) -> None:
        if _has_storage(value):
            storage = value.untyped_storage()
            self._would_need[storage._cdata] = StorageWeakRef(storage)
            if is_doubtful:
                self._doubtful.add(storage._cdata)

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
        """Note what is computed from stopped weights, and return what gradients an operation lacks for them.

        As multiples of the operation's own cost.
        """
        if self._is_backward():
            return 0.0
        values = [value for value in tree_leaves((args, kwargs)) if _has_storage(value)]
        known = self._would_need
        would = [v for v in values if not v.requires_grad and (v.untyped_storage()._cdata in known or v in LET_GO_OF)]
        needs = any(value.requires_grad for value in values)
        if would or needs:
            self._follow_region(needs, is_saving=func._overloadpacket.__name__ not in _SAVE_NOTHING)
        if not would:
            return 0.0
        # What is detached shares its storage and would need none.
        is_doubtful = func is _DETACH or any(value.untyped_storage()._cdata in self._doubtful for value in would)
        if is_doubtful and formula_of(func._overloadpacket) is not None:  # nothing is known
            self.left_flops, self._would_need = 0.0, {}
            return 0.0
        if not needs:
            for value in tree_leaves(out):
                if _has_storage(value) and value.is_floating_point():
                    self._note(value, is_doubtful=is_doubtful)
        if "dot_product" in str(func):
            return 0.0 if needs else _ATTENTION_BACKWARD
        if "mkldnn_rnn" in str(func):  # it computes the gradients of inputs and weights whatever needs one
            return 2.0 * (not needs)
        if "_rnn" in str(func):  # cuDNN those of inputs, and of the weights all or none
            would_weights = any(value is weight for value in would for weight in args[1])
            return float(not needs) + (would_weights and not any(weight.requires_grad for weight in args[1]))
        return float(sum(value.dim() > 1 for value in would))

    def _follow_region(self, needs: bool, *, is_saving: bool) -> None:
        """Note what would be computed again because of an operation in a forward pass."""
        now = checkpointed_region()
        if now is None or now is not self._region.is_now():  # what was the last region may not exist any more
            self._region = _Region() if now is None else _Region(is_now=weakref.ref(now))
        region = self._region
        if needs:
            self.left_flops -= region.again
            region.waiting, region.again, region.is_anyway = 0.0, 0.0, True
        elif is_saving:
            self.left_flops += region.waiting
            region.waiting, region.again = 0.0, region.again + region.waiting

    def _number_of(self, value: Any) -> int | None:
        if not _has_storage(value):
            return None
        place = value.untyped_storage().data_ptr()
        number, copy = self._copies.get(place, (-1, None))
        if copy is not None and copy() is not None:
            return number
        return self._weight_at.get(value.data_ptr(), self._weight_at.get(place))

    def _add_to_weight(self, args: Sequence[Any], flops: int) -> None:
        weights = Counter[int]()  # a recurrent layer has several
        for value in tree_leaves(args):
            if (number := self._number_of(value)) is not None and value.dim() > 1:  # no biases
                weights[number] += value.numel()
        for number, elements in weights.items():
            self._of_step[number] += flops * elements // (weights.total() or 1)


def _has_storage(value: Any) -> bool:
    return type(value) in _PLAIN and value.layout is torch.strided


@contextmanager
def _without_user_modes(above: TorchDispatchMode | None = None) -> Iterator[None]:
    """Remove modes from torch's stack inside the block: all that users enter, or those above ``above``."""
    stack = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    keep = 0 if above is None else 1 + next(place for place, mode in enumerate(stack) if mode is above)
    taken = [_pop_mode() for _ in stack[keep:]]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)
