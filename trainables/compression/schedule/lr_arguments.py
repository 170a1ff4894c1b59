"""Checks of learning-rate schedules' arguments before they are passed to torch. Pure, without torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainables.errors import UserError, unknown_name

#: Arguments that the schedule language fills in.
_FILLED_IN = ("self", "optimizer", "last_epoch")


@dataclass(frozen=True)
class _Rule:
    says: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int) -> _Rule:
    return _Rule(f"a whole number >= {least}", lambda value: _is_whole(value) and value >= least)


def _each(rule: _Rule) -> _Rule:
    return _Rule(
        f"a list of numbers, each {rule.says}",
        lambda value: isinstance(value, (list, tuple)) and len(value) > 0 and all(map(rule.holds, value)),
    )


def _one_or_each(rule: _Rule) -> _Rule:
    several = _each(rule)
    return _Rule(f"{rule.says}, or a list of them", lambda value: rule.holds(value) or several.holds(value))


_NOT_NEGATIVE = _Rule("a number >= 0", lambda value: _is_number(value) and value >= 0)
_POSITIVE = _Rule("a number > 0", lambda value: _is_number(value) and value > 0)
_SHARE = _Rule("a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1)
_MOMENTUM = _one_or_each(_Rule("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1))
_RATE = _one_or_each(_NOT_NEGATIVE)
_FLAG = _Rule("true or false", lambda value: isinstance(value, bool))
_TEXT = _Rule("text", lambda value: isinstance(value, str))
_NO_FUNCTION = _Rule("left out, for it is a function", lambda value: False)

#: Rules by argument name, the same for all classes. Arguments that torch adds later are checked by torch only.
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("step_size", "total_iters", "T_max", "T_0", "T_mult", "step_size_up", "step_size_down"), _whole(1)
    ),
    **dict.fromkeys(("total_steps", "epochs", "steps_per_epoch"), _whole(1)),
    **dict.fromkeys(("patience", "cooldown"), _whole(0)),
    **dict.fromkeys(("gamma", "factor", "start_factor", "end_factor", "power", "eta_min"), _NOT_NEGATIVE),
    **dict.fromkeys(("threshold", "eps"), _NOT_NEGATIVE),
    **dict.fromkeys(("div_factor", "final_div_factor"), _POSITIVE),
    **dict.fromkeys(("min_lr", "max_lr", "base_lr"), _RATE),
    **dict.fromkeys(("base_momentum", "max_momentum"), _MOMENTUM),
    **dict.fromkeys(("cycle_momentum", "three_phase"), _FLAG),
    **dict.fromkeys(("mode", "threshold_mode", "scale_mode", "anneal_strategy"), _TEXT),
    "milestones": _each(_whole(0)),
    "gammas": _each(_NOT_NEGATIVE),
    "pct_start": _SHARE,
    "scale_fn": _NO_FUNCTION,
}


def check_arguments(class_name: str, arguments: Mapping[str, Any], makes: Sequence[Callable[..., Any]]) -> None:
    """Check that a class can be called with these arguments.

    Args:
        class_name: for messages.
        arguments: as given.
        makes: the class to call, followed by others of the same name.

    Raises:
        UserError: an argument is unknown, missing, of another type or out of its range; the message has the signature.
    """
    taken = _parameters(makes[0])
    how = signatures(class_name, makes)
    for name in arguments:
        if name not in taken:
            others = {other for make in makes for other in _parameters(make)}
            raise UserError(f"{unknown_name(f'argument of {class_name}', str(name), others)} in {how}")
    for name, parameter in taken.items():
        if name not in arguments and parameter.default is parameter.empty:
            raise UserError(f"{class_name} needs {name}: {how}")
    for name, value in arguments.items():
        rule = _RULES.get(name)
        optional = value is None and taken[name].default is None
        if rule is not None and not optional and not rule.holds(value):
            raise UserError(f"{name} of {class_name} must be {rule.says}, got {value!r}{_hint(value)}: {how}")


def signatures(class_name: str, makes: Sequence[Callable[..., Any]]) -> str:
    """Return the signatures of the classes of this name.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> signatures("StepLR", [StepLR])
    'StepLR(step_size, gamma=0.1)'
    """
    return " or ".join(_signature(class_name, make) for make in makes)


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(make).parameters.items() if name not in _FILLED_IN}


def _signature(class_name: str, make: Callable[..., Any]) -> str:
    parts = [name if p.default is p.empty else f"{name}={_short(p.default)}" for name, p in _parameters(make).items()]
    return f"{class_name}({', '.join(parts)})"


def _short(default: Any) -> str:
    return f"{default:.4g}" if isinstance(default, float) and default != round(default, 3) else repr(default)


def _hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " (YAML reads that as text: a number with an exponent needs a point, as 1.0e-4)"
