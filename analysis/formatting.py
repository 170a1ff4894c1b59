"""Formatting of numbers, and of values and drops of a metric, as text. Pure.

Fractions are shown in percent and points, all other metrics in their own unit.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from trainables.quality import Quality, allowed_amount

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Tolerance for comparing a value with a limit: accuracy losses are differences of fractions such as 583/599, and
#: rounding must not turn a loss of exactly the limit into a larger one.
ROUNDING = 1e-9
#: Maximum length of a line of names or code in a file to paste from, in characters.
LINE_WIDTH = 110
#: Significant digits of a value and of a drop that are no fractions, and most digits that tell a drop from its limit.
_VALUE_DIGITS, _DROP_DIGITS, _MOST_DIGITS = 5, 3, 12


def fixed(value: float, decimals: int, *, sign: str = "") -> str:
    """Format a number with this many decimals and zero without a minus sign; ``sign="+"`` writes plus signs.

    >>> fixed(-0.001, 2), fixed(-0.004, 2, sign="+"), fixed(0.5, 1, sign="+")
    ('0.00', '+0.00', '+0.5')
    """
    return f"{round(float(value), decimals) + 0.0:{sign}.{decimals}f}"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with one decimal.

    >>> percent(0.1493)
    '14.9 %'
    """
    return f"{fixed(100 * fraction, 1)} %"


def whole_percent(fraction: float) -> str:
    """Format a fraction as a percentage without decimals."""
    return f"{fixed(100 * fraction, 0)} %"


def wrapped(text: str, width: int, **options: Any) -> list[str]:
    """Return the lines of a sentence, none of which ends between a number and its percent sign.

    >>> wrapped("it saves 55.2 % of it", 13)
    ['it saves', '55.2 % of it']
    """
    return [line.replace("\xa0%", " %") for line in textwrap.wrap(text.replace(" %", "\xa0%"), width, **options)]


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1.

    >>> plural(1, "trial"), plural(0, "trial")
    ('1 trial', '0 trials')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_name(variable: str) -> str:
    """Return a variable's name without the prefix common to all.

    >>> short_name("CAC_VAR_MT_THR"), short_name("epochs")
    ('MT_THR', 'epochs')
    """
    return variable.removeprefix("CAC_").removeprefix("VAR_")


def metric_words(quality: Quality) -> str:
    """Return the metric in words, for the middle of a sentence."""
    return "validation accuracy" if quality.is_accuracy else quality.name


def compared_words(quality: Quality, *, tested: bool) -> str:
    """Return the metric of the test split, or of validation, in words."""
    if quality.is_accuracy:
        return "test accuracy" if tested else metric_words(quality)
    return f"{quality.name} on the test split" if tested else quality.name


def drop_words(quality: Quality) -> str:
    """Return the words for getting worse, for the middle of a sentence.

    >>> drop_words(Quality()), drop_words(Quality(name="val_loss", direction="min", unit=""))
    ('accuracy loss', 'rise in val_loss')
    """
    if quality.is_accuracy:
        return "accuracy loss"
    return f"{'drop' if quality.direction == 'max' else 'rise'} in {quality.name}"


def value_text(value: Any, quality: Quality) -> str:
    """Return a value as in tables: fractions with four decimals, others with five significant digits.

    >>> value_text(0.97, Quality()), value_text(123.456789, Quality(name="ppl", direction="min", unit=""))
    ('0.9700', '123.46')
    """
    return f"{value:.4f}" if quality.is_fraction else f"{value:.{_VALUE_DIGITS}g}"


def value_with_unit(value: float, quality: Quality) -> str:
    """Return a value as in pictures and sentences: fractions in percent."""
    return plotted_text(float(plotted(value, quality)), quality)


def drop_text(drop: float, quality: Quality, *, allowed: float | None = None) -> str:
    """Return a drop with its unit: fractions in points.

    >>> drop_text(0.0017, Quality()), drop_text(0.0123, Quality(name="nll", direction="min", unit="nats"))
    ('0.17 points', '0.0123 nats')
    """
    return f"{drop_number(drop, quality, allowed=allowed)} {unit_of_drop(quality)}".rstrip()


def drop_number(drop: float, quality: Quality, *, allowed: float | None = None, sign: str = "") -> str:
    """Return the number of `drop_text`, with enough digits that a drop above ``allowed`` is not shown as within it.

    >>> drop_number(0.0017, Quality()), drop_number(0.00501, Quality(), allowed=0.005)
    ('0.17', '0.501')
    >>> drop_number(0.05004, Quality(name="nll", direction="min", unit=""), allowed=0.05)
    '0.05004'
    >>> drop_number(float("nan"), Quality())
    '-'
    """
    if math.isnan(drop):
        return "-"
    if quality.is_fraction:
        return fixed(100 * drop, _decimals(100 * drop, None if allowed is None else 100 * allowed, 2), sign=sign)
    digits = _DROP_DIGITS
    if allowed is not None and drop > allowed + ROUNDING:
        while float(f"{drop:.{digits}g}") <= allowed and digits < _MOST_DIGITS:
            digits += 1
    return f"{float(drop) + 0.0:{sign}.{digits}g}"


def drop_cell(drop: float, quality: Quality, *, allowed: float | None = None) -> str:
    """Return a drop for a cell of a table, with its sign: fractions as such, with four decimals or as many as tell."""
    if not quality.is_fraction:
        return drop_number(drop, quality, allowed=allowed, sign="+")
    return fixed(drop, _decimals(drop, allowed, 4), sign="+")


def _decimals(value: float, limit: float | None, decimals: int) -> int:
    """Return the fewest decimals >= `decimals` with which a value above a limit is still printed above it."""
    if limit is not None and value > limit + ROUNDING:
        while round(value, decimals) <= limit and decimals < _MOST_DIGITS:
            decimals += 1
    return decimals


def allowed_text(allowed: float | str, quality: Quality, *, baseline: float | None = None) -> str:
    """Return an allowed drop in words; of a relative one also what it comes to, where the baseline's value is known.

    >>> allowed_text(0.005, Quality()), allowed_text("2%", Quality())
    ('0.50 points', "2 % of the baseline's")
    """
    if not isinstance(allowed, str):
        return drop_text(allowed, quality)
    words = f"{allowed.removesuffix('%')} % of the baseline's"
    if baseline is None or not math.isfinite(baseline):
        return words
    return f"{words}, {drop_text(float(allowed_amount(allowed, baseline)), quality)}"


def plotted(values: Any, quality: Quality) -> NDArray[np.float64]:
    """Return values, or differences of them, in the unit of an axis: percent of fractions."""
    import numpy as np  # not for what --help loads

    return np.asarray(values, dtype=np.float64) * (100.0 if quality.is_fraction else 1.0)


def plotted_text(value: float, quality: Quality) -> str:
    """Return a plotted value with its unit.

    >>> plotted_text(97.0, Quality()), plotted_text(1.25, Quality(name="nll", direction="min", unit="nats"))
    ('97.00 %', '1.25 nats')
    """
    return f"{value:.2f} %" if quality.is_fraction else f"{value_text(value, quality)} {quality.unit}".rstrip()


def axis_words(quality: Quality) -> str:
    """Return the title of an axis of values, with its unit in brackets."""
    unit = "%" if quality.is_fraction else quality.unit
    return f"{metric_words(quality)} ({unit})" if unit else metric_words(quality)


def drop_unit(quality: Quality) -> str:
    """Return the unit of a drop in brackets after a space; empty where there is none."""
    unit = unit_of_drop(quality)
    return f" ({unit})" if unit else ""


def unit_of_drop(quality: Quality) -> str:
    """Return the unit of a drop; empty where there is none."""
    return "points" if quality.is_fraction else quality.unit
