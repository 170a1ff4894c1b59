"""A loss of a model as a function of named parameters: checked, repeatable, without side effects on the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainables.errors import UserError, unknown_name
from trainables.runtime.generators import generators_digest, kept_generators

#: A loss: the model in, a scalar tensor out, regularization terms included.
Loss = Callable[[nn.Module], Tensor]


def matching_names(model: nn.Module, names: str | Iterable[str] | None) -> list[str]:
    """Return the names of a model's parameters that are meant, in the model's order.

    Args:
        model: whose parameters; one that has several names has its first.
        names: names or patterns (``conv*``, ``*.weight``); None: all parameters that require a gradient.

    Raises:
        UserError: a name matches nothing, or a parameter without floating-point numbers.
    """
    known = dict(model.named_parameters())
    if names is None:
        found = [name for name, parameter in known.items() if parameter.requires_grad]
        if not found:
            raise UserError("the model has no parameter that requires a gradient: name those that are meant")
    else:
        wanted: set[str] = set()
        for pattern in [names] if isinstance(names, str) else names:
            matches = {pattern} & set(known) or {name for name in known if fnmatchcase(name, pattern)}
            if not matches:
                raise unknown_name("parameter", pattern, known)
            wanted |= matches
        found = [name for name in known if name in wanted]
    for name in found:
        if not known[name].is_floating_point():
            raise UserError(f"parameter {name} must have floating-point numbers, got {known[name].dtype}: leave it out")
    return found


class _Called(nn.Module):
    """A module whose forward pass is the loss, so that `functional_call` can exchange the model's parameters."""

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.model = model

    def forward(self) -> Tensor:
        return self.loss(self.model)


class ModelLoss:
    """The loss of a model at changed parameters. The model itself is left as it is.

    Args:
        loss: loss(model) is a scalar tensor.
        model: on one device, in the mode in which the loss is meant.
    """

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if getattr(module, "max_norm", None) is not None:
                raise UserError(
                    f"{type(module).__name__} {name!r} must not write its weight in forward passes, got "
                    f"max_norm={module.max_norm}: build it without"
                )
        self.model = model
        self._called = _Called(loss, model)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._norms = [module for module in model.modules() if _updates(module)]
        kept = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        self._buffers = [(f"model.{name}", buffer) for name, buffer in model.named_buffers() if id(buffer) not in kept]
        # All names of a parameter that is used in several places, by its first.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[first[id(parameter)]].append(f"model.{name}")

    def at(self, changed: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with some parameters exchanged; buffers that the loss writes are copies."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers}
        parameters = {alias: value for name, value in changed.items() for alias in self._names[name]}
        return functional_call(self._called, {**buffers, **parameters}, (), tie_weights=False)

    def at_each(self, name: str, indices: Tensor, amounts: Tensor) -> Iterator[Tensor]:
        """Yield the loss with one element of a parameter changed at a time, as a plain loop over the model would.

        Args:
            name: of a contiguous parameter, which is as before after each evaluation.
            indices: (n,) int64, flat.
            amounts: (n,) what is added there.
        """
        parameter = dict(self.model.named_parameters())[name]
        flat = parameter.detach().view(-1)
        draws = True
        for index, amount in zip(indices.tolist(), amounts.to(flat.dtype), strict=True):
            before = flat[index].clone()
            with torch.no_grad(), _batch_statistics(self._norms), ExitStack() as stack:
                # States of generators are set for each evaluation only where the loss draws from them.
                if draws:
                    stack.enter_context(kept_generators([self.device]))
                    states = generators_digest(self.device)
                flat[index] += amount
                try:
                    found = self.at({}) if self._buffers else self._called()
                finally:
                    flat[index] = before
                draws = draws and states != generators_digest(self.device)
            yield found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate without gradients, without moving a generator; batch norms in train mode keep their statistics.

        Every block begins with the same states of the generators, so that dropout is the same in all of them.
        """
        with torch.no_grad(), kept_generators([self.device]), _batch_statistics(self._norms):
            yield

    def value(self) -> Tensor:
        """Return the loss at the model's own parameters.

        Raises:
            UserError: it is not a scalar tensor.
        """
        with self.evaluating():
            found = self.at({})
        if not isinstance(found, Tensor):
            raise UserError(
                f"loss(model) must return a scalar tensor, got {type(found).__name__}: leave its .item() out"
            )
        if found.ndim:
            raise UserError(f"loss(model) must return a scalar tensor, got shape {tuple(found.shape)}: take its mean")
        if not found.is_floating_point():
            raise UserError(f"loss(model) must return a floating-point number, got {found.dtype}: add .float()")
        return found

    def check_repeats(self) -> Tensor:
        """Return the loss; raise UserError if two evaluations of the same parameters differ.

        Differences as small as those of parallel sums are no error.
        """
        first, again = self.value(), self.value()
        tolerance = 16 * torch.finfo(first.dtype).eps * first.abs()
        if bool((first - again).abs() > tolerance):
            raise UserError(
                f"loss(model) must be deterministic, got {float(first)} and {float(again)} for the same parameters: "
                "evaluate it on one fixed batch, and draw only from torch's generators"
            )
        return first


@contextmanager
def _batch_statistics(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Have batch norms in train mode normalise by the batch, as they do, without updating running statistics."""
    kept = [(norm, dict(norm._buffers)) for norm in norms]
    for norm in norms:
        norm.track_running_stats = False  # type: ignore[assignment]
        for name in norm._buffers:
            norm._buffers[name] = None
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm.track_running_stats = True  # type: ignore[assignment]
            norm._buffers.update(buffers)


def updates_statistics(model: nn.Module) -> bool:
    """Return whether the model has batch norms that would update running statistics in a forward pass."""
    return any(_updates(module) for module in model.modules())


def _updates(module: nn.Module) -> bool:
    norms = nn.modules.batchnorm._NormBase
    return isinstance(module, norms) and module.training and module.track_running_stats
