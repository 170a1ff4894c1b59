"""What stops beside the weights: running statistics of norms, and the record of a stopped prefix for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.gradskip.execution_order import ModelTrace, numbers_of
from trainables.gradskip.settings import Settings


def detach_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Forward hook: nothing behind this module's output is kept for a backward pass."""
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


def normalise_as_in_evaluation(module: nn.Module, _args: Any) -> None:
    """Forward pre-hook: whatever ``model.train()`` has said since, this norm uses its running statistics."""
    module.training = False


class PrefixModules:
    """The modules of a stopped prefix, treated as the settings say.

    - ``norm_statistics="hold"``: running statistics of a norm before and in which nothing trains hold still, and it
      normalises by them in training too. (Holding them while training goes on with the batch's own statistics would
      leave evaluation with statistics from before the stop for ever.)
    - ``prefix_autograd=False``: outputs are detached, so that no activation before them is kept.
    """

    def __init__(self, model: nn.Module | None, parameters: Sequence[Tensor], settings: Settings) -> None:
        number_of = {id(p): number for number, p in enumerate(parameters)}
        self._hold = settings.norm_statistics == "hold"
        self._detach = not settings.prefix_autograd
        #: Modules to treat, with the numbers of the parameters that they own themselves.
        self._members: list[tuple[str, nn.Module, frozenset[int]]] = []
        if model is not None and (self._hold or self._detach):
            for name, module in model.named_modules():
                # All parameters below it: a module that owns one and has children is stopped when these are, too.
                own = list(module.parameters())
                if (own or _is_norm(module)) and all(id(p) in number_of for p in own):
                    self._members.append((name, module, frozenset(number_of[id(p)] for p in own)))
        self._held: dict[nn.Module, tuple[RemovableHandle, bool]] = {}
        self._cut: dict[nn.Module, RemovableHandle] = {}

    def stop(self, stopped: set[int], frozen: set[int], trace: ModelTrace | None, *, cut: bool = True) -> None:
        """Treat the modules of the prefix.

        Args:
            stopped: numbers of the stopped parameters.
            frozen: of those that the user does not train; a gradient may have to pass through them.
            trace: what lies before a module; None: its own parameters decide.
            cut: whether outputs may be detached; not where a gradient must reach the last parameter still.
        """
        still = stopped | frozen
        for name, module, own in self._members:
            before = set() if trace is None else numbers_of(trace.before.get(name, 0))
            quiet = own | before <= still and bool((own | before) & stopped)
            if self._hold and quiet and _is_norm(module) and module not in self._held:
                hook = module.register_forward_pre_hook(normalise_as_in_evaluation)
                self._held[module] = (hook, module.training)
            if self._detach and cut and own and own <= stopped and module not in self._cut:
                self._cut[module] = module.register_forward_hook(detach_output)
        if not cut:
            self._uncut()

    def _uncut(self) -> None:
        for handle in self._cut.values():
            handle.remove()
        self._cut.clear()

    def release(self) -> None:
        """Undo everything, before another state is taken."""
        for module, (handle, training) in self._held.items():
            handle.remove()
            module.training = training
        self._held.clear()
        self._uncut()


def _is_norm(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None
