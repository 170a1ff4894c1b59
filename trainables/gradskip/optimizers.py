"""torch's optimizers with Gradient-Skip, and `wrap` for any other optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import STATE_KEY, GradientSkip
from trainables.gradskip.layers import check_groups
from trainables.gradskip.settings import OFF, Settings  # noqa: F401 - in examples

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def wrap(
    optimizer: AnyOptimizer,
    settings: Settings | None = None,
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    total_steps: int | None = None,
) -> AnyOptimizer:
    """Attach Gradient-Skip to an optimizer in place, and return the same object, with the attribute ``gradskip``.

    Its ``state_dict()`` includes the rule. Copies and pickles of the optimizer itself do not, as torch's omit hooks:
    wrap the copy and load the state.

    Args:
        optimizer: any `torch.optim.Optimizer`, of torch or not, that does not change parameters without a gradient.
        settings: `Settings`, or None to read the ``CAC_*`` variables (nothing set: auto mode, published defaults).
        model: see `GradientSkip`. Give it with several parameter groups.
        example_inputs: see `GradientSkip`.
        total_steps: see `GradientSkip`.

    Raises:
        UserError: see `GradientSkip`.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2, 3, 3))
    >>> optimizer = wrap(torch.optim.RMSprop([weight]), OFF)
    >>> optimizer.gradskip.stopped_through
    -1
    """
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"wrap takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    gradskip = GradientSkip(optimizer, settings, model=model, example_inputs=example_inputs, total_steps=total_steps)
    optimizer.gradskip = gradskip  # type: ignore[attr-defined]
    add_to_optimizer = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        _refuse_late_group(gradskip)
        add_to_optimizer(param_group)
        gradskip.bind()

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    return optimizer


def _refuse_late_group(gradskip: GradientSkip) -> None:
    if gradskip.iteration > 0:
        raise RuntimeError(
            "a parameter group must be added before the first step of a gradient-skip optimizer, got one at "
            f"iteration {gradskip.iteration}: give all parameters at the start, those that train later in groups of "
            "their own with requires_grad off, and switch it on when they begin; this keeps the state, which a new "
            "optimizer does not have"
        )


class _WithGradientSkip(Optimizer):
    """Shared part of the classes below; comes before torch's class in the order of bases.

    Args:
        params: parameters, parameter groups, or named parameters (``model.named_parameters()``, which gives names to
            `GradientSkip.events`); any iterable, a generator included. Parameter N is layer number N.
        args: as in torch's class.
        settings: as in `wrap`.
        model: as in `wrap`.
        example_inputs: as in `wrap`.
        total_steps: as in `wrap`.
        options: as in torch's class (``foreach``, ``fused``, ...).
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
        super().__init__(_checked(params), *args, **options)
        self.gradskip = GradientSkip(
            self, settings, model=model, example_inputs=example_inputs, total_steps=total_steps
        )

    def __init_subclass__(cls, **options: Any) -> None:
        """Show torch's own arguments and ours as the signature."""
        super().__init_subclass__(**options)
        of_torch, ours = (inspect.signature(base.__init__).parameters.values() for base in (cls.__mro__[2], cls))  # type: ignore[misc]
        named = [p for p in ours if p.kind is p.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([*of_torch][1:] + named)  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; only before the first step, because they change the numbering."""
        started = getattr(self, "gradskip", None)
        if started is not None:
            _refuse_late_group(started)
        super().add_param_group(param_group)
        if started is not None:
            started.bind()

    def __getstate__(self) -> dict[str, Any]:
        # torch's own keeps only three entries and drops all else, hooks included; ours is rebuilt from the added entry.
        state: dict[str, Any] = super().__getstate__()
        ours = self.gradskip
        rule_state = {key: value for key, value in ours.state_dict().items() if key != "step_record"}  # counted once
        return {**state, STATE_KEY: (ours.settings, ours.model, rule_state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        ours = state.pop(STATE_KEY, None)
        super().__setstate__(state)
        if ours is not None:
            settings, model, rule_state = ours
            self.gradskip = GradientSkip(self, settings, model=model)
            self.gradskip.load_state_dict(rule_state)


def _checked(params: Any) -> Any:
    if isinstance(params, Tensor):
        return params  # refused by torch
    given = list(params)
    if not given or not isinstance(given[0], dict):
        check_groups([given])
        return given
    groups = [{**group, "params": _as_list(group["params"])} for group in given]
    check_groups([[p[1] if isinstance(p, tuple) else p for p in group["params"]] for group in groups])
    return groups


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)


class SGD(_WithGradientSkip, torch.optim.SGD):
    """Drop-in for `torch.optim.SGD` that stops layers which have converged; the attribute ``gradskip`` says which.

    The update is torch's own (foreach, fused or single-tensor); until the first stop it equals `torch.optim.SGD`
    bit for bit. A stopped layer needs no gradient from the next backward pass on, and no bit of it changes.

    >>> optimizer = SGD([torch.zeros(3, requires_grad=True)], lr=0.1, settings=OFF)
    >>> optimizer.gradskip.stopped_through
    -1
    """


class Adam(_WithGradientSkip, torch.optim.Adam):
    """Drop-in for `torch.optim.Adam` that stops layers which have converged; see `SGD`."""


class AdamW(_WithGradientSkip, torch.optim.AdamW):
    """Drop-in for `torch.optim.AdamW` that stops layers which have converged; see `SGD`.

    While a layer brakes its whole update is scaled, decoupled weight decay included.
    """
