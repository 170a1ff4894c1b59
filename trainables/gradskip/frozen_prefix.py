"""Fixed running statistics of norms, and detached outputs, in a stopped prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.gradskip.inert_copies import InertInCopies
from trainables.gradskip.model_trace import ModelTrace, mask_of
from trainables.gradskip.settings import Settings


class PrefixHook(InertInCopies):
    """Hook on a module; inert on copies of the model, which are not trained or have another optimizer.

    Args:
        act: called with the hook's arguments; None for no action.
        keeper: kept as long as the hook, to remove it when its optimizer is gone.
    """

    def __init__(self, act: Callable[..., Any] | None = None, keeper: FrozenPrefix | None = None) -> None:
        self._act, self._keeper = act, keeper

    def __call__(self, *args: Any) -> Any:
        return None if self._act is None else self._act(*args)


def detach_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Detach a module's output (forward hook), so that nothing before it is kept for a backward pass."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, nn.utils.rnn.PackedSequence):
        return output._replace(data=output.data.detach())
    if isinstance(output, dict):
        return type(output)({key: detach_output(_module, _args, part) for key, part in output.items()})
    if isinstance(output, (tuple, list)):
        parts = [detach_output(_module, _args, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


class HeldNorm:
    """Make a norm use its running statistics (forward pre-hook), whatever ``model.train()`` has set since.

    Statistics that are collected anew are not held: while the momentum is another than before
    (`torch.optim.swa_utils.update_bn` sets None), and from a reset until the next evaluation.

    Args:
        norm: to hold.
        parent: module whose mode the norm has while it collects.
    """

    def __init__(self, norm: Any, parent: nn.Module) -> None:
        self._parent = parent
        self._momentum = getattr(norm, "momentum", None)
        self._version = norm.running_mean._version
        self._was_reset = False

    def __call__(self, norm: Any, _args: Any) -> None:
        collects = getattr(norm, "momentum", None) != self._momentum
        # A compiled norm is not looked at so closely, for that would compile it anew in each step.
        if not torch.compiler.is_compiling():
            collects = collects or self._collects_after_reset(norm)
        norm.training = collects and self._parent.training

    def _collects_after_reset(self, norm: Any) -> bool:
        version = norm.running_mean._version
        if version != self._version:
            self._version = version
            count = getattr(norm, "num_batches_tracked", None)
            self._was_reset = self._was_reset or (count is not None and int(count) == 0)
        self._was_reset = self._was_reset and self._parent.training
        return self._was_reset


class FrozenPrefix:
    """The modules of a stopped prefix, treated as the settings ask.

    - ``norm_statistics="hold"``: a norm with nothing that trains in or before it keeps its running statistics, and
      normalises by them in training too. (If training used the batch's own statistics while these are fixed, evaluation
      would permanently use statistics from before the stop.)
    - ``prefix_autograd=False``: outputs of modules with nothing that trains in or before them are detached, so that no
      activation before them is kept. For a module that is called twice, or shares its weight with one that is,
      everything that runs before any of its calls counts as before it.
    """

    def __init__(self, model: nn.Module | None, parameters: Sequence[Tensor], settings: Settings) -> None:
        self._model, self._parameters = model, parameters
        self._hold = settings.norm_statistics == "hold"
        self._detach = not settings.prefix_autograd
        self._held: dict[nn.Module, tuple[RemovableHandle, bool | None]] = {}
        self._cut: dict[nn.Module, RemovableHandle] = {}
        self._look()

    def _look(self) -> None:
        """Find the modules of the model and their parameters."""
        model = self._model
        number_of = {id(p): number for number, p in enumerate(self._parameters)}
        #: Modules to treat, with the mask of the parameters that they have.
        self._members: list[tuple[str, nn.Module, int]] = []
        self._parents: dict[str, nn.Module] = {}
        #: Mask of parameters that several modules have: without a trace it is unknown which of these runs first.
        self._shared = 0
        if model is not None and (self._hold or self._detach):
            modules = dict(model.named_modules())
            for name, module in modules.items():
                self._parents[name] = modules[name.rpartition(".")[0]]
                # All parameters below it: a module that owns one and has children is stopped when these are, too.
                own = list(module.parameters())
                if (own or _is_norm(module)) and all(id(p) in number_of for p in own):
                    self._members.append((name, module, mask_of(number_of[id(p)] for p in own)))
            named = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
            self._shared = mask_of(number for key, number in number_of.items() if named[key] > 1)

    def treat(self, stopped: Collection[int], frozen: Collection[int], trace: ModelTrace | None, *, cut: bool) -> None:
        """Treat the modules of this prefix, and undo the treatment of all others.

        Args:
            stopped: numbers of the stopped parameters.
            frozen: numbers of those that the user does not train; a gradient may have to pass through them.
            trace: gives the parameters before a module; None: its own parameters decide.
            cut: whether outputs may be detached; False while a gradient must still reach the last parameter.
        """
        stops = mask_of(stopped)
        moving = ~(stops | mask_of(frozen))
        for name, module, own in self._members:
            before = 0 if trace is None else trace.before.get(name, 0)
            still = not (own | before) & moving
            if self._hold and _is_norm(module):
                self._hold_still(module, self._parents[name], still and bool((own | before) & stops))
            if self._detach:
                known = trace is not None or not own & self._shared
                self._detach_output(module, cut and known and still and own != 0 and not own & ~stops)

    def _hold_still(self, module: nn.Module, parent: nn.Module, wanted: bool) -> None:
        if wanted and module not in self._held:
            own_mode = module.training != parent.training  # the user keeps this norm in another mode than its parent
            hook = PrefixHook(HeldNorm(module, parent), self)
            self._held[module] = (module.register_forward_pre_hook(hook), module.training if own_mode else None)
        elif not wanted and module in self._held:
            handle, mode = self._held.pop(module)
            handle.remove()
            module.training = parent.training if mode is None else mode

    def _detach_output(self, module: nn.Module, wanted: bool) -> None:
        if wanted and module not in self._cut:
            self._cut[module] = module.register_forward_hook(PrefixHook(detach_output, self))
        elif not wanted and module in self._cut:
            self._cut.pop(module).remove()

    def release(self) -> None:
        """Undo everything, before another state is loaded or another optimizer has the parameters."""
        self.treat((), (), None, cut=False)

    def follow(self) -> None:
        """Undo everything, and look again at a model in which modules or parameters were replaced."""
        self.release()
        self._look()


def _is_norm(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None
