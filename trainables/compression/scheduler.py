"""Compression scheduler: runs a schedule's policies from the callbacks of a training loop.

docs/compression.md has a loop with all calls in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainables.compression.distillation import KnowledgeDistillationPolicy
from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.masks import Masks
from trainables.compression.policies import (
    DistillationPolicy,
    Policy,
    PruningPolicy,
    QuantizationPolicy,
    RegularizationPolicy,
    Scheduled,
    ThinningPolicy,
    Training,
    build_policies,
    model_facts,
)
from trainables.compression.pruners import Pruner
from trainables.compression.quantizers import Quantizer
from trainables.compression.regularizers import Regularizer
from trainables.compression.schedule import ModelFacts, Schedule, read_marks, read_schedule, resolve
from trainables.compression.schedule.reading import check_marks
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.thinning import thin_again
from trainables.config import TrialConfig
from trainables.errors import UserError, check_model_first
from trainables.runtime.isolation import isolated
from trainables.workloads import build

T = TypeVar("T")


class CompressionScheduler:
    """Run policies over the epochs of one training run.

    Args:
        model: the trained model.
        schedule: a result or an argument of `read_schedule` (a file's name, YAML, a mapping); None: policies are added
            with `add_policy`. In its place may be the optimizer.
        optimizer: needed for learning rates, quantization and thinning.
        seed: of all random numbers.
        compatible: accept what the original silently accepted, with a warning for each.
        make_model: builds another model of this architecture, for a teacher with the student's architecture.
        base_lrs: base learning rate of each parameter group; by default ``initial_lr``, or the current rates.
        example: runs a model on a batch, needed if batch norms are folded before ranking.
        before_change: called once, before the model is changed or gets hooks.
        model_changed: called after modules or shapes have changed.

    UserError: the schedule is invalid, or has names that the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule | Mapping[str, Any] | str | Path | Optimizer | None = None,
        optimizer: Optimizer | None = None,
        *,
        seed: int = 0,
        compatible: bool = False,
        make_model: Callable[[], nn.Module] | None = None,
        base_lrs: Sequence[float] | None = None,
        example: Callable[[nn.Module], object] | None = None,
        before_change: Callable[[], None] = lambda: None,
        model_changed: Callable[[], None] = lambda: None,
    ) -> None:
        check_model_first(model, "CompressionScheduler(model, schedule, optimizer)")
        if isinstance(schedule, Optimizer):
            schedule, optimizer = optimizer, schedule
        self.model = model
        self.masks = Masks(model)
        self.policies: list[Scheduled] = []
        self._before_change = before_change
        self._told = model_changed
        self.training = Training(
            model=model, masks=self.masks, optimizer=optimizer, example=example, model_changed=self._model_changed
        )
        self._components: dict[str, Any] = {}
        self._open: int | None = None
        self._place: tuple[int, int, int] | None = None  # of the batch that `batches` has yielded
        if schedule is not None:
            given: Any = schedule
            read = given if isinstance(given, Schedule) else read_schedule(given, compatible=compatible)
            self.policies, self._components = build_policies(
                model,
                optimizer,
                resolve(read, model_facts(model), compatible=compatible).schedule,
                seed=seed,
                make_model=make_model,
                base_lrs=base_lrs,
            )

    def batches(
        self, epoch: int, loader: Collection[T], metrics: Callable[[], Mapping[str, Any]] | None = None
    ) -> Iterator[T]:
        """Yield the batches of an epoch, around each of which everything else is called but `loss`.

        A loop that is left early ends the epoch.

        Args:
            epoch: number from 0.
            loader: has a length.
            metrics: evaluates after the last batch, for learning rates that depend on it (`on_epoch_end`).

        UserError: an optimizer is needed and there is none, or the loader's length is not that of its batches.
        """
        changing = any(isinstance(scheduled.policy, QuantizationPolicy | ThinningPolicy) for scheduled in self.policies)
        if changing and self.training.optimizer is None:
            raise UserError(
                "batches needs the optimizer, whose parameters quantizers and extensions change: "
                "CompressionScheduler(model, schedule, optimizer)"
            )
        if self._place is not None:
            raise UserError("batches of one scheduler must not be nested: end the other loop first")
        if not hasattr(loader, "__len__"):
            raise UserError(f"the loader must have a length, got {type(loader).__name__}: list(loader) has one")
        number, place = len(loader), (epoch, -1, 0)
        # Of every optimizer: the model's weights may be shared among several.
        before = register_optimizer_step_pre_hook(lambda *_: self.masks.restore())
        try:
            self.on_epoch_begin(epoch)
            for minibatch, batch in enumerate(loader):
                self._place = place = (epoch, minibatch, number)
                self.on_minibatch_begin(*place)
                try:
                    yield batch
                finally:  # also where the loop is left
                    self.on_minibatch_end(*place)
            if place[1] != number - 1:
                raise UserError(f"the loader's length must be that of its batches, got {number} for {place[1] + 1}")
        finally:
            before.remove()
            if self._place is place:
                self._place = None
                self.on_epoch_end(epoch, metrics=None if metrics is None else metrics())

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss of a batch of `batches` with what regularizers and distillers add."""
        if self._place is None:
            raise UserError("loss belongs to a batch of batches(epoch, loader): call it in that loop")
        return self.before_backward_pass(*self._place, loss)

    def add_policy(
        self,
        policy: Policy | KnowledgeDistillationPolicy | Pruner | Regularizer | Quantizer,
        epochs: Sequence[int] | None = None,
        starting_epoch: int = 0,
        ending_epoch: int = 1,
        frequency: int = 1,
    ) -> None:
        """Add a policy for the given epochs, or every ``frequency`` epochs of [starting_epoch, ending_epoch).

        A component stands for a policy without further arguments; a pruner's state is kept by its place.
        """
        timing = Timing(
            starting_epoch=starting_epoch,
            ending_epoch=ending_epoch,
            frequency=frequency,
            epochs=None if epochs is None else tuple(epochs),
        )
        component = None
        if isinstance(policy, KnowledgeDistillationPolicy):
            made = policy
            policy = DistillationPolicy(lambda: made)
        elif isinstance(policy, Pruner):
            component = f"added.{len(self.policies)}"
            self._components[component] = policy
            policy = PruningPolicy(policy)
        elif isinstance(policy, Regularizer):
            policy = RegularizationPolicy(policy)
        elif isinstance(policy, Quantizer):
            policy = QuantizationPolicy(policy)
        elif not isinstance(policy, Policy):
            raise UserError(f"a policy must be one, or a pruner, regularizer or quantizer, got {type(policy).__name__}")
        self.policies.append(Scheduled(policy=policy, timing=timing, component=component))

    def on_epoch_begin(self, epoch: int, optimizer: Optimizer | None = None, **_: Any) -> None:
        """Handle the start of an epoch."""
        self._use(optimizer)
        self._look(epoch)
        for policy, moment in self._active(epoch):
            policy.epoch_begin(self.training, moment)

    def on_minibatch_begin(
        self, epoch: int, minibatch_id: int, minibatches_per_epoch: int, optimizer: Optimizer | None = None
    ) -> None:
        """Prepare for the forward pass of a minibatch."""
        self._use(optimizer)
        if self._open != epoch:
            self._look(epoch)  # the run was resumed in the middle of the epoch
        active = self._active(epoch, minibatch_id, minibatches_per_epoch)
        for policy, moment in active:
            policy.minibatch_begin(self.training, moment)
        if any(isinstance(policy, PruningPolicy) for policy, _ in active):
            self.masks.apply(forward=True)

    def before_backward_pass(
        self,
        epoch: int,
        minibatch_id: int,
        minibatches_per_epoch: int,
        loss: Tensor,
        optimizer: Optimizer | None = None,
    ) -> Tensor:
        """Return the loss for the backward pass: each active policy modifies the result of the previous one."""
        for policy, _ in self._active(epoch):
            loss = policy.before_backward(self.training, loss)
        return loss

    def before_parameter_optimization(
        self, epoch: int, minibatch_id: int, minibatches_per_epoch: int, optimizer: Optimizer | None = None
    ) -> None:
        """Restore unmasked copies before the optimizer's step, which updates them instead of the masked weights."""
        self.masks.restore()

    def on_minibatch_end(
        self, epoch: int, minibatch_id: int, minibatches_per_epoch: int, optimizer: Optimizer | None = None
    ) -> None:
        """Handle the end of an optimizer step; masks are applied in every epoch, also after their policies end."""
        self._use(optimizer)
        active = self._active(epoch, minibatch_id, minibatches_per_epoch)
        for policy, moment in active:
            policy.after_step(self.training, moment)
        self.masks.apply(forward=False)
        for policy, moment in active:
            policy.minibatch_end(self.training, moment)

    def on_epoch_end(
        self, epoch: int, optimizer: Optimizer | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Handle the end of an epoch, after its evaluation.

        ``metrics`` are ``min``, a loss, and ``max``, an accuracy, for learning rates that depend on them.
        """
        self._use(optimizer)
        for policy, moment in self._active(epoch):
            policy.epoch_end(self.training, moment, metrics or {})
        self.close()

    def apply_masks(self) -> None:
        """Apply all masks to the weights now."""
        self.masks.apply(forward=True)

    def state_dict(self) -> dict[str, Any]:
        """Return masks, state of components and policies, and removed structures, in plain types and tensors.

        To load, call `prepare_structure` on a scheduler of a freshly built model, load the model's and the optimizer's
        state, then call `load_state_dict`. Policies that have not acted have no state, so that schedules with different
        later policies can continue from the same state.
        """
        used = [s.component for s in self.policies if s.has_acted and s.component is not None]
        return {
            "masks": self.masks.state_dict(),
            "components": {name: self._components[name].state_dict() for name in dict.fromkeys(used)},
            "policies": {str(place): s.policy.state_dict() for place, s in enumerate(self.policies) if s.has_acted},
            "removed": self.training.removed,
        }

    def prepare_structure(self, state: Mapping[str, Any]) -> None:
        """Prepare quantizers and remove structures on a freshly built model to match a saved state."""
        for place, kept in state["policies"].items():
            policy = self.policies[int(place)].policy
            if isinstance(policy, QuantizationPolicy) and kept["prepared"]:
                self._change()
                policy.prepare(self.training)
        if state["removed"]:
            self._change()
            for record in state["removed"]:
                thin_again(self.model, record, self.training.optimizer)
            self.training.removed = list(state["removed"])
            self.masks.rebind(self.model)
            self._model_changed()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the model must have its weights and structure already."""
        self.masks.load_state_dict(state["masks"])
        for name, kept in state["components"].items():
            self._components[name].load_state_dict(kept)
        for place, kept in state["policies"].items():
            self.policies[int(place)].has_acted = True
            self.policies[int(place)].policy.load_state_dict(kept)
        self._open = None

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Disable the components' hooks while other code copies or runs the model."""
        looking = [scheduled for scheduled in self.policies if scheduled.is_looking]
        for scheduled in looking:
            scheduled.policy.look_away()
        try:
            yield
        finally:
            for scheduled in looking:
                scheduled.policy.look(self.training)

    def close(self) -> None:
        """Remove all hooks from the model until the next epoch begins."""
        for scheduled in self.policies:
            if scheduled.is_looking:
                scheduled.policy.look_away()
                scheduled.is_looking = False
        self._open = None

    def _active(self, epoch: int, minibatch: int = 0, per_epoch: int = 1) -> list[tuple[Policy, Moment]]:
        return [
            (s.policy, Moment(epoch=epoch, timing=s.timing, minibatch=minibatch, minibatches_per_epoch=per_epoch))
            for s in self.policies
            if s.timing.is_active(epoch)
        ]

    def _use(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None:
            self.training.optimizer = optimizer

    def _look(self, epoch: int) -> None:
        self.close()  # start observing with the components that need this epoch alone
        for scheduled in self.policies:
            if scheduled.looks_in(epoch):
                self._change()
                scheduled.policy.look(self.training)
                scheduled.is_looking = scheduled.has_acted = True
        self._open = epoch

    def _change(self) -> None:
        tell, self._before_change = self._before_change, lambda: None
        tell()

    def _model_changed(self) -> None:
        with self.unhooked():  # hooks are installed again, since parameters may be new objects
            self._told()


def facts_of_run(base: TrialConfig) -> ModelFacts:
    """Return the facts of a run's model that a schedule is checked against; nothing is trained."""
    workload = build(base.workload, base.options)
    with isolated(seed=base.seed, threads=base.threads):
        return model_facts(workload.make_model())


def check_on_model(
    schedule: Mapping[str, Any],
    base: TrialConfig,
    file: Path | None = None,
    *,
    compatible: bool = False,
    every_mark: bool = False,
) -> None:
    """Build everything that a plain schedule describes once, on the model of a run; nothing is trained.

    Problems with names are reported with the lines of the file from which a part of the schedule was read. With
    ``every_mark`` all choices of the file's marks, and both ends of their ranges, must fit. UserError: the schedule is
    invalid, does not fit the model, or its teacher cannot be built.
    """
    workload = build(base.workload, base.options)
    with isolated(seed=base.seed, threads=base.threads):
        model = workload.make_model()
        if file is not None:
            marked = read_marks(file)
            read = marked.read(marked.middles(), compatible=compatible, check_lr=check_lr_scheduler)
            resolve(read, model_facts(model), compatible=compatible)
            if every_mark:
                check_marks(marked, model_facts(model), compatible=compatible, check_lr=check_lr_scheduler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = CompressionScheduler(
            model, schedule, optimizer, seed=base.seed, compatible=compatible, make_model=workload.make_model
        )
        for scheduled in scheduler.policies:
            if isinstance(scheduled.policy, DistillationPolicy):
                scheduled.policy.look(scheduler.training)
