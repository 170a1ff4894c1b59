"""torch's optimizers with Gradient-Skip, and `wrap` for any other optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.settings import OFF, Settings  # noqa: F401 - in examples

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


#: Entry of a parameter group whose rates are scaled; copies and checkpoints keep it.
SCALED = "cac_lr_factor"


def scale_learning_rates(
    optimizer: Optimizer, factor: float, *, first: int = 0, schedulers: Iterable[Any] = (), check: bool = False
) -> None:
    """Multiply the learning rates of an optimizer's groups from the ``first`` on, and of schedulers made before, once.

    With ``check`` nothing is changed. UserError: a group has no learning rate, or a scheduler that is not given; a
    scheduler has rates of its own.
    """
    groups, every = optimizer.param_groups[first:], [one for given in schedulers for one in _with_inner(given)]
    if factor == 1 or all(group.get(SCALED) == factor for group in groups):
        return
    for group in groups:
        if group.get("lr") is None:
            kind = type(optimizer).__name__
            raise UserError(
                f"CAC_LR_FACTOR={factor:g} multiplies learning rates, of which {kind} has none: leave it out"
            )
        if "initial_lr" in group and not every:
            raise UserError(
                f"CAC_LR_FACTOR={factor:g} must come before the learning-rate scheduler, which has read the rates: "
                "make or wrap the optimizer first, or give wrap the scheduler"
            )
    for one in every:
        if "max_lr" in groups[0] or hasattr(one, "max_lrs"):
            raise UserError(
                f"CAC_LR_FACTOR={factor:g} multiplies an optimizer's rates, and {type(one).__name__} has its own: "
                "multiply those by hand, and leave it out"
            )
    if check:
        return
    for group in groups:
        group[SCALED] = factor
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    for one in every:
        if hasattr(one, "base_lrs"):  # not ReduceLROnPlateau, which multiplies what a group has
            one.base_lrs = [rate * factor for rate in one.base_lrs]


def _check_first_step(gradskip: GradientSkip) -> None:
    """Raise UserError in the first two steps if their learning rates are the unscaled ones, which the loop has written.

    Of other rates, such as those of a warm-up, nobody knows whether they begin with the optimizer's: that is warned of.
    """
    factor, optimizer = gradskip.settings.lr_factor, gradskip.optimizer
    scaled = [float(group["lr"]) for group in optimizer.param_groups]

    def check(*_: Any) -> None:
        if gradskip.iteration != 0:
            gradskip.before.remove(check)
            gradskip.refresh()
        now = [None if "initial_lr" in group else float(group["lr"]) for group in optimizer.param_groups]
        changed = [(one, rate) for one, rate in zip(now, scaled, strict=False) if one not in (None, rate)]
        way = 'set group["initial_lr"] = group["lr"] behind the optimizer, and let the loop write multiples of that'
        if gradskip.iteration < 2 and any(math.isclose(one, rate / factor, rel_tol=1e-9) for one, rate in changed):
            raise UserError(
                f"CAC_LR_FACTOR={factor:g} has no effect where the loop, or a loaded state, sets learning rates, got "
                f"{changed[0][0]:g} in place of {changed[0][1]:g}: leave it out, or {way}"
            )
        if gradskip.iteration == 0 and changed:
            gradskip.advice.say("rates", factor=factor, now=changed[0][0], scaled=changed[0][1], way=way)

    gradskip.before.append(check)
    gradskip.refresh()


def _with_inner(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        yield from _with_inner(inner)


def wrap(
    optimizer: AnyOptimizer,
    settings: Settings | None = None,
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    total_steps: int | None = None,
    schedulers: Iterable[Any] = (),
    named_in: nn.Module | None = None,
) -> AnyOptimizer:
    """Attach Gradient-Skip to an optimizer in place, and return the same object, with the attribute ``gradskip``.

    Its ``state_dict()`` includes the rule. Copies and pickles of the optimizer itself do not, as torch's omit hooks:
    wrap the copy, and load the state.

    Args:
        optimizer: any `torch.optim.Optimizer`, of torch or not, that does not change parameters without a gradient.
        settings: `Settings`, or None to read the ``CAC_*`` variables (nothing set: auto mode, published defaults).
        model: see `GradientSkip`. Give it with several parameter groups.
        example_inputs: see `GradientSkip`.
        total_steps: see `GradientSkip`.
        schedulers: learning-rate schedulers that the optimizer has already, which ``CAC_LR_FACTOR`` scales, too.
        named_in: see `GradientSkip`.

    Raises:
        UserError: see `GradientSkip`, and for ``CAC_LR_FACTOR`` where there is a scheduler that is not given.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2, 3, 3))
    >>> optimizer = wrap(torch.optim.RMSprop([weight]), OFF)
    >>> optimizer.gradskip.stopped_through
    -1
    """
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"wrap takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    settings = Settings.from_environment() if settings is None else settings
    schedulers = list(schedulers)
    scale_learning_rates(optimizer, settings.lr_factor, schedulers=schedulers, check=True)
    gradskip = GradientSkip(
        optimizer, settings, model=model, example_inputs=example_inputs, total_steps=total_steps, named_in=named_in
    )
    scale_learning_rates(optimizer, settings.lr_factor, schedulers=schedulers)
    if settings.lr_factor != 1:
        _check_first_step(gradskip)
    optimizer.gradskip = gradskip  # type: ignore[attr-defined]
    add_to_optimizer = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        if gradskip.iteration > 0:
            raise RuntimeError(
                "a parameter group must be added before the first step of a gradient-skip optimizer, got one at "
                f"iteration {gradskip.iteration}: give all parameters at the start, those that train later in groups "
                "of their own with requires_grad off, and switch it on when they begin; this keeps the state, which a "
                "new optimizer does not have"
            )
        add_to_optimizer(param_group)
        scale_learning_rates(optimizer, gradskip.settings.lr_factor, first=len(optimizer.param_groups) - 1)
        gradskip.bind()

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    return optimizer


class _WithGradientSkip(Optimizer):
    """Shared part of the classes below, before torch's class in the order of bases; arguments are its and `wrap`'s.

    Parameters come in any iterable, a generator included, as groups, or named (``model.named_parameters()`` gives
    `GradientSkip.events` their names). Parameter N is layer number N.
    """

    gradskip: GradientSkip

    def __init__(
        self,
        params: Any,
        *args: Any,
        settings: Settings | None = None,
        model: nn.Module | None = None,
        example_inputs: Any = None,
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, *args, **options)
        wrap(self, settings, model=model, example_inputs=example_inputs, total_steps=total_steps)


class SGD(_WithGradientSkip, torch.optim.SGD):
    """Drop-in for `torch.optim.SGD` that stops layers which have converged; the attribute ``gradskip`` says which.

    The update is torch's own (foreach, fused or single-tensor); until the first stop it equals `torch.optim.SGD`
    bit for bit. A stopped layer needs no gradient from the next backward pass on, and no bit of it changes.
    """


class Adam(_WithGradientSkip, torch.optim.Adam):
    """Drop-in for `torch.optim.Adam` that stops layers which have converged; see `SGD`."""


class AdamW(_WithGradientSkip, torch.optim.AdamW):
    """Drop-in for `torch.optim.AdamW`; see `SGD`. Braking scales the whole update, decoupled weight decay included."""
