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

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.model_loss import ModelLoss
from trainables.gradients.output_rows import OutputRows
from trainables.gradients.step_direction import step_direction
from trainables.runtime.generators import kept_generators, seed_generators
from trainables.workloads.base import Batch, Samples
from trainables.workloads.batch_shapes import shapes_of
from trainables.workloads.sample_access import samples_of, structured
from trainables.workloads.seeded_loader import epoch_seed

#: Gradients by parameter name.
Gradients = dict[str, Tensor]
#: Sets the process's generators to the state in which a pass begins.
Randomness = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Samples of one gradient."""

    batch: Batch
    """Tensors (B, ...) on the model's device."""
    randomness: Randomness
    """Sets the generators before a pass on them, so that dropout is the same in every pass."""
    numbers: Tensor | None = None
    """(B,) int64, their numbers in the data; None where the caller chose them."""
    weights: Tensor | None = None
    """(B,) weight of each sample's gradient in their mean; None: 1."""

    @property
    def size(self) -> int:
        """Return B."""
        return len(self.batch[0])


class GradientMethod:
    """Gradients of batches drawn uniformly, under any torch optimizer: SGD, SGD with momentum, Adam. Base of others.

        method = GradientMethod(model, loss, loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for _ in range(1000):
            method.step()

    Args:
        model: in the mode in which it is trained.
        loss: (model, batch) -> mean loss over the batch: a tuple of tensors, or the mapping that the data set yields.
        data: what `samples_of` takes.
        optimizer: turns gradients into steps; None: for measuring alone.
        batch_size: samples of a batch; None: the data's own.
        seed: of all draws.

    Raises:
        UserError: data without numbers, no parameter to train, or a batch size out of range.
    """

    #: Its name in statistics.
    name = "sgd"
    #: Whether its draws are others than SGD's: by its own knowledge of the samples, whose numbers it needs.
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
        if not 1 <= self.batch_size <= self.data.count:
            raise UserError(f"batch_size must be in 1..{self.data.count}, the samples there are, got {self.batch_size}")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
        first = next(iter(self.parameters.values()))
        self.device = first.device
        self._weight_type = torch.promote_types(first.dtype, torch.float32)
        self._unreached: set[str] = set()  # parameters without gradient in the last pass: a step does not move them
        self.meter = FlopMeter()
        self._evaluated: ModelLoss | None = None
        self._batch: Batch = ()
        self.iteration = 0
        """Steps so far."""

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
        if draw.weights is None:
            return nullcontext()
        weights = draw.weights
        return OutputRows(self.model, draw.size, lambda gradient: weights)

    def spared_flops(self, rows: Any) -> int:
        """Return the FLOPs that the backward pass in a block of `rows` has spared; none here."""
        return 0

    def gradient(self, draw: Draw) -> Gradients:
        """Return the method's estimate of the gradient from these samples, without side effects."""
        return self.adjust(self.plain_gradient(draw), draw)

    def plain_gradient(self, draw: Draw, at: Mapping[str, Tensor] | None = None) -> Gradients:
        """Return the mean of the samples' weighted gradients, without side effects.

        Args:
            draw: the samples.
            at: parameters by name in place of the model's own.
        """
        own = at is None
        with self.pass_on(draw) as evaluate:
            places = (
                {name: p for name, p in self.parameters.items() if p.requires_grad}  # others have stopped
                if at is None
                else {name: value.detach().requires_grad_(True) for name, value in at.items()}
            )
            with self.rows(draw) as rows:
                key = ("pass", shapes_of(draw.batch), tuple(places))
                with self.meter.forward(key):
                    loss = evaluate({} if own else places)
                with self.meter.backward(key, lambda: self.spared_flops(rows)):
                    found = torch.autograd.grad(loss, list(places.values()), allow_unused=True)
        reached = dict(zip(places, found, strict=True))
        if own:
            self._unreached = {name for name in self.parameters if reached.get(name) is None}
        return {
            name: torch.zeros_like(value) if reached.get(name) is None else reached[name]
            for name, value in (self.parameters if own else places).items()
        }

    def data_gradient(self, generator: torch.Generator) -> Gradients:
        """Return the mean gradient of all samples, in batches of a random order, without side effects."""
        total = {name: torch.zeros_like(parameter.detach()) for name, parameter in self.parameters.items()}
        order = torch.randperm(self.data.count, generator=generator)
        with self.unchanged_model():
            for numbers in order.split(self.batch_size):
                found = self.plain_gradient(self.drawn(numbers, generator))
                torch._foreach_add_(list(total.values()), list(found.values()), alpha=len(numbers) / self.data.count)
        return total

    @contextmanager
    def pass_on(self, draw: Draw) -> Iterator[Callable[[Mapping[str, Tensor]], Tensor]]:
        """Yield a function of changed parameters that returns the loss on a draw, without side effects."""
        evaluated = self._evaluated or ModelLoss(lambda model: self.loss(model, self._batch), self.model)
        self._batch = draw.batch
        with evaluated.evaluating(), torch.enable_grad():
            draw.randomness()
            yield evaluated.at
        self._batch = ()

    @contextmanager
    def unchanged_model(self) -> Iterator[None]:
        """Promise that the block changes neither the model nor its mode; passes inside then look at it only once."""
        self._evaluated = ModelLoss(lambda model: self.loss(model, self._batch), self.model)
        try:
            yield
        finally:
            self._evaluated = None

    def adjust(self, gradients: Gradients, draw: Draw) -> Gradients:
        """Return the method's estimate, given the mean of the samples' weighted gradients; without side effects."""
        return gradients

    def grad(self, generator: torch.Generator | None = None) -> Gradients:
        """Return the direction of a step, without side effects: parameters change by -lr times it.

        Args:
            generator: source of the samples; None: those of the next `step`.
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
        """Do what is due before this iteration at the cost of a pass over the data; nothing here."""

    def observe(self, draw: Draw, rows: Any) -> None:
        """Do what is due in this iteration at the cost of a gradient; nothing here.

        Args:
            draw: the step's samples.
            rows: what the block of `rows` was entered as.
        """

    def step(self) -> Tensor:
        """Execute one training step and return its loss on the drawn samples, detached.

        Raises:
            UserError: the method was built without an optimizer.
        """
        if self.optimizer is None:
            raise UserError("a step needs an optimizer, got None: give one, such as torch.optim.SGD(...)")
        self.refresh()
        draw = self.draw(self.generator())
        self.optimizer.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            # Dropout goes on from the draw's own seed, as it does where `grad` measures.
            stack.enter_context(kept_generators([self.device]))
            draw.randomness()
            rows = stack.enter_context(self.rows(draw))
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
        return {"iteration": self.iteration, **self.extra_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.iteration = int(state["iteration"])
        self.load_extra_state(state)

    def extra_state(self) -> dict[str, Any]:
        """Return what a subclass keeps beside the iteration."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `extra_state` returned."""
