"""What stops beside the weights: running statistics of norms, and the record of a stopped prefix for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.gradskip.settings import Settings


def detach_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Forward hook: nothing behind this module's output is kept for a backward pass."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, (tuple, list)):
        return type(output)(detach_output(_module, _args, part) for part in output)
    return output


def normalise_as_in_evaluation(module: nn.Module, _args: Any) -> None:
    """Forward pre-hook: whatever ``model.train()`` has said since, this norm uses its running statistics."""
    module.training = False


class PrefixModules:
    """The modules whose parameters have all stopped, treated as the settings say.

    - ``norm_statistics="hold"``: a stopped norm's running statistics hold still, and it normalises by them in training
      too. (Holding them while training goes on with the batch's own statistics would leave evaluation with statistics
      from before the stop for ever.)
    - ``prefix_autograd=False``: outputs are detached, so that no activation before them is kept.
    """

    def __init__(self, model: nn.Module | None, parameters: Sequence[Tensor], settings: Settings) -> None:
        number_of = {id(p): number for number, p in enumerate(parameters)}
        self._hold = settings.norm_statistics == "hold"
        self._detach = not settings.prefix_autograd
        self._members: list[tuple[nn.Module, frozenset[int]]] = []
        if model is not None and (self._hold or self._detach):
            for module in model.modules():
                own = [p for p in module._parameters.values() if p is not None]
                if own and all(id(p) in number_of for p in own):
                    self._members.append((module, frozenset(number_of[id(p)] for p in own)))
        self._held: dict[nn.Module, RemovableHandle] = {}
        self._cut: dict[nn.Module, RemovableHandle] = {}

    def stop(self, stopped: set[int]) -> None:
        """Treat the modules that these parameters make whole."""
        for module, members in self._members:
            if not members <= stopped:
                continue
            if self._hold and module not in self._held and getattr(module, "running_mean", None) is not None:
                self._held[module] = module.register_forward_pre_hook(normalise_as_in_evaluation)
            if self._detach and module not in self._cut:
                self._cut[module] = module.register_forward_hook(detach_output)

    def release(self, stopped: set[int]) -> None:
        """Undo it for modules that train again."""
        for module, members in self._members:
            if members <= stopped:
                continue
            if module in self._held:
                self._held.pop(module).remove()
                module.training = True
            if module in self._cut:
                self._cut.pop(module).remove()
