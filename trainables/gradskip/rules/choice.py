"""Construction of the rule that the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence

from trainables.gradskip.rules.published import AutoRule, ManualRule
from trainables.gradskip.rules.schedule_rules import FreezeOutRule, LinearRule
from trainables.gradskip.rules.signal_rules import GradientNormRule, PlasticityRule
from trainables.gradskip.rules.state_machine import OffRule, StopRule
from trainables.gradskip.settings import Settings


def make_rule(
    settings: Settings,
    targets: Sequence[int],
    *,
    stoppable: int | None = None,
    manual: Sequence[int] | None = None,
    single_precision: bool = True,
) -> StopRule:
    """Return the rule that the settings ask for.

    Args:
        settings: any.
        targets: positions at which the watched layers end, ascending.
        stoppable: how many of them, from the front, may stop; None for all.
        manual: positions of the manual stops; None for the settings' own numbers.
        single_precision: compare in float32, as the published code does with float32 weights.
    """
    front = tuple(targets if stoppable is None else targets[:stoppable])
    if settings.stop_layer_num is not None and settings.stop_layer_itr is not None:
        layers = settings.stop_layer_num if manual is None else manual
        return ManualRule(layers, settings.stop_layer_itr, exact=settings.reference)
    if settings.mode == "off" or not front:
        return OffRule()
    if settings.mode == "linear":
        return LinearRule(settings, front)
    if settings.mode == "freezeout":
        return FreezeOutRule(settings, targets, len(front))
    if settings.mode == "gradient_norm":
        return GradientNormRule(settings, front, targets[len(front) :])
    if settings.mode == "plasticity":
        return PlasticityRule(settings, front)
    return AutoRule(settings, front, single_precision=single_precision)
