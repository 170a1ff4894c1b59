"""Reasons why settings can stop nothing, before a run is spent on them, or have stopped nothing, after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainables.gradskip.rules.choice import make_rule
from trainables.gradskip.rules.published import AutoRule
from trainables.gradskip.rules.state_machine import NEVER
from trainables.gradskip.settings import Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Variables that determine a mode's first stop.
_TIMING = {"manual": "CAC_STOP_LAYER_ITR", "auto": "CAC_VAR_START_ITR or CAC_VAR_SAMPLES"}


def weight_decays(optimizer: Optimizer) -> list[float] | None:
    """Return the weight decays of the groups that hold weights, each once, ascending; None where there are none."""
    groups = [group for group in optimizer.param_groups if any(p.dim() >= 2 for p in group["params"])]
    if not all("weight_decay" in group for group in groups):
        return None
    return sorted({float(group["weight_decay"]) for group in groups})


def never_fires(
    settings: Settings,
    *,
    units: int,
    stoppable: int,
    first_stop: int,
    decays: Sequence[float] | None = None,
    total_steps: int | None = None,
    frozen: int = 0,
) -> str | None:
    """Return the reason why these settings stop nothing, or most likely nothing; None where they may stop something.

    Args:
        settings: any; None is returned for settings that are off on purpose.
        units: watched layers of the model.
        stoppable: those whose stop leaves something to train.
        first_stop: of `StopRule`.
        decays: of `weight_decays`.
        total_steps: length of the run in optimizer steps, where known.
        frozen: number of layers that would be watched if the user had not frozen them.
    """
    mode = settings.mode
    if mode == "off":
        return None
    if mode != "manual" and units == 0 and frozen:
        return f"will stop nothing as long as all {frozen} layers of CAC_WATCH={','.join(settings.watch)} are frozen"
    if mode != "manual" and units == 0:
        return (
            f"will stop nothing: CAC_WATCH={','.join(settings.watch)} finds no layer to watch (conv: 4-D weights, "
            "linear: 2-D weights); choose another kind, or a class of modules such as Conv1d"
        )
    if mode != "manual" and stoppable == 0:
        return "will stop nothing: the only watched layer is the last thing that trains, and the last one never stops"
    if first_stop == NEVER:
        return (
            f"will stop nothing: CAC_RULE_DEPTH={settings.rule_depth:g} of {stoppable} layers is less than one layer; "
            "make it larger"
        )
    if total_steps is not None and first_stop >= total_steps:
        timing = "CAC_STOP_INTERVAL, " * bool(settings.stop_interval)
        return (
            f"will stop nothing: the first stop that it can decide is at iteration {first_stop}, and the run ends "
            f"after {total_steps}; make {timing}{_TIMING.get(mode, 'CAC_RULE_START_ITR or CAC_RULE_INTERVAL')} smaller"
        )
    if mode == "auto" and decays is not None and not any(decays):
        return (
            "may stop nothing: weight decay is 0 for every watched layer, so nothing drives weight variance below its "
            "peak; set a weight decay, or another CAC_RULE"
        )
    return None


def too_late(settings: Settings, steps: int) -> str:
    """Return why these settings cannot stop anything within ``steps`` steps, and what could; empty where they may."""
    if settings.mode != "auto":
        return ""
    first = make_rule(settings, (0,)).first_stop()
    if first < steps:
        return ""
    if AutoRule(settings, (0,)).first_stop() < steps:
        return (
            f"stops wait for iteration {first} (CAC_STOP_INTERVAL={settings.stop_interval}), the run has {steps} "
            "steps: set it lower"
        )
    return (
        f"the first stop can come at iteration {first} at the earliest (CAC_VAR_START_ITR={settings.start_itr}, "
        f"decided every {settings.sampling_interval}), the run has {steps} steps: set both lower, such as "
        f"CAC_VAR_START_ITR={steps // 5} and CAC_VAR_SAMPLES={max(1, steps // 60)}"
    )


def why_nothing_stopped(settings: Settings, steps: int) -> str:
    """Return why a run of ``steps`` steps, trained to its end with these settings, stopped no layer."""
    if settings.mode == "off":
        return "CAC_VAR_START_THR is -1 (off)"
    if settings.mode != "auto":
        return f"rule {settings.mode} named no layer within {steps} steps"
    return too_late(settings, steps) or (
        f"at no decision (from iteration {settings.start_itr} on, every {settings.sampling_interval}) had the first "
        f"layer's weight variance fallen below CAC_VAR_START_THR={settings.start_thr} of its peak: raise it, decide "
        "more often, or let a search find what acts"
    )
