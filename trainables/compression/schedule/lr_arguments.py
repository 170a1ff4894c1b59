"""Checks of learning-rate schedules' arguments before they are passed to torch. Pure, without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trainables.compression.schedule.config_base import Count, Flag, Fraction, NotNegative, Positive, Whole
from trainables.errors import UserError, unknown_name

T = TypeVar("T")
_List = Annotated[list[T], Field(min_length=1)]
_Index = Annotated[Whole, Field(ge=0)]
_Momentum = Annotated[Fraction, Field(lt=1)]

#: Arguments that the schedule language fills in.
_FILLED_IN = ("self", "optimizer", "last_epoch")
#: Names, rule and type, the same for all classes. Arguments that torch adds later are checked by torch only.
_KINDS: tuple[tuple[str, str, Any], ...] = (
    ("step_size total_iters T_max T_0 T_mult step_size_up step_size_down", "a whole number >= 1", Count),
    ("total_steps epochs steps_per_epoch", "a whole number >= 1", Count),
    ("patience cooldown", "a whole number >= 0", _Index),
    ("gamma factor start_factor end_factor power eta_min threshold eps", "a number >= 0", NotNegative),
    ("div_factor final_div_factor", "a number > 0", Positive),
    ("min_lr max_lr base_lr", "a number >= 0, or a list of them", NotNegative | _List[NotNegative]),
    ("base_momentum max_momentum", "a number in [0, 1), or a list of them", _Momentum | _List[_Momentum]),
    ("cycle_momentum three_phase", "true or false", Flag),
    ("mode threshold_mode scale_mode anneal_strategy", "text", Annotated[str, Field(strict=True)]),
    ("milestones", "a list of numbers, each a whole number >= 0", _List[_Index]),
    ("gammas", "a list of numbers, each a number >= 0", _List[NotNegative]),
    ("pct_start", "a number in [0, 1]", Fraction),
    ("scale_fn", "left out, for it is a function", None),
)
_RULES = {name: (rule, TypeAdapter[Any](kind)) for names, rule, kind in _KINDS for name in names.split()}


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
        if name not in _RULES or (value is None and taken[name].default is None):
            continue
        rule, accepted = _RULES[name]
        try:
            accepted.validate_python(value)
        except ValidationError:
            raise UserError(f"{name} of {class_name} must be {rule}, got {value!r}{_hint(value)}: {how}") from None


def signatures(class_name: str, makes: Sequence[Callable[..., Any]]) -> str:
    """Return the signatures of the classes of this name.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> signatures("StepLR", [StepLR])
    'StepLR(step_size, gamma=0.1)'
    """
    return " or ".join(
        f"{class_name}({', '.join(_with_default(name, p.default) for name, p in _parameters(make).items())})"
        for make in makes
    )


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(make).parameters.items() if name not in _FILLED_IN}


def _with_default(name: str, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return name
    long = isinstance(default, float) and default != round(default, 3)
    return f"{name}={default:.4g}" if long else f"{name}={default!r}"


def _hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " (YAML reads that as text: a number with an exponent needs a point, as 1.0e-4)"
