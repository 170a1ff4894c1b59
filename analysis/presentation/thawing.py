"""Schedules of the library finetuning-scheduler: written from a prefix that never trains, and read as one.

Such a schedule names the parameters that begin to train in each of its phases; what no phase names is frozen.
Gradient-Skip never thaws, so both directions know one phase, 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from analysis.formatting import plural
from trainables.errors import UserError
from trainables.gradskip.settings import OFF_FIELD, Settings


def thawing_schedule(settings: Settings, trained: Sequence[str]) -> list[str]:
    """Return the lines of a schedule under which these parameters train from the start, and no others ever."""
    import yaml

    notes = ["# The rest is in evaluation mode, which no schedule says."] if settings.prefix_mode == "eval" else []
    if settings.lr_factor != 1:
        notes.append(f"# Learning rates are {settings.lr_factor:g} times the optimizer's own.")
    return [*notes, yaml.safe_dump({0: {"params": list(trained)}}, sort_keys=False).rstrip()]


def stop_of_schedule(text: str, names: Sequence[str], order: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a configuration that freezes, from the first step on, what a schedule never thaws.

    Args:
        text: the schedule, YAML: phases by number, each with ``params``, a list of names, or of regular expressions
            that names begin with.
        names: of all parameters, by number.
        order: numbers of the parameters that can train, in the order in which stops take them.

    UserError: text that is no such schedule, a later phase that thaws, an entry without a parameter that can train, or
    frozen parameters that are not the first ones.
    """
    import yaml

    try:
        phases = {int(phase): list(content["params"]) for phase, content in yaml.safe_load(text).items()}
        patterns = {entry: re.compile(entry) for entry in phases[0]}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise UserError(
            "a schedule of finetuning-scheduler must be phases from 0 on, each with a list params of names or regular "
            f"expressions, got {type(error).__name__} ({' '.join(str(error).split())}): correct it"
        ) from None
    if later := [phase for phase, params in phases.items() if phase and params]:
        raise UserError(
            "a schedule must thaw everything that it trains in phase 0, for Gradient-Skip stops layers and never thaws "
            f"them, got params in phase {later[0]}: move them to phase 0"
        )
    able, thawed = [names[number] for number in order], set[str]()
    for entry, pattern in patterns.items():
        matched = {entry} & set(able) or set(filter(pattern.match, able))
        if not matched:
            raise UserError(
                f"params of a schedule must match parameters that can train, {entry!r} matches none: they are "
                f"{able[0]} to {able[-1]} in {plural(len(able), 'name')}"
            )
        thawed |= matched
    frozen = [name not in thawed for name in able]
    through = frozen.index(False)
    if any(frozen[through:]):
        raise UserError(
            f"a schedule must freeze the first layers and no others, {able[frozen.index(True, through)]} is frozen "
            f"behind {able[through]}, which trains: thaw it, or freeze whatever comes before it"
        )
    if not through:
        return dict(OFF_FIELD)
    return {"CAC_STOP_LAYER_NUM": (order[through - 1],), "CAC_STOP_LAYER_ITR": (-1,)}
