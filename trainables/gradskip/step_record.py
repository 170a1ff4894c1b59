"""What the steps of a user's own training loop cost, counted from inside its optimizer.

In a script nobody but the optimizer sees the training, so a step is what happens from the end of one `step()` to the
end of the next. FLOPs are by the formulas of `trainables.flops`, told apart by whether autograd's
backward pass is at work; what runs without gradients outside of it, such as an evaluation between two steps, is no
part of a step. A few steps are looked at after each change of the stopped layers, and their median stands for all until
the next: steps are taken to be alike. No other step is slowed down.
"""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from trainables.flops import formula_of
from trainables.gradskip.layers import watch_needed
from trainables.training.memory import peak_bytes

if TYPE_CHECKING:
    from trainables.gradskip.controller import GradientSkip

#: Steps that are looked at for each set of stopped layers: one of them may be an epoch's last, smaller one, or hold an
#: evaluation that forgot `torch.no_grad()`.
_LOOKS = 3
#: Parts of the names of operations that cost much and have no formula: fused recurrences and attention.
_COSTLY = ("rnn_layer", "cudnn_rnn", "miopen_rnn", "lstm_mps", "dot_product", "flash_attention", "efficient_attention")

#: The records of this process, by the controls that they count.
_RECORDS: weakref.WeakKeyDictionary[GradientSkip, StepRecord] = weakref.WeakKeyDictionary()


class StepFlops(TorchDispatchMode):
    """Sums FLOPs of what is executed inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_flops = 0
        """Of operations that autograd records."""
        self.backward_flops = 0
        """Of operations inside a backward pass, recomputed activations among them."""
        self.uncounted: set[str] = set()
        """Names of costly operations whose FLOPs nobody knows."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        backward = in_backward()
        if not backward and not torch.is_grad_enabled():
            return out  # an evaluation
        count = formula_of(func._overloadpacket)
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=out))
            if backward:
                self.backward_flops += flops
            else:
                self.forward_flops += flops
        elif any(part in str(func) for part in _COSTLY):
            self.uncounted.add(str(func).removeprefix("aten.").partition(".")[0])
        return out


class _Shared:
    """The process's one counter: at work while any record looks.

    Modes of torch lie on a stack, and two that took turns would take each other off it.
    """

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.looking = 0
        self._entered = False

    def begin(self) -> None:
        """One more record looks."""
        self.looking += 1
        if not self._entered:
            self.flops.__enter__()
            self._entered = True

    def end(self) -> None:
        """One less does. Under a mode that was entered since, the counter stays until a later end."""
        self.looking -= 1
        if self._entered and self.looking <= 0 and _get_current_dispatch_mode() is self.flops:
            self.flops.__exit__(None, None, None)
            self._entered = False


_SHARED = _Shared()


def in_backward() -> bool:
    """Whether autograd's engine runs this."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(kw_only=True)
class _Stretch:
    """Steps with one set of stopped layers."""

    steps: int = 0
    forward_flops: list[int] = field(default_factory=list)
    backward_flops: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


class StepRecord:
    """Counts the steps of an optimizer with Gradient-Skip, from now on.

    Args:
        gradskip: of the optimizer, which has not stepped yet.
    """

    def __init__(self, gradskip: GradientSkip) -> None:
        self._ref = weakref.ref(gradskip)
        self._stretches: list[_Stretch] = [_Stretch()]
        self._since: tuple[int, int] | None = None  # the counter's numbers at the beginning of a look
        self._handles = [
            gradskip.optimizer.register_step_pre_hook(self._before),
            gradskip.optimizer.register_step_post_hook(self._after),
        ]
        gradskip.on_stop.append(self._changed)
        # An optimizer that nobody holds any more looks no longer.
        self._given_up = weakref.finalize(gradskip, _stop_looking, self)
        self._given_up.atexit = False
        self._look()

    @property
    def _gradskip(self) -> GradientSkip:
        found = self._ref()
        assert found is not None  # its optimizer holds its hooks, which hold it
        return found

    def close(self) -> None:
        """Count no more."""
        _stop_looking(self)
        for handle in self._handles:
            handle.remove()
        if self._changed in self._gradskip.on_stop:
            self._gradskip.on_stop.remove(self._changed)

    def _look(self) -> None:
        if self._since is None and len(self._stretches[-1].forward_flops) < _LOOKS:
            _SHARED.begin()
            self._since = (_SHARED.flops.forward_flops, _SHARED.flops.backward_flops)

    def _leave(self) -> tuple[int, int]:
        """End a look; what was counted in it."""
        assert self._since is not None
        (forward, backward), self._since = self._since, None
        _SHARED.end()
        return _SHARED.flops.forward_flops - forward, _SHARED.flops.backward_flops - backward

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._since is not None and not any(callable(a) for a in (*args[1:], *kwargs.values())):
            self._take(*self._leave())  # what follows is the optimizer's own arithmetic

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._since is not None:  # a closure ran the training inside the step
            self._take(*self._leave())
        self._stretches[-1].steps += 1
        if self._changes:
            self._changes = False
            self._stretches.append(_Stretch())
        self._look()

    _changes = False

    def _changed(self) -> None:
        self._changes = True  # told within the step that decided, which had all gradients still

    def _take(self, forward_flops: int, backward_flops: int) -> None:
        stretch = self._stretches[-1]
        stretch.forward_flops.append(forward_flops)
        stretch.backward_flops.append(backward_flops)
        self._take_bytes(stretch)

    def _take_bytes(self, stretch: _Stretch) -> None:
        stretch.gradient_bytes = stretch.optimizer_bytes = 0  # the first step has made state that the next one visits
        state = self._gradskip.optimizer.state
        for parameter in self._gradskip.parameters:
            if parameter.grad is not None:
                size = parameter.nbytes
                kept = sum(t.nbytes for t in state.get(parameter, {}).values() if isinstance(t, Tensor))
                stretch.gradient_bytes += size
                stretch.optimizer_bytes += 2 * size + kept

    def summary(self) -> dict[str, Any]:
        """What was executed so far, in plain types; FLOPs and bytes over all steps."""
        gradskip = self._gradskip
        dense = self._stretches[0]
        forward_step = median_low(dense.forward_flops) if dense.forward_flops else 0
        backward_step = median_low(dense.backward_flops) if dense.backward_flops else 0
        steps = sum(stretch.steps for stretch in self._stretches)
        backward = sent = visited = 0
        seen, cost = dense, backward_step
        for stretch in self._stretches:
            if stretch.backward_flops:  # one too short to be looked at costs what the one before it did
                seen, cost = stretch, median_low(stretch.backward_flops)
            backward += stretch.steps * cost
            sent += stretch.steps * seen.gradient_bytes
            visited += stretch.steps * seen.optimizer_bytes
        return {
            "steps": steps,
            "iteration": gradskip.iteration,
            # Stops leave the forward pass as it is.
            "forward_flops": steps * forward_step,
            "backward_flops": backward,
            "dense_flops": steps * (forward_step + backward_step),
            "dense_backward_flops": steps * backward_step,
            "gradient_bytes": sent,
            "optimizer_bytes": visited,
            "stopped_through": gradskip.stopped_through,
            "events": [asdict(event) for event in gradskip.events],
            "uncounted": sorted(_SHARED.flops.uncounted),
            "parameters": len(gradskip.parameters),
            "layer_names": gradskip.names,
            "unit_ends": [unit.end for unit in gradskip.plan.units],
            "watch": list(watch_needed(gradskip.parameters, None)),
            "peak_memory_bytes": _peak_bytes(),
        }


def _stop_looking(record: StepRecord) -> None:
    if record._since is not None:
        record._since = None
        _SHARED.end()


def start(gradskip: GradientSkip) -> None:
    """Record an optimizer until its process ends, for `process_summary`."""
    _RECORDS[gradskip] = StepRecord(gradskip)


def process_summary() -> dict[str, Any] | None:
    """The summary of this process's optimizer; of several, that of the one with the most parameters. None for none."""
    found = [(len(gradskip.parameters), record) for gradskip, record in _RECORDS.items()]
    return max(found, key=lambda pair: pair[0])[1].summary() if found else None


def _peak_bytes() -> int:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return peak_bytes(torch.device("cuda" if on_gpu else "cpu"))
