"""Discrete gradient: the smallest change of each weight that lowers the loss, and the best of these together.

docs/gradients.md has the search. On smooth functions nearly every delta is the stride, so a step is one along signs,
and stalls near a minimum: nothing is claimed about convergence. With binary activations the loss is constant in places,
where a gradient says nothing.

Shapes: P elements of a parameter; multiples (P,) int64, delta = stride x multiple, negative ones lower the element, 0:
nothing found; decreases (P,).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainables.errors import unknown_name
from trainables.gradients.central_differences import check_changes_weights, progress_bar
from trainables.gradients.fields import OBJECTIVES
from trainables.gradients.gradient_method import Loss, check_option, matching_names
from trainables.gradients.perturbations import Perturbations
from trainables.gradskip.variables import is_number

#: Multiples of the stride that are tried at once, at first and at most; each time twice as many.
_FIRST_MULTIPLES, _MOST_MULTIPLES = 1, 64
#: Pairs of changes whose indices are held at once.
_MOST_AT_ONCE = 2**21


@dataclass(frozen=True, kw_only=True)
class DiscreteGradient:
    """Result of a search: the changes that lower the loss, and those that are made together."""

    stride: float  # smallest change that was tried
    multiples: Mapping[str, Tensor]
    """Smallest change that lowers the loss, in strides with its sign, by parameter name; 0 where none was found."""
    decreases: Mapping[str, Tensor]  # by how much it lowers the loss; 0 where none was found
    taken: Mapping[str, Tensor]  # the changes that are made together, to be added to the parameters; zeros elsewhere
    loss_before: float  # loss of the model as it was
    loss_after: float  # loss with the changes that were taken; equal to `loss_before` if none was
    retries: int  # number of smaller sets that were tried, since the ones before did not lower the loss
    evaluations: int  # losses that were evaluated

    @property
    def found(self) -> int:
        """Return the number of elements with a change that lowers the loss."""
        return sum(int((multiple != 0).sum()) for multiple in self.multiples.values())

    @property
    def count_taken(self) -> int:
        """Return the number of elements that are changed together."""
        return sum(int((change != 0).sum()) for change in self.taken.values())

    def deltas(self) -> Tensor:
        """Return the size of each change that was found, (found,), for its distribution."""
        return torch.cat([m[m != 0].abs().flatten() for m in self.multiples.values()]).double() * self.stride

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Change the parameters of a model."""
        for name, change in self.taken.items():
            model.get_parameter(name).add_(change)


def discrete_gradient(
    loss: Loss,
    model: nn.Module,
    epsilon: float = 1e-2,
    stride: float = 1e-4,
    names: str | Iterable[str] | None = None,
    *,
    objective: str = OBJECTIVES[0],
) -> DiscreteGradient:
    """Return the discrete gradient of a loss; the model is left as it is, `DiscreteGradient.apply` changes one.

    Args:
        loss: loss(model) is a scalar tensor.
        model: in the mode in which the loss is meant.
        epsilon: largest change of an element, and bound on the length of the joint change.
        stride: smallest change of an element.
        names: names or patterns of parameters; None: those that require a gradient.
        objective: order in which changes are taken, one of `OBJECTIVES`.

    Where a single change that lowered the loss at a layer's output does not do so in the weight, rounded to its dtype,
    the next is tried; if none does, nothing is taken. UserError: an epsilon or stride that is not above 0, a stride
    above epsilon or too small to change a weight, an unknown objective, a loss that is no scalar tensor or does not
    repeat, a name that matches nothing.
    """
    chosen = matching_names(model, names)
    for name, value in (("epsilon", epsilon), ("stride", stride)):
        check_option(name, value, is_number(value) and value > 0, "a number above 0")
    check_option("stride", stride, stride <= epsilon, f"at most epsilon={epsilon!r}")
    if objective not in OBJECTIVES:
        raise unknown_name("objective", str(objective), OBJECTIVES)
    losses = Perturbations(loss, model)
    check_changes_weights("stride", stride, model, chosen)
    return search(losses, chosen, epsilon, stride, objective, progress=True)


def search(
    losses: Perturbations,
    names: Sequence[str],
    epsilon: float,
    stride: float,
    objective: str,
    *,
    progress: bool = False,
) -> DiscreteGradient:
    """Return the discrete gradient from an engine, arguments as for `discrete_gradient`; they are not checked."""
    parameters = {name: losses.model.get_parameter(name) for name in names}
    sizes = [parameter.numel() for parameter in parameters.values()]
    most = math.floor(epsilon / stride * (1 + 1e-9))
    multiples, decreases = {}, {}
    evaluations = 1  # the loss before
    with progress_bar("discrete gradient", sum(sizes), "weight", shown=progress) as bar:
        for name, parameter in parameters.items():
            multiples[name], decreases[name], count = _smallest(losses, name, parameter, stride, most)
            evaluations += count
            bar.update(parameter.numel())
    flat = torch.cat([*multiples.values()])
    order, first = taken_first(flat, torch.cat([*decreases.values()]), epsilon, stride, objective)

    def shaped(values: Iterable[Tensor]) -> dict[str, Tensor]:
        return {name: part.view(parameters[name].shape) for name, part in zip(names, values, strict=True)}

    def changes(picked: Tensor) -> dict[str, Tensor]:
        amounts = torch.zeros(len(flat), dtype=torch.float64, device=flat.device)
        amounts[picked] = flat[picked].double() * stride
        return {name: part.to(parameters[name].dtype) for name, part in shaped(amounts.split(sizes)).items()}

    before = float(losses.value)
    tried, after, picked = 0, before, order[:0]
    for part in _smaller_sets(order, first):
        value = float(losses.together(changes(part)))
        tried += 1
        if value < before:
            after, picked = value, part
            break
    return DiscreteGradient(
        stride=stride,
        multiples=shaped(multiples.values()),
        decreases=shaped(decreases.values()),
        taken=changes(picked),
        loss_before=before,
        loss_after=after,
        retries=max(0, tried - 1),
        evaluations=evaluations + tried,
    )


def _smallest(
    losses: Perturbations, name: str, parameter: Tensor, stride: float, most: int
) -> tuple[Tensor, Tensor, int]:
    """Return the smallest multiple of the stride that lowers the loss, the decrease, (P,) each, and losses evaluated.

    Blocks of multiples are tried at once for all elements that still search: small ones at first, since on most
    functions the first one decreases the loss for nearly every element.
    """
    device, count = parameter.device, parameter.numel()
    found = torch.zeros(count, dtype=torch.int64, device=device)
    decreases = torch.zeros(count, dtype=losses.dtype, device=device)
    searching = torch.arange(count, device=device)
    tried, block, evaluations = 0, _FIRST_MULTIPLES, 0
    while tried < most and len(searching):
        block = max(1, min(block, most - tried, _MOST_AT_ONCE // len(searching)))
        steps = torch.arange(tried + 1, tried + block + 1, device=device)
        signed = torch.stack([steps, -steps], 1)  # (block, 2)
        indices = searching.repeat_interleave(2 * block)
        amounts = signed.flatten().repeat(len(searching)).to(losses.dtype) * stride
        values = losses.losses(name, indices, amounts).view(len(searching), block, 2)
        evaluations += values.numel()
        gains = losses.value - values
        gains, signs = torch.where(gains.isnan(), -torch.inf, gains).max(2)  # the better of the two signs
        lowers = gains > 0
        place = lowers.int().argmax(1)  # the first that lowers the loss
        done = lowers.any(1)
        rows = torch.arange(len(searching), device=device)
        found[searching[done]] = signed[place, signs[rows, place]][done]
        decreases[searching[done]] = gains[rows, place][done]
        searching = searching[~done]
        tried, block = tried + block, min(2 * block, _MOST_MULTIPLES)
    return found, decreases, evaluations


def taken_first(
    multiples: Tensor, decreases: Tensor, epsilon: float, stride: float, objective: str
) -> tuple[Tensor, int]:
    """Return the elements in the order in which they are taken, and how many are within the budget together.

    The sum of their delta^2 stays below epsilon^2, in exact integers of strides; an element whose change alone has the
    length epsilon is left out. Ties are in the order of the elements. Multiples and decreases are (D,), of all
    elements.
    """
    budget = (epsilon / stride) ** 2 * (1 - 1e-12)
    having = torch.nonzero((multiples != 0) & (multiples.double().square() < budget)).flatten()
    sizes = multiples[having].abs()
    power = 2 if objective == OBJECTIVES[1] else 1
    value = decreases[having].double() / (sizes.double() * stride) ** power
    order = torch.argsort(value, descending=True, stable=True)
    spent = sizes[order].square().cumsum(0).double()
    return having[order], int((spent < budget).sum())


def _smaller_sets(order: Tensor, first: int) -> Iterator[Tensor]:
    """Yield the first elements, their first halves down to one, and then each element alone."""
    part = order[:first]
    while len(part) > 1:
        yield part
        part = part[: len(part) // 2]
    for place in range(len(order)):
        yield order[place : place + 1]
