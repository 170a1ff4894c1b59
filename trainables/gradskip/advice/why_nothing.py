"""One-sentence explanations of why a run stopped no layer. Pure."""

from __future__ import annotations

from trainables.gradskip.rules.published import AutoRule
from trainables.gradskip.settings import Settings

#: Suggested start of decisions and interval between them, as divisors of the run's steps.
_BEGIN, _OFTEN = 5, 60


def too_late(settings: Settings, steps: int) -> str:
    """Return why these settings cannot stop anything within ``steps`` steps, and what could; empty where they may.

    >>> too_late(Settings(start_itr=60, samples=5), 300)
    ''
    """
    if settings.mode != "auto":
        return ""
    first = AutoRule(settings, (0,)).first_stop()
    if first < steps:
        return ""
    return (
        f"the first stop can come at iteration {first} at the earliest (CAC_VAR_START_ITR={settings.start_itr}, "
        f"decided every {settings.sampling_interval}), the run has {steps} steps: set both lower, such as "
        f"CAC_VAR_START_ITR={steps // _BEGIN} and CAC_VAR_SAMPLES={max(1, steps // _OFTEN)}"
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
