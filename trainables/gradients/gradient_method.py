"""Optimization methods whose direction can be asked for at any time without disturbing the training.

A method draws samples (`draw`), combines their gradients (`gradient`), and gives them to a torch optimizer (`step`).
`grad` is the direction in which `step` would go. `draw`, `gradient` and `grad` have no side effects: no weight, buffer,
gradient, counter or random generator is changed, so that a training that is measured is, bit for bit, one that is not.
Work that a method does now and then is in `refresh` (snapshots, about a pass over the data) and `observe` (about a
gradient's cost), which only `step` calls.

Source: Faghri, Duvenaud, Fleet, Ba, "A Study of Gradient Variance in Deep Learning", arXiv:2007.04532, 2020, whose
abstraction of optimizers this is.

Shapes: B samples of a batch; a gradient has an entry for each parameter that is trained, of the parameter's shape.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from trainables.errors import UserError, unknown_name
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.output_rows import OutputRows
from trainables.runtime.isolation import kept_generators, seed_generators
from trainables.workloads.base import Batch, Samples
from trainables.workloads.batch_shapes import shapes_of
from trainables.workloads.sample_access import reservoir as reservoir
from trainables.workloads.sample_access import samples_of, structured
from trainables.workloads.seeded_loader import epoch_seed

#: Gradients by parameter name.
Gradients = dict[str, Tensor]
#: Sets the process's generators to the state in which a pass begins.
Randomness = Callable[[], None]


def check_option(name: str, value: Any, holds: bool, rule: str) -> None:
    """Raise UserError for an option that does not hold its rule."""
    if not holds:
        raise UserError(f"{name} must be {rule}, got {value!r}")


def check_interval(name: str, value: Any) -> None:
    """Raise UserError unless an option is an integer of at least 1, or None."""
    check_option(name, value, value is None or (isinstance(value, int) and value >= 1), "an integer >= 1")


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Samples of one gradient."""

    batch: Batch  # tensors (B, ...) on the model's device
    randomness: Randomness  # sets the generators before a pass on them, so that dropout is the same in every pass
    numbers: Tensor | None = None  # (B,) int64, their numbers in the data; None where the caller chose them
    weights: Tensor | None = None  # (B,) weight of each sample's gradient in their mean; None: 1

    @property
    def size(self) -> int:
        """Return B."""
        return len(self.batch[0])


class GradientMethod:
    """Gradients of batches drawn uniformly, under any torch optimizer: SGD, SGD with momentum, Adam. Base of others.

    Args:
        model: in the mode in which it is trained.
        loss: (model, batch) -> mean loss over the batch: a tuple of tensors, or the mapping that the data set yields.
        data: what `samples_of` takes.
        optimizer: turns gradients into steps; None: for measuring alone.
        batch_size: samples of a batch; None: the data's own.
        seed: of all draws.

    UserError: data without numbers, no parameter to train, or a batch size out of range.
    """

    #: Its name in statistics.
    name = "sgd"
    #: True if it draws samples by its own statistics of them, and so needs their numbers.
    chooses_samples = False

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        data: Any,
        optimizer: Optimizer | None = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.data = samples_of(data)
        self.loss = loss if isinstance(data, Samples) else structured(loss, self.data)
        self.batch_size = self.data.batch_size if batch_size is None else batch_size
        in_range = 1 <= self.batch_size <= self.data.count
        check_option("batch_size", self.batch_size, in_range, f"in 1..{self.data.count}, the samples there are")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
        first = next(iter(self.parameters.values()))
        self.device = first.device
        self._weight_type = torch.promote_types(first.dtype, torch.float32)
        self._unreached: set[str] = set()  # parameters without gradient in the last pass: a step does not move them
        self.meter = FlopMeter()
        self.iteration = 0  # steps so far

    def draw(self, generator: torch.Generator) -> Draw:
        """Draw the samples of one gradient; they depend on the generator and the method's state alone."""
        numbers = torch.randperm(self.data.count, generator=generator)[: self.batch_size]
        return self.drawn(numbers, generator)

    def drawn(self, numbers: Tensor, generator: torch.Generator, weights: Tensor | None = None) -> Draw:
        """Return the samples of these numbers, on the model's device."""
        batch = self.data.batch(numbers, generator)
        seed = int(torch.randint(2**31, (), generator=generator))
        return Draw(
            batch=tuple(tensor.to(self.device, non_blocking=True) for tensor in batch),
            numbers=numbers,
            weights=None if weights is None else weights.to(self.device, self._weight_type, non_blocking=True),
            randomness=lambda: seed_generators(seed, self.device),
        )

    def rows(self, draw: Draw) -> AbstractContextManager[Any]:
        """Return the block in which a pass on a draw runs; it weighs the samples' gradients."""
        weights = draw.weights
        return nullcontext() if weights is None else OutputRows(self.model, draw.size, lambda gradient: weights)

    def spared_flops(self, rows: Any) -> int:
        """Return the FLOPs that the backward pass in a block of `rows` has spared."""
        return 0

    def gradient(self, draw: Draw) -> Gradients:
        """Return the method's estimate of the gradient from these samples, without side effects."""
        return self.adjust(self.plain_gradient(draw), draw)

    def plain_gradient(self, draw: Draw, at: Mapping[str, Tensor] | None = None) -> Gradients:
        """Return the mean of the samples' weighted gradients, at other parameters if given, without side effects."""
        places: dict[str, Tensor]
        if at is None:
            places = {name: p for name, p in self.parameters.items() if p.requires_grad}  # others have stopped
        else:
            places = {name: value.detach().requires_grad_(True) for name, value in at.items()}
        key = ("pass", shapes_of(draw.batch), tuple(places))
        with self.pass_on(draw) as evaluate, self.rows(draw) as rows:
            with self.meter.forward(key):
                loss = evaluate({} if at is None else places)
            with self.meter.backward(key, lambda: self.spared_flops(rows)):
                found = torch.autograd.grad(loss, list(places.values()), allow_unused=True)
        reached = {name: part for name, part in zip(places, found, strict=True) if part is not None}
        if at is None:
            self._unreached = self.parameters.keys() - reached.keys()
        return {
            name: reached[name] if name in reached else torch.zeros_like(value)
            for name, value in (self.parameters if at is None else places).items()
        }

    def data_gradient(self, generator: torch.Generator) -> Gradients:
        """Return the mean gradient of all samples, in batches of a random order, without side effects."""
        total = {name: torch.zeros_like(parameter.detach()) for name, parameter in self.parameters.items()}
        order = torch.randperm(self.data.count, generator=generator)
        for numbers in order.split(self.batch_size):
            found = self.plain_gradient(self.drawn(numbers, generator))
            torch._foreach_add_(list(total.values()), list(found.values()), alpha=len(numbers) / self.data.count)
        return total

    @contextmanager
    def pass_on(self, draw: Draw) -> Iterator[Callable[[Mapping[str, Tensor]], Tensor]]:
        """Yield a function of changed parameters that returns the loss on a draw, without side effects."""
        evaluated = ModelLoss(lambda model: self.loss(model, draw.batch), self.model)
        with evaluated.evaluating(), torch.enable_grad():
            draw.randomness()
            yield evaluated.at

    def adjust(self, gradients: Gradients, draw: Draw) -> Gradients:
        """Return the method's estimate, given the mean of the samples' weighted gradients; without side effects."""
        return gradients

    def grad(self, generator: torch.Generator | None = None) -> Gradients:
        """Return the direction of a step, without side effects: parameters change by -lr times it.

        Without a generator, the samples are those of the next `step`.
        """
        draw = self.draw(self.generator() if generator is None else generator)
        gradients = self.gradient(draw)
        if self.optimizer is None:
            return gradients
        moving = {name: gradient for name, gradient in gradients.items() if name not in self._unreached}
        direction = step_direction(self.optimizer, self.parameters, moving)
        return {name: direction.get(name, torch.zeros_like(gradient)) for name, gradient in gradients.items()}

    def generator(self, purpose: int = 0) -> torch.Generator:
        """Return the generator of this iteration; it depends on seed, iteration and purpose alone."""
        return torch.Generator().manual_seed(epoch_seed(3 * self.iteration + purpose, self.seed))

    @property
    def is_about_to_pass(self) -> bool:
        """Return whether `refresh` would pass over all samples now."""
        return False

    def refresh(self) -> None:
        """Do what is due before this iteration at the cost of a pass over the data."""

    def observe(self, draw: Draw, rows: Any) -> None:
        """Do what is due in this iteration at the cost of a gradient; ``rows`` is what the block was entered as."""

    def step(self) -> Tensor:
        """Execute a training step; return its loss on the drawn samples, detached. UserError: there is no optimizer."""
        if self.optimizer is None:
            raise UserError("a step needs an optimizer, got None: give one, such as torch.optim.SGD(...)")
        self.refresh()
        draw = self.draw(self.generator())
        self.optimizer.zero_grad(set_to_none=True)
        with kept_generators([self.device]):
            draw.randomness()  # dropout goes on from the draw's own seed, as it does where `grad` measures
            with self.rows(draw) as rows:
                loss = self.loss(self.model, draw.batch)
                loss.backward()
        self.observe(draw, rows)
        self.set_gradients(self.adjust(self.gradients(), draw))
        self.optimizer.step()
        self.iteration += 1
        return loss.detach()

    def gradients(self) -> Gradients:
        """Return the parameters' current gradients, zeros where there is none."""
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of parameters that have one, for the optimizer."""
        for name, gradient in gradients.items():
            if self.parameters[name].grad is not None and self.parameters[name].grad is not gradient:
                self.parameters[name].grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the method's state in tensors and plain types; the optimizer's is its own."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.iteration = int(state["iteration"])


#: Options of parameter groups that choose an implementation, not a direction.
_IMPLEMENTATION: dict[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
#: Optimizers of torch whose steps do not grow with the learning rate in proportion.
_WITHOUT_DIRECTION = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor)
#: Attributes of optimizers that follow real steps: learning rate schedulers replace ``step``, rules listen.
_FOLLOWERS = ("step", "add_param_group", "gradskip")


def step_direction(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the direction d of the step that the optimizer would take with these gradients: p becomes p - lr d.

    It is that of the optimizer's own `step`, executed on copies in double precision with a learning rate of 1: with
    momentum the buffer after the step, with Adam the quotient of its moments, weight decay included. Nothing of the
    optimizer is changed. UserError: its steps are not proportional to the learning rate.
    """
    if isinstance(optimizer, _WITHOUT_DIRECTION):
        raise UserError(
            "the optimizer's steps must be proportional to its learning rate, so that they have a direction, got "
            f"{type(optimizer).__name__}: use another, such as SGD or Adam"
        )
    names = {id(parameter): name for name, parameter in parameters.items() if name in gradients}
    groups, twins = [], {}
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            if id(parameter) in names:
                twin = nn.Parameter(_double(parameter.detach()).clone())
                twin.grad = _double(gradients[names[id(parameter)]]).clone()
                twins[parameter] = twin
                kept.append(twin)
        if kept:
            chosen = {key: value for key, value in _IMPLEMENTATION.items() if key in group}
            own = {key: value for key, value in group.items() if key not in ("param_names", "lr")}
            groups.append({**own, **chosen, "params": kept, "lr": 1.0})
    twin_optimizer = _twin(optimizer, groups, {id(parameter): twin for parameter, twin in twins.items()})
    for parameter, twin in twins.items():
        if optimizer.state.get(parameter):
            state = optimizer.state[parameter]
            twin_optimizer.state[twin] = {key: _copied(value, parameter) for key, value in state.items()}
    before = {parameter: twin.detach().clone() for parameter, twin in twins.items()}
    step = type(twin_optimizer).step
    # Without the hooks that torch wraps it in: some follow the steps of all optimizers.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin_optimizer)  # type: ignore[attr-defined]
    return {names[id(p)]: (before[p] - twin.detach()).to(p.dtype) for p, twin in twins.items()}


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]], twins: dict[int, Any]) -> Optimizer:
    """Return an optimizer of the same class and attributes for other parameters, without state, hooks and followers."""
    twin = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in (*_FOLLOWERS, "state", "param_groups") and not name.startswith("_optimizer_"):
            try:
                twin.__dict__[name] = copy.deepcopy(value, dict(twins))
            except Exception:  # noqa: BLE001  # what cannot be copied (a lock, a file) is no part of a direction
                twin.__dict__[name] = value
    twin.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    return twin


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _copied(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    # Counters and products of coefficients are rounded as in the real step.
    return (_double(value) if value.dim() or value.shape == parameter.shape else value).clone()


# --- A loss of a model as a function of named parameters: checked, repeatable, without side effects on the model

#: A loss: the model in, a scalar tensor out, regularization terms included.
Loss = Callable[[nn.Module], Tensor]


def matching_names(model: nn.Module, names: str | Iterable[str] | None) -> list[str]:
    """Return the names of a model's parameters that are meant, in the model's order, each by its first name.

    Names may be patterns (``conv*``, ``*.weight``); None stands for all parameters that require a gradient. UserError:
    a name matches nothing, or a parameter without floating-point numbers.
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


def scalar(loss: Any) -> Tensor:
    """Return what a loss gave; raise UserError for anything but a scalar tensor."""
    rule = "loss(model) must return a scalar tensor, got"
    if not isinstance(loss, Tensor):
        raise UserError(f"{rule} {type(loss).__name__}: leave its .item() out")
    if loss.ndim:
        raise UserError(f"{rule} shape {tuple(loss.shape)}: take its mean")
    if not loss.is_floating_point():
        raise UserError(f"loss(model) must return a floating-point number, got {loss.dtype}: add .float()")
    return loss


class ModelLoss:
    """The loss of a model, on one device and in its mode, at changed parameters; the model is left as it is."""

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if getattr(module, "max_norm", None) is not None:
                raise UserError(
                    f"{type(module).__name__} {name!r} must not write its weight in forward passes, got "
                    f"max_norm={module.max_norm}: build it without"
                )
        self._called = _Called(loss, model)
        self._parameters = dict(model.named_parameters())
        self.device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        norms = nn.modules.batchnorm._NormBase
        self._norms = [m for m in model.modules() if isinstance(m, norms) and m.training and m.track_running_stats]
        kept = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        self._buffers = [(f"model.{name}", buffer) for name, buffer in model.named_buffers() if id(buffer) not in kept]
        # All names of a parameter that is used in several places, by its first.
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[first[id(parameter)]].append(f"model.{name}")

    def at(self, changed: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with some parameters exchanged; buffers that the loss writes are copies."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers}
        parameters = {alias: value for name, value in changed.items() for alias in self._names[name]}
        return functional_call(self._called, {**buffers, **parameters}, (), tie_weights=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate without gradients, without moving a generator; batch norms in train mode keep their statistics.

        Every block begins with the same states of the generators, so that dropout is the same in all of them.
        """
        with torch.no_grad(), kept_generators([self.device]), _batch_statistics(self._norms):
            yield

    def value(self) -> Tensor:
        """Return the loss at the model's own parameters. UserError: it is not a scalar tensor."""
        with self.evaluating():
            found = self.at({})
        return scalar(found)

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
