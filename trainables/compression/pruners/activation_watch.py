"""Statistics of convolutions' activations, collected while a model trains.

Shapes: a convolution's output (N, F, ...), F its filters; sums are kept per filter, shape (F,). Nothing here
synchronizes with the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from trainables.compression.schedule.names import plain_name
from trainables.errors import UserError

#: Modules whose output is an activation.
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardtanh, nn.Softplus, nn.Threshold,
)  # fmt: skip

#: Node names at which the search back through autograd's graph stops: earlier values belong to another layer.
_LAYERS = ("Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Linear")


@dataclass
class Sums:
    """Sums over one convolution's activations since the last reset."""

    inactive: Tensor
    """Number of activations <= 0, shape (F,), integers."""
    total: Tensor
    """Sum of the activations, shape (F,)."""
    seen: int
    """Number of activations per filter."""

    def __add__(self, new: Sums) -> Sums:
        # Loaded sums may be on another device than the model.
        inactive, total = self.inactive.to(new.inactive.device), self.total.to(new.total.device)
        return Sums(inactive + new.inactive, total + new.total, self.seen + new.seen)

    @property
    def inactive_share(self) -> Tensor:
        """Return APoZ, the average share of zeros (Hu et al. 2016, eq. 1), shape (F,), in [0, 1]."""
        return self.inactive.double() / self.seen

    @property
    def mean(self) -> Tensor:
        """Return the mean activation, shape (F,)."""
        return self.total / self.seen


class _Output(NamedTuple):
    """Facts about a convolution's output, kept until its activation is found."""

    node: Node | None
    """Autograd node of the output; None without gradients."""
    filters: int
    sums: Sums
    """Of the output's relu."""


def sums_of(activation: Tensor) -> Sums:
    """Sum an activation (N, F, ...) over all dimensions except the second."""
    rest = [d for d in range(activation.dim()) if d != 1]
    return Sums(
        (activation <= 0).sum(dim=rest),
        activation.sum(dim=rest, dtype=torch.float64),
        activation.numel() // activation.shape[1],
    )


def convolutions(model: nn.Module, weights: Sequence[str]) -> dict[str, nn.Module]:
    """Return the convolution that each weight belongs to.

    Raises:
        UserError: a weight does not belong to a convolution.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for name in weights:
        module = modules[name.rpartition(".")[0]]
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or not name.endswith("weight"):
            raise UserError(
                f"ranking filters by their activations needs weights of convolutions, got {name} of "
                f"{type(module).__name__}"
            )
        found[name] = module
    return found


class ActivationWatch:
    """Sums over the activations of convolutions, from forward passes in training mode with gradients.

    The activation of a convolution is the output of the first activation module that its output reaches with no other
    layer between (batch norm, pooling and additions do not count as layers), if it has F channels. It is found in
    autograd's graph of the model's first such forward pass. If there is none (functional activations, a frozen layer, a
    linear bottleneck), relu of the convolution's output is used. The result is kept until `stop` and saved in the
    state, because a layer that is frozen later has no graph.

    Args:
        weights: names of the convolutions' weights.
    """

    def __init__(self, weights: Sequence[str]) -> None:
        self._weights = tuple(weights)
        self.sums: dict[str, Sums] = {}
        self._handles: list[RemovableHandle] = []
        # A module may be called several times in a forward (torchvision's blocks share one ReLU): calls are counted.
        self._calls: Counter[nn.Module] = Counter()
        self._consumers: dict[tuple[nn.Module, int], list[str]] | None = None
        self._loaded: list[list[Any]] | None = None
        self._names: dict[nn.Module, str] = {}
        self._without: frozenset[str] = frozenset()
        self._open: dict[str, _Output] = {}
        self._found: dict[tuple[nn.Module, int], list[str]] = {}

    def start(self, model: nn.Module) -> None:
        """Start watching this model; searches for its activations again unless a state was just loaded.

        Raises:
            UserError: a weight does not belong to a convolution.
        """
        self.stop()
        owners = convolutions(model, self._weights)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        if self._loaded is not None:
            modules = {name: module for module, name in self._names.items()}
            self._know({(modules[name], int(call)): list(weights) for name, call, weights in self._loaded})
            self._loaded = None
        self._handles = [
            model.register_forward_pre_hook(self._begun),
            *(module.register_forward_hook(self._convolved(name)) for name, module in owners.items()),
            *(m.register_forward_hook(self._activated) for m in model.modules() if isinstance(m, ACTIVATIONS)),
            # Registered last, because the model itself may be a convolution.
            model.register_forward_hook(self._ended),
        ]

    def stop(self) -> None:
        """Stop watching; the sums are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open, self._found = {}, {}
        self._consumers = None

    def _know(self, consumers: dict[tuple[nn.Module, int], list[str]]) -> None:
        """Set the weights whose activation each module call returns; all other weights use relu of their output."""
        self._consumers = consumers
        self._without = frozenset(self._weights).difference(*consumers.values())

    def _begun(self, model: nn.Module, inputs: object) -> None:
        self._calls.clear()
        self._open, self._found = {}, {}

    def _convolved(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            if self._consumers is None:
                # An in-place activation would change the output before the forward ends, so sum it now.
                sums = sums_of(output.detach().relu())
                self._open[name] = _Output(output.grad_fn, output.shape[1], sums)
            elif name in self._without:
                self._add(name, sums_of(output.detach().relu()))

        return hook

    def _activated(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        call = (module, self._calls[module])
        self._calls[module] += 1
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._consumers is None:
            names = self._consumed(output)
            for name in names:
                del self._open[name]
            if names:
                self._found[call] = names
        else:
            names = self._consumers.get(call, [])
        if names:
            sums = sums_of(output.detach())
            for name in names:
                self._add(name, sums)

    def _ended(self, model: nn.Module, inputs: object, output: object) -> None:
        if self._consumers is not None or not (model.training and torch.is_grad_enabled()):
            return
        for name, left in self._open.items():
            self._add(name, left.sums)
        self._know(self._found)
        self._open, self._found = {}, {}

    def _consumed(self, activation: Tensor) -> list[str]:
        """Return the open convolutions that this activation is computed from, by a search back through the graph."""
        outputs = {
            output.node: name
            for name, output in self._open.items()
            if output.node is not None and activation.dim() > 1 and activation.shape[1] == output.filters
        }
        found: list[str] = []
        if not outputs or activation.grad_fn is None:
            return found
        stack, visited = [activation.grad_fn], {activation.grad_fn}
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is None or node in visited:
                    continue
                visited.add(node)
                if node in outputs:
                    found.append(outputs[node])
                elif not node.name().startswith(_LAYERS):
                    stack.append(node)
        return found

    def _add(self, name: str, sums: Sums) -> None:
        before = self.sums.get(name)
        # After thinning, the earlier sums include removed filters and are discarded.
        self.sums[name] = sums if before is None or before.total.shape != sums.total.shape else before + sums

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the activations that were found, each as [module, number of its call, weights]."""
        sums = {name: [one.inactive.clone(), one.total.clone(), one.seen] for name, one in self.sums.items()}
        if self._consumers is None:
            return {"sums": sums, "found": None}
        found = [[self._names[module], call, list(names)] for (module, call), names in self._consumers.items()]
        return {"sums": sums, "found": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; call `start` afterwards."""
        self.sums = {name: Sums(inactive, total, int(seen)) for name, (inactive, total, seen) in state["sums"].items()}
        self._loaded = None if state["found"] is None else list(state["found"])
