"""A trial's settings of a gradient estimator in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.gradients.fields import FIELD_NAMES


def estimator_text(values: Mapping[str, Any], *, digits: int | None = None) -> str:
    """Return the fields of an estimator as ``--set`` takes them, separated by spaces; empty if none is set.

    Args:
        values: fields of `TrialConfig`; None: not set.
        digits: significant digits of numbers, None for all.

    >>> estimator_text({"gradient_layers": ("fc.weight", "fc.bias"), "gradient_epsilon": 0.0123456}, digits=4)
    'gradient_layers=fc.weight,fc.bias gradient_epsilon=0.01235'
    """
    texts = {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}
    return " ".join(f"{name}={_text(value, digits)}" for name, value in texts.items())


def _text(value: Any, digits: int | None) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)
