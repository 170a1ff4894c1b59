"""Quality of a trial: the metric by which it is compared with the baseline, its direction and its unit. Loads no torch.

By default that is the accuracy on the validation split. Symbols: q quality of a trial, b that of its baseline, s = 1
for a metric to maximise and -1 for one to minimise. The *drop* of a trial is s (b - q): how much worse it is than its
baseline, in the metric's own unit, negative where it is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainables.errors import UserError

#: Unit of a metric in [0, 1] that people read in percent and points.
FRACTION = "fraction"
#: Direction by name.
DIRECTIONS = ("max", "min")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
#: Names of metrics which, unless a direction is given, are minimised. Any other name needs one.
_MINIMISED = re.compile(r"(^|_)(loss|error|perplexity|ppl|rmse|mse|mae|fid)$")
_MAXIMISED = re.compile(r"(^|_)(accuracy|acc|f1|auc|auroc|map|r2|bleu|iou|dice|recall|precision|score|reward|return)$")

#: Fields of a config, and columns of trials, that name a metric.
QUALITY_FIELDS = ("metric", "direction", "metric_unit")

_Number = TypeVar("_Number")


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A metric by which trials are compared: its column, ``max`` or ``min``, `FRACTION` or other words for its unit.

    Raises:
        UserError: no such direction, or a name that no column can have.
    """

    name: str = "accuracy"
    direction: str = "max"
    unit: str = FRACTION

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(
                "the metric must have a name of letters, digits, '_', '.', '/' and '-' that begins with a letter, got "
                f"{self.name!r}"
            )
        if self.direction not in DIRECTIONS:
            raise UserError(f"the direction of a metric must be min or max, got {self.direction!r}")

    @property
    def is_accuracy(self) -> bool:
        """Return whether this is the accuracy, which needs no declaration."""
        return self.name == "accuracy"

    @property
    def is_fraction(self) -> bool:
        """Return whether values are fractions, which are shown in percent and points."""
        return self.unit == FRACTION

    @property
    def sign(self) -> float:
        """Return 1 for a metric to maximise, -1 for one to minimise."""
        return 1.0 if self.direction == "max" else -1.0

    @property
    def test(self) -> str:
        """Return the column of the value on the test split."""
        return f"test_{self.name}"

    @property
    def drop(self) -> str:
        """Return the column of the drop against the baseline."""
        return f"{self.name}_drop"

    @property
    def test_drop(self) -> str:
        """Return the column of the drop on the test split."""
        return f"{self.test}_drop"

    @property
    def optuna_direction(self) -> str:
        """Return the direction in Optuna's word."""
        return "maximize" if self.direction == "max" else "minimize"

    def lost(self, value: float, baseline: float) -> float:
        """Return how much worse a value is than the baseline's, in the metric's unit.

        >>> ACCURACY.lost(0.5, 0.75), Quality(name="val_loss", direction="min", unit="").lost(2.0, 1.5)
        (0.25, 0.5)
        """
        return self.sign * (baseline - value)

    def fields(self) -> dict[str, str]:
        """Return the fields of a config that name this metric; none for the accuracy."""
        return {} if self == ACCURACY else self.all_fields()

    def all_fields(self) -> dict[str, str]:
        """Return `fields`, also those of an accuracy, for a workload whose own metric is another."""
        return dict(zip(QUALITY_FIELDS, (self.name, self.direction, self.unit), strict=True))


#: The quality of trials that name no other.
ACCURACY = Quality()


def quality_named(
    metric: str | None, direction: str | None, unit: str | None = None, *, own: Quality = ACCURACY
) -> Quality:
    """Return the quality that a user names, by default the workload's own; a name such as ``val_loss`` says min.

    Raises:
        UserError: neither a direction nor a name that says it, or another direction or unit than the own metric's.
    """
    if metric is None or metric == own.name:
        if direction not in (None, own.direction):
            raise UserError(f"--direction must be {own.direction} for the metric {own.name}, got {direction}")
        if unit not in (None, own.unit):
            raise UserError(f"--metric-unit must be {own.unit or 'left out'} for the metric {own.name}, got {unit}")
        return own
    if metric == ACCURACY.name:
        return quality_named(None, direction, unit)
    if direction is None:
        found = [name for name, names in (("min", _MINIMISED), ("max", _MAXIMISED)) if names.search(metric)]
        if len(found) != 1:
            raise UserError(
                f"--direction must be given for the metric {metric}: min where smaller is better, max where larger is"
            )
        direction = found[0]
    return Quality(name=metric, direction=direction, unit=unit or "")


def quality_in(values: Mapping[str, Any]) -> Quality:
    """Return the quality that `QUALITY_FIELDS` of a config, or of the facts of a run, name; else the accuracy."""
    return quality_named(*(values.get(name) for name in QUALITY_FIELDS))


#: Allowed drop of a metric in percent and points, and of another one.
DEFAULT_DROP, DEFAULT_RELATIVE_DROP = 0.005, "1%"


def default_drop(quality: Quality) -> float | str:
    """Return the drop that is allowed unless another is given: half a point, or 1 % of the baseline's value."""
    return DEFAULT_DROP if quality.is_fraction else DEFAULT_RELATIVE_DROP


def read_drop(value: float | str, quality: Quality = ACCURACY) -> float | str:
    """Return an allowed drop: a number in the metric's unit, or text such as ``2%`` of the baseline's value.

    Raises:
        UserError: neither, or out of range: >= 0, and below 1 for a fraction.
    """
    text = str(value).strip()
    relative = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    inside = 0 <= number < (100 if relative else 1 if quality.is_fraction else math.inf)  # NaN is not
    if isinstance(value, bool) or not inside:
        what = "accuracy loss" if quality.is_accuracy else f"drop in {quality.name}"
        rule = "a number >= 0 in its unit"
        if quality.is_fraction:
            rule = "a fraction in [0, 1), such as 0.005 for half a point"
        raise UserError(f"the allowed {what} must be {rule}, or such as 2% of the baseline's, got {value}")
    return f"{number:g}%" if relative else number


def allowed_amount(allowed: float | str, baseline: _Number) -> _Number | float:
    """Return an allowed drop (of `read_drop`) in the metric's unit; the baseline's value is a number or a Series.

    >>> allowed_amount(0.01, 0.9), allowed_amount("2%", -5.0)
    (0.01, 0.1)
    """
    if isinstance(allowed, str):
        return float(allowed.removesuffix("%")) / 100 * abs(baseline)  # type: ignore[arg-type]
    return allowed
