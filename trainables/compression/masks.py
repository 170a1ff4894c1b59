"""The masks of a model's parameters, and how they act on its weights.

Shapes and symbols: w a weight, any shape; m its mask, of w's shape, dtype and device, 0 removes an element and 1 keeps
it (Bernoulli masks keep by more); c the unmasked copy of w. While c is live, w = m c.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.compression.model_copies import as_built
from trainables.compression.thinning.cutting import crop
from trainables.errors import UserError, unknown_name


def parameters_as_built(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names they had before anything parametrized them or a parallel wrapper stood around the model.

    A parametrized weight is called ``a.parametrizations.weight.original`` by torch, here ``a.weight``.
    """
    return {as_built(name): parameter for name, parameter in model.named_parameters()}


@dataclass(kw_only=True)
class _Flags:
    use_double_copies: bool = False
    mask_on_forward_only: bool = False
    mask_gradients: bool = False


class _Plan(NamedTuple):
    """What one application touches, as lists that ``torch._foreach_*`` takes."""

    weights: list[Tensor]
    masks: list[Tensor]
    doubled: tuple[str, ...]
    """Those of which a copy is kept."""


class Masks:
    """The masks of one model's parameters.

    A scheduler calls, in this order: `apply` with ``forward=True`` before a forward, `restore` before the optimizer's
    step, `apply` with ``forward=False`` after it. Nothing here waits for the device but `state_dict`.

    Args:
        model: its parameters as they are now; see `rebind`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = parameters_as_built(model)
        self._flags = {name: _Flags() for name in self._parameters}
        self._masks: dict[str, Tensor] = {}
        self._once: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._handles: dict[str, RemovableHandle] = {}
        self._plans: dict[bool, _Plan] = {}

    def names(self) -> tuple[str, ...]:
        """Parameters that have a mask, in the model's order."""
        return tuple(name for name in self._parameters if name in self._masks)

    def get(self, name: str) -> Tensor | None:
        """A parameter's mask, or None.

        Raises:
            UserError: there is no such parameter.
        """
        self._known(name)
        return self._masks.get(name)

    def weights(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The parameters of these names that the model has."""
        return {name: self._parameters[name] for name in names if name in self._parameters}

    def dense(self, name: str) -> Tensor:
        """A parameter's weight as the optimizer knows it: the unmasked copy while there is one, else the weight.

        Raises:
            UserError: there is no such parameter.
        """
        weight = self._known(name).detach()
        return self._copies[name] if name in self._live else weight

    def configure(self, name: str, *, use_double_copies: bool = False, mask_on_forward_only: bool = False) -> None:
        """How a parameter's mask acts.

        Args:
            name: of the parameter.
            use_double_copies: the forward sees m w, the optimizer's step changes w itself.
            mask_on_forward_only: w is not masked after the step.

        Raises:
            UserError: there is no such parameter.
        """
        self._known(name)
        if not use_double_copies:
            self._put_back(name)
        self._flags[name].use_double_copies = use_double_copies
        self._flags[name].mask_on_forward_only = mask_on_forward_only
        self._plans.clear()

    def set(self, name: str, mask: Tensor, *, is_regularization_mask: bool = False) -> None:
        """Give a parameter a mask; the next application uses it.

        Args:
            name: of the parameter.
            mask: of the weight's shape.
            is_regularization_mask: only the next application of either kind uses it, and what it zeroes is zero in
                the unmasked copy too; the mask that lasts stays.

        Raises:
            UserError: there is no such parameter, or it has another shape.
        """
        fitting = self._fitting(name, mask)
        if is_regularization_mask:
            self._once[name] = fitting
        else:
            self._masks[name] = fitting
            self._plans.clear()

    def mask_gradients(self, name: str, on: bool) -> None:
        """Multiply the parameter's gradient by its mask as it is at the time of the backward, or cease to.

        Raises:
            UserError: there is no such parameter.
        """
        parameter = self._known(name)
        self._flags[name].mask_gradients = on
        if (handle := self._handles.pop(name, None)) is not None:
            handle.remove()
        if not on:
            return

        def masked(gradient: Tensor) -> Tensor | None:
            mask = self._masks.get(name)
            return None if mask is None else gradient * mask

        # Torch takes no hook for a frozen parameter, yet it may be thawed later.
        needs_gradient = parameter.requires_grad
        self._handles[name] = parameter.requires_grad_(True).register_hook(masked)
        parameter.requires_grad_(needs_gradient)

    @torch.no_grad()
    def apply(self, forward: bool) -> None:
        """Mask the weights.

        Before a forward a live copy is what is masked, so that several forwards before one step (accumulated
        gradients) mask the same weights. After a step the weights themselves are new, and a copy is taken of them.

        Args:
            forward: True before a forward: all masks. False after a step: those that are not for forwards only.
        """
        if self._once:
            self._apply_once()
        plan = self._plans.get(forward) or self._make_plan(forward)
        if not plan.weights:
            return
        for name in plan.doubled:
            if forward and name in self._live:
                self._parameters[name].copy_(self._copies[name])
            else:
                self._take_copy(name)
        torch._foreach_mul_(plan.weights, plan.masks)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the unmasked copies back into the weights: call before the optimizer's step."""
        for name in self._live:
            self._parameters[name].copy_(self._copies[name])
        self._live.clear()

    def discard(self, names: Iterable[str]) -> None:
        """Forget masks; weights with an unmasked copy are as that copy again.

        Raises:
            UserError: there is no such parameter.
        """
        for name in names:
            self._known(name)
            self._put_back(name)
            self._masks.pop(name, None)
        self._plans.clear()

    @torch.no_grad()
    def release(self, name: str) -> None:
        """Keep the mask for good (``keep_mask``): the weight is masked now and after each step from here on.

        Without copy, and with gradients as they are. A parameter without a mask stays as it is.

        Raises:
            UserError: there is no such parameter.
        """
        weight = self._known(name)
        self._put_back(name)
        self.configure(name)
        self.mask_gradients(name, False)
        if (mask := self._masks.get(name)) is not None:
            weight.mul_(mask)

    def crop(self, removed: Mapping[str, Mapping[int, Sequence[int]]]) -> None:
        """Cut masks and copies as their weights were cut, so that what is left of them stays pruned; then `rebind`.

        Args:
            removed: by parameter and dimension, the indices that are gone (`thinning.Thinned.removed`).
        """
        for tensors in (self._masks, self._once, self._copies):
            for name in tensors.keys() & removed.keys():
                tensors[name] = crop(tensors[name], removed[name])

    def rebind(self, model: nn.Module) -> None:
        """Go on with a model whose parameters are other objects: thinned, or moved to a device.

        Masks and copies that no longer fit, or whose parameter is gone, are dropped.
        """
        self._parameters = parameters_as_built(model)
        masked = [name for name, flags in self._flags.items() if flags.mask_gradients]
        self._flags = {name: self._flags.get(name, _Flags()) for name in self._parameters}
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        for tensors in (self._masks, self._once, self._copies):
            for name, tensor in list(tensors.items()):
                weight = self._parameters.get(name)
                if weight is None or weight.shape != tensor.shape:
                    del tensors[name]
                else:
                    tensors[name] = tensor.to(weight)
        self._live &= set(self._copies)
        for name in masked:
            if name in self._parameters:
                self.mask_gradients(name, True)
        self._plans.clear()

    def state_dict(self) -> dict[str, Any]:
        """Masks (as truth values where they are 0 and 1), flags and live copies."""
        return {
            "masks": {name: _compact(mask) for name, mask in self._masks.items()},
            "once": {name: _compact(mask) for name, mask in self._once.items()},
            "copies": {name: self._copies[name].clone() for name in self._parameters if name in self._live},
            "flags": {name: asdict(flags) for name, flags in self._flags.items() if flags != _Flags()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the weights are those that were saved with it.

        Raises:
            UserError: the state is of a model with other parameters.
        """
        for kind in ("masks", "once", "copies", "flags"):
            for name in state[kind]:
                self._known(name)
        self._masks = {name: self._fitting(name, mask) for name, mask in state["masks"].items()}
        self._once = {name: self._fitting(name, mask) for name, mask in state["once"].items()}
        self._copies = {name: self._fitting(name, copy).clone() for name, copy in state["copies"].items()}
        self._live = set(self._copies)
        for name in self._flags:
            self._flags[name] = _Flags(**state["flags"].get(name, {}))
            self.mask_gradients(name, self._flags[name].mask_gradients)
        self._plans.clear()

    def _known(self, name: str) -> nn.Parameter:
        if name not in self._parameters:
            raise unknown_name("parameter", name, self._parameters)
        return self._parameters[name]

    def _fitting(self, name: str, tensor: Tensor) -> Tensor:
        weight = self._known(name)
        if tensor.shape != weight.shape:
            raise UserError(
                f"the mask of {name} must have its shape {tuple(weight.shape)}, got {tuple(tensor.shape)}; a saved "
                "state belongs to the model that it was saved with"
            )
        return tensor.detach().to(weight)

    def _make_plan(self, forward: bool) -> _Plan:
        names = [name for name in self.names() if forward or not self._flags[name].mask_on_forward_only]
        plan = _Plan(
            [self._parameters[name] for name in names],
            [self._masks[name] for name in names],
            tuple(name for name in names if self._flags[name].use_double_copies),
        )
        self._plans[forward] = plan
        return plan

    def _apply_once(self) -> None:
        names = list(self._once)
        torch._foreach_mul_([self._parameters[name] for name in names], list(self._once.values()))
        for name in self._live.intersection(names):
            self._copies[name].mul_(self._once[name])
        self._once.clear()

    def _take_copy(self, name: str) -> None:
        weight = self._parameters[name]
        if name in self._copies:
            self._copies[name].copy_(weight)
        else:
            self._copies[name] = weight.detach().clone()
        self._live.add(name)

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        if name in self._live:
            self._parameters[name].copy_(self._copies[name])
            self._live.discard(name)
        self._copies.pop(name, None)


def _compact(mask: Tensor) -> Tensor:
    """Truth values if the mask has no others than 0 and 1, else a copy."""
    truth = mask != 0
    return truth if torch.equal(truth.to(mask.dtype), mask) else mask.clone()
