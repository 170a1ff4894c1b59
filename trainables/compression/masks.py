"""Masks of a model's parameters and their application to the weights.

Shapes and symbols: w a weight, any shape; m its mask, of w's shape, dtype and device, 0 removes an element and 1 keeps
it (Bernoulli masks have values above 1); c the unmasked copy of w. While c is live, w = m c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.compression.model_copies import as_built
from trainables.compression.thinning import crop


def parameters_as_built(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without parametrizations and parallel wrappers.

    A parametrized weight that torch calls ``a.parametrizations.weight.original`` is called ``a.weight`` here.
    """
    return {as_built(name): parameter for name, parameter in model.named_parameters()}


def hook_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register a hook on a parameter's gradient, also on a frozen parameter's, which may be unfrozen later."""
    needs_gradient = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_hook(hook)  # torch accepts none on a frozen parameter
    parameter.requires_grad_(needs_gradient)
    return handle


@dataclass(kw_only=True)
class _Flags:
    use_double_copies: bool = False
    mask_on_forward_only: bool = False
    mask_gradients: bool = False


class Masks:
    """The masks of one model's parameters.

    A scheduler calls, in this order: `apply` with ``forward=True`` before a forward, `restore` before the optimizer's
    step, `apply` with ``forward=False`` after it; and `rebind` after the model's parameters were replaced. Only
    `state_dict` synchronizes with the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = parameters_as_built(model)
        self._flags = {name: _Flags() for name in self._parameters}
        self._masks: dict[str, Tensor] = {}
        self._once: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._handles: dict[str, RemovableHandle] = {}

    def get(self, name: str) -> Tensor | None:
        """Return a parameter's mask, or None."""
        return self._masks.get(name)

    def weights(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return the parameters with these names, without names that the model does not have."""
        return {name: self._parameters[name] for name in names if name in self._parameters}

    def dense(self, name: str) -> Tensor:
        """Return the weight that the optimizer updates: the unmasked copy while it is live, else the weight."""
        return self._copies[name] if name in self._live else self._parameters[name].detach()

    def configure(self, name: str, *, use_double_copies: bool = False, mask_on_forward_only: bool = False) -> None:
        """Set how a parameter's mask is applied.

        With double copies the forward uses m w, and the optimizer's step changes w itself. Masked on forward only, w is
        not masked after the step.
        """
        if not use_double_copies:
            self._put_back(name)
        self._flags[name].use_double_copies = use_double_copies
        self._flags[name].mask_on_forward_only = mask_on_forward_only

    def set(self, name: str, mask: Tensor, *, is_regularization_mask: bool = False) -> None:
        """Give a parameter a mask of its shape; the next application uses it.

        A regularization mask is used by the next application of either kind only, and also zeroes elements of the
        unmasked copy; the permanent mask is kept.
        """
        mask = mask.detach().to(self._parameters[name])
        (self._once if is_regularization_mask else self._masks)[name] = mask

    def mask_gradients(self, name: str, on: bool) -> None:
        """Start or stop multiplying the parameter's gradient by its current mask at each backward pass."""
        self._flags[name].mask_gradients = on
        if (handle := self._handles.pop(name, None)) is not None:
            handle.remove()

        def masked(gradient: Tensor) -> Tensor | None:
            mask = self._masks.get(name)
            return None if mask is None else gradient * mask

        if on:
            self._handles[name] = hook_gradient(self._parameters[name], masked)

    @torch.no_grad()
    def apply(self, forward: bool) -> None:
        """Mask the weights: before a forward by all masks, after a step without those for the forward only.

        Before a forward, a live copy is masked, so that several forwards before one step (accumulated gradients) mask
        the same weights. After a step the weights have changed, and a new copy of them is taken.
        """
        if self._once:
            torch._foreach_mul_([self._parameters[name] for name in self._once], list(self._once.values()))
            for name in self._live.intersection(self._once):
                self._copies[name].mul_(self._once[name])
            self._once.clear()
        names = [name for name in self._masks if forward or not self._flags[name].mask_on_forward_only]
        for name in names:
            if not self._flags[name].use_double_copies:
                continue
            weight = self._parameters[name]
            if name in self._live:  # no step has been taken with it
                weight.copy_(self._copies[name])
            elif name in self._copies:
                self._copies[name].copy_(weight)
            else:
                self._copies[name] = weight.detach().clone()
            self._live.add(name)
        if names:
            torch._foreach_mul_([self._parameters[name] for name in names], [self._masks[name] for name in names])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the unmasked copies back into the weights: call before the optimizer's step."""
        for name in self._live:
            self._parameters[name].copy_(self._copies[name])
        self._live.clear()

    def discard(self, names: Iterable[str]) -> None:
        """Remove masks and restore weights from their unmasked copies, if they have one."""
        for name in names:
            self._put_back(name)
            self._masks.pop(name, None)

    @torch.no_grad()
    def release(self, name: str) -> None:
        """Keep the mask permanently (``keep_mask``): the weight is masked now and after each later step.

        The copy is dropped and gradients are no longer masked. Without a mask, the weight is not changed.
        """
        self.configure(name)
        self.mask_gradients(name, False)
        if (mask := self._masks.get(name)) is not None:
            self._parameters[name].mul_(mask)

    def crop(self, removed: Mapping[str, Mapping[int, Sequence[int]]]) -> None:
        """Cut masks and copies as their weights were (`thinning.Thinned.removed`); call `rebind` afterwards."""
        for tensors in (self._masks, self._once, self._copies):
            for name in tensors.keys() & removed.keys():
                tensors[name] = crop(tensors[name], removed[name])

    def rebind(self, model: nn.Module) -> None:
        """Use a model whose parameters are new objects, after thinning or a move to another device.

        Masks and copies that no longer fit, or whose parameter no longer exists, are dropped.
        """
        self._parameters = parameters_as_built(model)
        self._flags = {name: self._flags.get(name, _Flags()) for name in self._parameters}
        for tensors in (self._masks, self._once, self._copies):
            for name, tensor in list(tensors.items()):
                weight = self._parameters.get(name)
                if weight is None or weight.shape != tensor.shape:
                    del tensors[name]
                else:
                    tensors[name] = tensor.to(weight)
        self._live &= set(self._copies)
        self._hook_again()

    def state_dict(self) -> dict[str, Any]:
        """Return masks (as booleans if all values are 0 or 1), flags and live copies."""
        return {
            "masks": {name: _compact(mask) for name, mask in self._masks.items()},
            "once": {name: _compact(mask) for name, mask in self._once.items()},
            "copies": {name: self._copies[name].clone() for name in self._parameters if name in self._live},
            "flags": {name: asdict(flags) for name, flags in self._flags.items() if flags != _Flags()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the weights must be those that were saved with it."""
        self._flags = {name: _Flags(**state["flags"].get(name, {})) for name in self._parameters}
        self._masks, self._once, self._copies = (
            {name: tensor.to(self._parameters[name], copy=True) for name, tensor in state[kind].items()}
            for kind in ("masks", "once", "copies")
        )
        self._live = set(self._copies)
        self._hook_again()

    def _hook_again(self) -> None:
        """Register the hooks on gradients that the flags ask for."""
        for name, flags in self._flags.items():
            self.mask_gradients(name, flags.mask_gradients)

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        if name in self._live:
            self._parameters[name].copy_(self._copies[name])
            self._live.discard(name)
        self._copies.pop(name, None)


def _compact(mask: Tensor) -> Tensor:
    """Return the mask as booleans if all values are 0 or 1, else a copy."""
    truth = mask != 0
    return truth if torch.equal(truth.to(mask.dtype), mask) else mask.clone()
