"""Gradient-Skip attached to a torch optimizer: what surrounds its own step.

torch's step stays untouched, foreach and fused paths included. A hook before it asks the state machine what this
step does and, while a layer brakes, splits the parameter groups so that the braking parameters have their own
learning rate; a hook after it puts the groups back and lets the stopped parameters go. With nothing to do the two
hooks are a counter and two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.machine import SkipMachine, StepPlan
from trainables.gradskip.rules import make_rule
from trainables.gradskip.settings import Settings

#: The key under which an optimizer's ``state_dict()`` carries the rule's state.
STATE_KEY = "gradskip"


@dataclass(frozen=True, kw_only=True)
class StopEvent:
    """One stop decision."""

    iteration: int
    """Optimizer steps before the one that decided, from 0."""
    layer: int
    """Index of the parameter; it and every one before it stop."""
    name: str | None
    """The parameter's name, where the optimizer was given named parameters."""
    ratio: float | None
    """Weight variance over its peak; None in manual mode."""
    rule: str
    """``start``, ``mountain``, ``slope`` or ``manual``."""


def watched_layers(parameters: Sequence[Tensor]) -> list[int]:
    """Indices of the parameters that the auto rule watches: convolution weights, which are 4-D, as published."""
    return [index for index, parameter in enumerate(parameters) if parameter.dim() == 4]


class GradientSkip:
    """The record and the control of Gradient-Skip on one optimizer.

    Args:
        optimizer: a torch optimizer whose update is linear in its group's ``lr``. Parameters are numbered in the
            order in which they were given to it, through all groups.
        settings: None reads the ``CAC_*`` variables now.

    Raises:
        UserError: invalid settings, or a layer number past the last parameter.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings | None = None) -> None:
        self.optimizer = optimizer
        self.settings = Settings.from_environment() if settings is None else settings
        self.events: list[StopEvent] = []
        self._plan: StepPlan | None = None
        self._groups_to_restore: list[dict[str, Any]] | None = None
        self._decision_lrs: list[Any] = []
        self._bind()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, STATE_KEY: self.state_dict()})
        optimizer.register_load_state_dict_post_hook(lambda _: self._load_pending())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._remember(state))
        self._pending: dict[str, Any] | None = None

    def _bind(self) -> None:
        groups = self.optimizer.param_groups
        self.parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        self.names: list[str] | None = None
        if all("param_names" in group for group in groups):
            self.names = [name for group in groups for name in group["param_names"]]
        self.settings.check_layers(len(self.parameters))
        self._ours: set[int] = set()  # indices whose requires_grad we switched off
        double = any(p.dtype == torch.float64 for p in self.parameters)
        rule = make_rule(self.settings, watched_layers(self.parameters), single_precision=not double)
        self.machine = SkipMachine(self.settings, rule)
        self._quiet_until = self.machine.quiet_until()

    @property
    def stopped_through(self) -> int:
        """Index of the last stopped parameter; -1 for none."""
        return self.machine.stopped_through

    @property
    def iteration(self) -> int:
        """Optimizer steps so far."""
        return self.machine.iteration

    def _variance(self, index: int) -> float:
        weight = self.parameters[index].detach()
        if not self.settings.reference and weight.dtype in (torch.float16, torch.bfloat16):
            weight = weight.float()  # 8 bits of mantissa cannot tell a ratio of 0.98 from 1
        return float(torch.var(weight))

    def _before_step(self, *_: Any) -> None:
        if self.machine.iteration < self._quiet_until:  # nothing stopped, braking or due: count and go
            self.machine.iteration += 1
            return
        if self._plan is not None:  # the step before raised, so its hook after never ran
            self._after_step()
        if self.stopped_through >= 0 and not self.settings.reference:
            self._drop_gradients()
        plan = self._plan = self.machine.step(self._variance)
        self._quiet_until = self._next_busy()
        if plan.decision is not None:
            layer = plan.decision.layer
            self.events.append(
                StopEvent(
                    iteration=self.machine.iteration - 1,
                    layer=layer,
                    name=None if self.names is None else self.names[layer],
                    ratio=plan.decision.ratio,
                    rule=plan.decision.rule,
                )
            )
            self._decision_lrs = [_plain(group["lr"]) for group in self.optimizer.param_groups]
        if plan.braking is not None or (self.settings.reference and self._holds_stopped()):
            self._split_groups(plan)

    def _next_busy(self) -> int:
        # Once layers are stopped every step looks after them, so no step is quiet.
        return self.machine.quiet_until() if self.stopped_through < 0 else 0

    def _holds_stopped(self) -> bool:
        # Published: with a braking distance, stopped layers step with a factor of 0 for ever after.
        return self.machine.distance > 0 and self.machine.stopped_through >= 0

    def _after_step(self, *_: Any) -> None:
        if self._plan is None:
            return
        if self._groups_to_restore is not None:
            self._restore_groups()
        plan, self._plan = self._plan, None
        if plan.stop_through is not None:
            self._stop(plan.stop_through)

    def _split_groups(self, plan: StepPlan) -> None:
        """Give braking parameters groups of their own for one step, with their learning rate multiplied."""
        groups = self.optimizer.param_groups
        braking = plan.braking if plan.braking is not None else range(0)
        split: list[dict[str, Any]] = []
        index = 0
        for group, decision_lr in zip(groups, self._decision_lrs, strict=True):
            parts: dict[str, list[Tensor]] = {"held": [], "braking": [], "free": []}
            for parameter in group["params"]:
                part = "free"
                if index in braking:
                    part = "braking"
                elif self.settings.reference and index <= self.machine.stopped_through:
                    part = "held"
                parts[part].append(parameter)
                index += 1
            base = decision_lr if self.settings.reference else group["lr"]
            for part, lr in (("held", base * 0.0), ("braking", base * plan.factor), ("free", group["lr"])):
                if parts[part]:
                    split.append({**group, "params": parts[part], "lr": lr})
        self._groups_to_restore = groups
        self.optimizer.param_groups = split

    def _restore_groups(self) -> None:
        assert self._groups_to_restore is not None
        self.optimizer.param_groups = self._groups_to_restore
        self._groups_to_restore = None

    def _stop(self, through: int) -> None:
        for index in range(through + 1):
            parameter = self.parameters[index]
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._ours.add(index)
            if not self.settings.reference:
                parameter.grad = None
                self.optimizer.state.pop(parameter, None)  # momentum of a layer that never moves again

    def _drop_gradients(self) -> None:
        # A backward pass through a graph built before the stop (gradient accumulation, a retained graph) still
        # reaches stopped parameters.
        for parameter in self.parameters[: self.stopped_through + 1]:
            if parameter.grad is not None:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The whole rule's state in plain types (``torch.load(weights_only=True)`` reads them)."""
        return {
            "machine": self.machine.state_dict(),
            "events": [asdict(event) for event in self.events],
            "decision_lrs": list(self._decision_lrs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: iteration, peaks, braking; parameters stop or train again accordingly."""
        self.machine.load_state_dict(state["machine"])
        if self.stopped_through >= len(self.parameters):
            raise UserError(
                f"the state to load has parameters 0..{self.stopped_through} stopped, but this optimizer has "
                f"{len(self.parameters)}: load it into the model that it was saved from"
            )
        self._quiet_until = self._next_busy()
        self.events = [StopEvent(**event) for event in state["events"]]
        self._decision_lrs = list(state["decision_lrs"])
        for index in list(self._ours):
            if index > self.stopped_through:
                self.parameters[index].requires_grad_(True)
                self._ours.discard(index)
        self._stop(self.stopped_through)

    def _remember(self, state: dict[str, Any]) -> None:
        self._pending = state.get(STATE_KEY)

    def _load_pending(self) -> None:
        # A state without ours (saved by torch's own optimizer) leaves the rule as it is.
        if self._pending is not None:
            self.load_state_dict(self._pending)
        self._pending = None


def _plain(lr: Any) -> Any:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr
