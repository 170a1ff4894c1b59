"""Learning-rate schedules by class name: torch's, and two of the schedule language.

A schedule is set to an absolute epoch: if its policy begins at epoch 24, its learning rate is that of a schedule which
has run from epoch 0. All schedules of an optimizer start from the same base rates.

Symbols: e epoch, >= 0; base the group's learning rate before any schedule (``initial_lr``).

    PolynomialLR(T_max, power)                base (1 - e / T_max)^power, and 0 from T_max on
    MultiStepMultiGammaLR(milestones, gammas) base times the product of the gammas whose milestones are <= e

torch's `PolynomialLR` (total_iters, power) is a different class; the argument ``T_max`` selects the one above.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainables.compression.schedule.lr_arguments import check_arguments, signatures
from trainables.errors import UserError, unknown_name

#: Returns the factor of the base rates in an epoch.
Factor = Callable[[int], float]

#: Classes of torch whose arguments cannot be given as text.
_NOT_IN_TEXT = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")


def polynomial_factor(T_max: int, power: float) -> Factor:  # noqa: N803  # the schedule's name
    """Return the factor (1 - e / T_max)^power, 0 from T_max on, where the formula has no real value or grows again."""
    return lambda epoch: (1 - min(epoch, T_max) / T_max) ** power


def multi_gamma_factor(milestones: Sequence[int], gammas: Sequence[float]) -> Factor:
    """Return the factor that is the product of the gammas whose milestones are reached.

    Raises:
        UserError: the milestones do not ascend, or there are not as many milestones as gammas.
    """
    if list(milestones) != sorted(set(milestones)):
        raise UserError(f"milestones of MultiStepMultiGammaLR must ascend, got {list(milestones)}")
    if len(milestones) != len(gammas):
        raise UserError(
            f"MultiStepMultiGammaLR needs one gamma for each milestone, got {len(gammas)} gammas for "
            f"{len(milestones)} milestones"
        )
    return lambda epoch: math.prod(g for milestone, g in zip(milestones, gammas, strict=True) if milestone <= epoch)


_OURS: dict[str, Callable[..., Factor]] = {
    "PolynomialLR": polynomial_factor,
    "MultiStepMultiGammaLR": multi_gamma_factor,
}


class ScheduleLR(ABC):
    """Set the learning rates of an optimizer's groups to those of an absolute epoch.

    Groups that are added to the optimizer later (learned clips of a quantizer) use the first group's factor. If the
    schedule also changes the momentum (CyclicLR, OneCycleLR), it does so only for the initial groups.

    Args:
        optimizer: its groups get an ``initial_lr`` if they have none, as with torch's schedules.
        base_lrs: base rates of the groups, if not ``initial_lr``.
    """

    metric: Literal["min", "max"] | None = None
    """Kind of metric that `step_to` needs: ``min``, a loss to minimize, or ``max``, an accuracy to maximize."""

    def __init__(self, optimizer: Optimizer, base_lrs: Sequence[float] | None = None) -> None:
        groups = optimizer.param_groups
        self.optimizer = optimizer
        self._base_rates = [_base_rate(group) for group in groups] if base_lrs is None else list(map(float, base_lrs))
        self._own_groups = len(self._base_rates)
        if self._own_groups != len(groups):
            raise ValueError(f"base_lrs must hold one rate a parameter group, got {self._own_groups} for {len(groups)}")

    def step_to(self, epoch: int, metric: float | None = None) -> None:
        """Set the learning rates to those of this epoch.

        Args:
            epoch: >= 0, in any order.
            metric: the epoch's loss or accuracy if `metric` requires it.

        Raises:
            UserError: the schedule ends before this epoch (OneCycleLR).
        """
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        found = self._at(epoch, metric)
        groups = self.optimizer.param_groups
        self._base_rates += [_base_rate(group) for group in groups[len(self._base_rates) :]]
        factor = found[0]["lr"] / self._base_rates[0] if self._base_rates[0] else 1.0
        later = [{"lr": factor * base} for base in self._base_rates[self._own_groups :]]
        for group, values in zip(groups, found + later, strict=False):
            for key, value in values.items():
                _put(group, key, value)

    @abstractmethod
    def _at(self, epoch: int, metric: float | None) -> list[dict[str, float]]:
        """Return the new ``lr`` and optionally ``momentum`` or first of ``betas`` for each initial group."""

    def state_dict(self) -> dict[str, Any]:
        """Return the base rates; rates that depend only on the epoch need no state."""
        return {"base_rates": list(self._base_rates), "own_groups": self._own_groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._base_rates = [float(rate) for rate in state["base_rates"]]
        self._own_groups = int(state["own_groups"])


class _FactorLR(ScheduleLR):
    """A schedule of this module: base rates times a function of the epoch."""

    def __init__(self, optimizer: Optimizer, base_lrs: Sequence[float] | None, factor: Factor) -> None:
        super().__init__(optimizer, base_lrs)
        self._factor = factor

    def _at(self, epoch: int, metric: float | None) -> list[dict[str, float]]:
        return [{"lr": base * self._factor(epoch)} for base in self._base_rates[: self._own_groups]]


class _TorchLR(ScheduleLR):
    """A torch schedule on a separate optimizer: in closed form if torch has one, else stepped to the epoch."""

    def __init__(
        self,
        optimizer: Optimizer,
        base_lrs: Sequence[float] | None,
        kind: type[LRScheduler],
        arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(optimizer, base_lrs)
        self._kind = kind
        self._arguments = dict(arguments)
        self._begin()

    def _begin(self) -> None:
        """Create the schedule at epoch 0."""
        self._scratch = _Scratch(self.optimizer, self._base_rates[: self._own_groups])
        try:
            self._scheduler = self._kind(self._scratch, **self._arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self._kind.__name__} refuses its arguments: {error}") from error

    def _at(self, epoch: int, metric: float | None) -> list[dict[str, float]]:
        closed_form = getattr(self._scheduler, "_get_closed_form_lr", None)
        if closed_form is not None:
            self._scheduler.last_epoch = epoch
            return [{"lr": float(rate)} for rate in closed_form()]
        if epoch < self._scheduler.last_epoch:
            self._begin()
        while self._scheduler.last_epoch < epoch:
            self._scratch.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                self._begin()
                raise UserError(f"{self._kind.__name__} has no epoch {epoch}: {error}") from error
        return [self._moved(group) for group in self._scratch.param_groups]

    def _moved(self, group: Mapping[str, Any]) -> dict[str, float]:
        moved = {"lr": float(group["lr"])}
        if getattr(self._scheduler, "cycle_momentum", False):
            if "betas" in group:
                moved["betas"] = float(group["betas"][0])
            else:
                moved["momentum"] = float(group["momentum"])
        return moved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._begin()


class _PlateauLR(ScheduleLR):
    """torch's ReduceLROnPlateau: counts calls, whatever their epochs."""

    def __init__(self, optimizer: Optimizer, base_lrs: Sequence[float] | None, arguments: Mapping[str, Any]) -> None:
        super().__init__(optimizer, base_lrs)
        self._arguments = dict(arguments)
        self.metric = "max" if arguments.get("mode") == "max" else "min"
        self._begin(self._base_rates)

    def _begin(self, rates: Sequence[float]) -> None:
        self._scratch = _Scratch(self.optimizer, rates)
        try:
            self._scheduler = ReduceLROnPlateau(self._scratch, **self._arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"ReduceLROnPlateau refuses its arguments: {error}") from error

    def _at(self, epoch: int, metric: float | None) -> list[dict[str, float]]:
        if metric is None:
            raise ValueError(f"ReduceLROnPlateau needs the epoch's {'accuracy' if self.metric == 'max' else 'loss'}")
        self._scheduler.step(metric)
        return [{"lr": float(group["lr"])} for group in self._scratch.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the base rates, the current rates, and torch's counters."""
        seen = self._scheduler
        return {
            **super().state_dict(),
            "rates": [float(group["lr"]) for group in self._scratch.param_groups],
            "best": float(seen.best),
            "bad_epochs": seen.num_bad_epochs,
            "cooldown": seen.cooldown_counter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._begin([float(rate) for rate in state["rates"]])
        self._scheduler.best = float(state["best"])
        self._scheduler.num_bad_epochs = int(state["bad_epochs"])
        self._scheduler.cooldown_counter = int(state["cooldown"])


class _Scratch(Optimizer):
    """An optimizer of untrained scalars with another optimizer's momentum settings, on which torch's schedules run.

    On the real optimizer they would overwrite each other's base rates, and the optimizer's `step`.
    """

    def __init__(self, like: Optimizer, rates: Sequence[float]) -> None:
        kept = {key: value for key, value in like.defaults.items() if key in ("momentum", "betas")}
        super().__init__([{"params": [torch.zeros(())], "lr": rate} for rate in rates], {"lr": 0.0, **kept})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it overloads
        """Do nothing; torch's schedules expect this call before their own step."""


def scheduler_classes() -> dict[str, type[LRScheduler]]:
    """Return torch's schedule classes that a schedule can name, including `PolynomialLR`, by name."""
    return {
        name: kind
        for name, kind in vars(torch_schedulers).items()
        if inspect.isclass(kind)
        and issubclass(kind, LRScheduler)
        and kind is not LRScheduler
        and not name.startswith("_")
        and name not in _NOT_IN_TEXT
    }


def build_lr_scheduler(
    class_name: str, arguments: Mapping[str, Any], optimizer: Optimizer, *, base_lrs: Sequence[float] | None = None
) -> ScheduleLR:
    """Build the schedule of this class; it changes no learning rate before its first `ScheduleLR.step_to`.

    Args:
        class_name: of `scheduler_classes`, or of this module.
        arguments: the class's arguments, without ``optimizer`` and ``last_epoch``.
        optimizer: the optimizer whose rates are set.
        base_lrs: one base rate per parameter group. None: the groups' ``initial_lr``, or their current rates if no
            torch schedule has set it.

    Raises:
        UserError: as `check_lr_scheduler`, or the optimizer has no momentum and the schedule changes it.
    """
    make = _constructor(class_name, arguments)
    if make is ReduceLROnPlateau:
        return _PlateauLR(optimizer, base_lrs, arguments)
    if isinstance(make, type):
        return _TorchLR(optimizer, base_lrs, make, arguments)
    return _FactorLR(optimizer, base_lrs, make(**arguments))


def check_lr_scheduler(class_name: str, arguments: Mapping[str, Any]) -> None:
    """Check that the schedule's class exists and accepts these arguments, for an optimizer with momentum.

    Raises:
        UserError: the class or an argument is unknown, or an argument is missing, of another type or out of its range.
    """
    _constructor(class_name, arguments)
    groups = max([1, *(len(value) for key, value in arguments.items() if key in _PER_GROUP and _is_list(value))])
    parameters = [{"params": [torch.zeros(())]} for _ in range(groups)]
    build_lr_scheduler(class_name, arguments, torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


#: Arguments that may be lists with one value per parameter group.
_PER_GROUP = ("min_lr", "max_lr", "base_lr", "base_momentum", "max_momentum")


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _constructor(class_name: str, arguments: Mapping[str, Any]) -> type[LRScheduler] | Callable[..., Factor]:
    """Return the class or function that builds this schedule, after checking its arguments."""
    known = scheduler_classes()
    if class_name in _NOT_IN_TEXT:
        raise UserError(
            f"{class_name} needs functions or other schedules, which a schedule's text cannot hold: use another "
            "class, and a policy for each part of the time"
        )
    if class_name not in {*known, *_OURS}:
        raise unknown_name("class of lr_schedulers", class_name, {*known, *_OURS})
    torchs, ours = known.get(class_name), _OURS.get(class_name)
    makes: list[type[LRScheduler] | Callable[..., Factor]] = [make for make in (torchs, ours) if make is not None]
    if torchs is not None and ours is not None:
        makes = [ours, torchs] if "T_max" in arguments else [torchs, ours]
    if {"T_max", "total_iters"} <= set(arguments) and len(makes) > 1:
        raise UserError(f"{class_name} takes T_max or total_iters: {signatures(class_name, makes)}")
    check_arguments(class_name, arguments, makes)
    return makes[0]


def _base_rate(group: dict[str, Any]) -> float:
    rate = group["lr"]
    return float(group.setdefault("initial_lr", rate.clone() if isinstance(rate, Tensor) else rate))


def _put(group: dict[str, Any], key: str, value: float) -> None:
    if key == "betas":
        group["betas"] = (value, *group["betas"][1:])
    elif isinstance(group[key], Tensor):  # a compiled or captured optimizer keeps a reference
        group[key].fill_(value)
    else:
        group[key] = value
