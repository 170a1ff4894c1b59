"""Learning-rate schedules by class name: torch's, and two of the schedule language, which docs/compression.md defines.

A schedule is set to an absolute epoch: if its policy begins at epoch 24, its learning rate is that of a schedule which
has run from epoch 0. All schedules of an optimizer start from the same base rates, the groups' learning rates before
any schedule (``initial_lr``). torch's `PolynomialLR` (total_iters, power) is another class than the language's; the
argument ``T_max`` selects that one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainables.compression.schedule.configs import check_arguments
from trainables.errors import UserError, unknown_name

#: Classes of torch whose arguments cannot be given as text.
_NOT_IN_TEXT = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")
#: Classes of torch that a schedule can name, including `PolynomialLR`.
_TORCHS: dict[str, type[LRScheduler]] = {
    name: kind
    for name, kind in vars(torch_schedulers).items()
    if inspect.isclass(kind) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    if not name.startswith("_") and name not in _NOT_IN_TEXT
}


class _PolynomialLR(LambdaLR):
    """Decay to 0 at T_max, from which on the formula has no real value or grows again."""

    def __init__(self, optimizer: Optimizer, T_max: int, power: float) -> None:  # noqa: N803  # the schedule's name
        super().__init__(optimizer, lambda epoch: (1 - min(epoch, T_max) / T_max) ** power)


class _MultiStepMultiGammaLR(LambdaLR):
    """One gamma for each milestone, which must ascend."""

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gammas: Sequence[float]) -> None:
        if list(milestones) != sorted(set(milestones)):
            raise UserError(f"milestones of MultiStepMultiGammaLR must ascend, got {list(milestones)}")
        if len(milestones) != len(gammas):
            raise UserError(
                f"MultiStepMultiGammaLR needs one gamma for each milestone, got {len(gammas)} gammas for "
                f"{len(milestones)} milestones"
            )
        steps = list(zip(milestones, gammas, strict=True))
        super().__init__(optimizer, lambda epoch: math.prod(gamma for milestone, gamma in steps if milestone <= epoch))


_OURS: dict[str, type[LRScheduler]] = {"PolynomialLR": _PolynomialLR, "MultiStepMultiGammaLR": _MultiStepMultiGammaLR}


class ScheduleLR:
    """Set the learning rates of an optimizer's groups to those of an absolute epoch.

    Groups that are added to the optimizer later are left alone. The class runs on a separate optimizer: in closed form
    if torch has one, else stepped to the epoch. `ReduceLROnPlateau` counts calls, whatever their epochs.
    """

    def __init__(
        self, optimizer: Optimizer, kind: type[LRScheduler], arguments: Mapping[str, Any], base_rates: Sequence[float]
    ) -> None:
        self.optimizer = optimizer
        self.metric: Literal["min", "max"] | None = None
        """Kind of metric that `step_to` needs: ``min``, a loss to minimize, or ``max``, an accuracy to maximize."""
        if kind is ReduceLROnPlateau:
            self.metric = "max" if arguments.get("mode") == "max" else "min"
        self._class_name, self._kind, self._arguments = kind.__name__.removeprefix("_"), kind, dict(arguments)
        self._base_rates = list(map(float, base_rates))
        self._begin(self._base_rates)

    def step_to(self, epoch: int, metric: float | None = None) -> None:
        """Set the learning rates to those of this epoch, in any order, given its loss or accuracy if needed.

        UserError: the schedule ends before this epoch (OneCycleLR).
        """
        self._move(epoch, metric)
        cycles = getattr(self._scheduler, "cycle_momentum", False)
        for group, values in zip(self.optimizer.param_groups, self._scratch.param_groups, strict=False):
            if isinstance(group["lr"], Tensor):  # a compiled or captured optimizer keeps a reference
                group["lr"].fill_(float(values["lr"]))
            else:
                group["lr"] = float(values["lr"])
            if cycles and "betas" in values:
                group["betas"] = (values["betas"][0], *group["betas"][1:])
            elif cycles:
                group["momentum"] = values["momentum"]

    def _begin(self, rates: Sequence[float]) -> None:
        self._scratch = _Scratch(self.optimizer, rates)
        try:
            self._scheduler = self._kind(self._scratch, **self._arguments)
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"{self._class_name} refuses its arguments: {error}") from error

    def _move(self, epoch: int, metric: float | None) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            assert metric is not None
            self._scheduler.step(metric)
            return
        closed_form = getattr(self._scheduler, "_get_closed_form_lr", None)
        if closed_form is not None:
            self._scheduler.last_epoch = epoch
            for group, rate in zip(self._scratch.param_groups, closed_form(), strict=True):
                group["lr"] = rate
            return
        if epoch < self._scheduler.last_epoch:
            self._begin(self._base_rates)
        while self._scheduler.last_epoch < epoch:
            self._scratch.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                self._begin(self._base_rates)
                raise UserError(f"{self._class_name} has no epoch {epoch}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the base rates; with `ReduceLROnPlateau` also the current rates and torch's counters."""
        state: dict[str, Any] = {"base_rates": list(self._base_rates)}
        if isinstance(self._scheduler, ReduceLROnPlateau):
            state["rates"] = [float(group["lr"]) for group in self._scratch.param_groups]
            memory = ("best", "num_bad_epochs", "cooldown_counter")
            state["counters"] = {name: getattr(self._scheduler, name) for name in memory}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._base_rates = [float(rate) for rate in state["base_rates"]]
        self._begin([float(rate) for rate in state.get("rates", self._base_rates)])
        for name, value in state.get("counters", {}).items():
            setattr(self._scheduler, name, value)


class _Scratch(Optimizer):
    """An optimizer of untrained scalars with another optimizer's momentum settings, on which torch's schedules run.

    On the real optimizer they would overwrite each other's base rates, and the optimizer's `step`.
    """

    def __init__(self, like: Optimizer, rates: Sequence[float]) -> None:
        kept = {key: value for key, value in like.defaults.items() if key in ("momentum", "betas")}
        super().__init__([{"params": [torch.zeros(())], "lr": rate} for rate in rates], {"lr": 0.0, **kept})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it overloads
        """Do nothing; torch's schedules expect this call before their own step."""


def build_lr_scheduler(
    class_name: str, arguments: Mapping[str, Any], optimizer: Optimizer, *, base_lrs: Sequence[float] | None = None
) -> ScheduleLR:
    """Build the schedule of this class; it changes no learning rate before its first `ScheduleLR.step_to`.

    ``base_lrs`` are one base rate per parameter group; by default the groups' ``initial_lr``, or their current rates if
    no torch schedule has set it. UserError as of `check_lr_scheduler`, or if the schedule changes the momentum of an
    optimizer without one.
    """
    if class_name in _NOT_IN_TEXT:
        raise UserError(
            f"{class_name} needs functions or other schedules, which a schedule's text cannot hold: use another "
            "class, and a policy for each part of the time"
        )
    classes = {**_TORCHS, **_OURS} if "T_max" in arguments else {**_OURS, **_TORCHS}
    if class_name not in classes:
        raise unknown_name("class of lr_schedulers", class_name, classes)
    check_arguments(class_name, arguments, classes[class_name])
    if base_lrs is None:
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.setdefault("initial_lr", rate.clone() if isinstance(rate, Tensor) else rate)
        base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    return ScheduleLR(optimizer, classes[class_name], arguments, base_lrs)


def check_lr_scheduler(class_name: str, arguments: Mapping[str, Any]) -> None:
    """Check that the schedule's class exists and accepts these arguments, for an optimizer with momentum.

    UserError: the class or an argument is unknown, or an argument is missing, of another type or out of its range.
    """
    per_group = ("min_lr", "max_lr", "base_lr", "base_momentum", "max_momentum")
    lists = [arguments[key] for key in per_group if isinstance(arguments.get(key), (list, tuple))]
    parameters = [{"params": [torch.zeros(())]} for _ in range(max([1, *map(len, lists)]))]
    build_lr_scheduler(class_name, arguments, torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
