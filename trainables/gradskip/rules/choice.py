"""The rules by name, each a file of this folder, and construction of the one that the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trainables.gradskip.rules.published import AutoRule, ManualRule
from trainables.gradskip.rules.state_machine import Gathered, InOrder, NamedRule, StopRule

#: Files of this folder that are no rule of ``CAC_RULE``.
_OTHERS = ("__init__", "choice", "published", "published_batch", "state_machine")


def _named() -> dict[str, type[NamedRule]]:
    stems = [file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in _OTHERS]
    modules = [import_module(f"{__package__}.{stem}") for stem in stems]
    found = [
        value for module in modules for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, NamedRule) and "name" in vars(value)
    ]  # fmt: skip
    return {rule.name: rule for rule in sorted(found, key=lambda r: (r.is_measured, not r.brakes, r.name))}


#: The rules of ``CAC_RULE`` but ``variance``, the published one: schedules first.
NAMED = _named()
#: Those with a last iteration, ``CAC_RULE_END_ITR``, which must be set.
WITH_END = tuple(name for name, rule in NAMED.items() if "rule_end_itr" in rule.reads)


def make_rule(
    settings: Any,
    targets: Sequence[int],
    *,
    stoppable: int | None = None,
    manual: Sequence[int] | None = None,
    single_precision: bool = True,
) -> StopRule:
    """Return the rule that the settings ask for.

    Of the positions at which watched layers end, ascending, the first ``stoppable`` may stop. Positions of ``manual``
    stops replace the settings' numbers. The published rule compares in float32, or in float64.
    """
    front = tuple(targets if stoppable is None else targets[:stoppable])
    if settings.stop_layer_num is not None and settings.stop_layer_itr is not None:
        layers = settings.stop_layer_num if manual is None else manual
        return ManualRule(layers, settings.stop_layer_itr, exact=settings.reference)
    if settings.mode == "off" or not front:
        return StopRule()
    if settings.mode in NAMED:
        rule: InOrder = NAMED[settings.mode](settings, targets, len(front))
    else:
        rule = AutoRule(settings, front, single_precision=single_precision)
    return Gathered(rule, settings.stop_interval) if settings.stop_interval else rule
