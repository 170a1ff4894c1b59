"""Formatting of numbers as text: percentages, points of accuracy, counts. Pure."""

from __future__ import annotations

#: Tolerance for comparing a value with a limit: accuracy losses are differences of fractions such as 583/599, and
#: rounding must not turn a loss of exactly the limit into a larger one.
ROUNDING = 1e-9
#: Maximum length of a line of names or code in a file to paste from, in characters.
LINE_WIDTH = 110
#: Most decimals printed to distinguish two values.
_MOST_DECIMALS = 12


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
    """Format a fraction as a percentage without decimals.

    >>> whole_percent(0.675)
    '68 %'
    """
    return f"{fixed(100 * fraction, 0)} %"


def decimals_above(value: float, limit: float, decimals: int) -> int:
    """Return the fewest decimals >= `decimals` with which a value above a limit is still printed above it.

    >>> decimals_above(0.00501, 0.005, 4), decimals_above(0.0061, 0.005, 4), decimals_above(0.005, 0.005, 4)
    (5, 4, 4)
    """
    if value > limit + ROUNDING:
        while round(value, decimals) <= limit and decimals < _MOST_DECIMALS:
            decimals += 1
    return decimals


def points(fraction: float, *, allowed: float | None = None) -> str:
    """Format a difference of accuracies in points.

    Two decimals; more where a difference above `allowed` would otherwise be printed as within it.

    >>> points(0.0017), points(0.00501, allowed=0.005)
    ('0.17 points', '0.501 points')
    """
    return f"{points_number(fraction, allowed=allowed)} points"


def points_number(fraction: float, *, allowed: float | None = None, sign: str = "") -> str:
    """Format the number of `points` without its unit.

    >>> points_number(-0.00001, sign="+")
    '+0.00'
    """
    decimals = 2 if allowed is None else decimals_above(100 * fraction, 100 * allowed, 2)
    return fixed(100 * fraction, decimals, sign=sign)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1.

    >>> plural(1, "trial"), plural(0, "trial")
    ('1 trial', '0 trials')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_name(variable: str) -> str:
    """Return a variable's name without the prefix common to all.

    >>> short_name("CAC_VAR_START_THR"), short_name("epochs")
    ('START_THR', 'epochs')
    """
    return variable.removeprefix("CAC_").removeprefix("VAR_")
