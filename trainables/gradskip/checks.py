"""Settings that cannot fire, told before a run is spent on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trainables.gradskip.settings import Settings


def never_fires(
    settings: Settings,
    *,
    units: int,
    stoppable: int,
    weight_decays: Sequence[float] | None = None,
    total_steps: int | None = None,
) -> str | None:
    """Why these settings stop nothing, in words; None where they may stop something, or are off on purpose.

    Args:
        settings: any.
        units: watched layers of the model.
        stoppable: those whose stop leaves something to train.
        weight_decays: of the groups that hold watched weights; None where the optimizer has no such thing.
        total_steps: length of the run in optimizer steps, where known.
    """
    if settings.mode == "off":
        return None
    if settings.mode == "manual":
        assert settings.stop_layer_itr is not None
        return _late("CAC_STOP_LAYER_ITR", settings.stop_layer_itr[0], total_steps)
    if units == 0:
        return (
            f"CAC_WATCH={','.join(settings.watch)} finds no layer to watch (conv: 4-D weights, linear: 2-D weights): "
            "choose another kind"
        )
    if stoppable == 0:
        return "the only watched layer is the last thing that trains, and the last one never stops"
    if settings.mode == "auto":
        if weight_decays is not None and all(decay == 0 for decay in weight_decays):
            return (
                "weight decay is 0 for every watched layer, so weight variance has nothing that makes it fall below "
                "its peak: set a weight decay, or another CAC_RULE"
            )
        return _late("CAC_VAR_START_ITR", settings.start_itr, total_steps)
    first = settings.rule_start_itr
    if settings.mode == "gradient_norm":
        first += settings.rule_interval  # a change needs two measurements
    if settings.mode == "plasticity":
        first += (settings.rule_window + 1) * settings.rule_interval
    return _late("CAC_RULE_START_ITR", first, total_steps)


def _late(name: str, first: int, total_steps: int | None) -> str | None:
    if total_steps is None or first < total_steps:
        return None
    return (
        f"the first stop that {name} allows is at iteration {first}, and the run ends after {total_steps}: "
        f"make {name} smaller"
    )
