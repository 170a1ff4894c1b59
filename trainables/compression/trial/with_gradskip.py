"""Gradient-Skip and a compression schedule on one training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from trainables.attachment import RunFacts
from trainables.compression.trial import method as compression
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip import method as gradskip
from trainables.gradskip.beside import WEIGHT_RULES, GradskipBeside


def check_together(config: TrialConfig, schedule: Mapping[str, Any]) -> None:
    """Check that Gradient-Skip can be combined with this schedule.

    Args:
        config: with Gradient-Skip's rule.
        schedule: plain mapping.

    Raises:
        UserError: the rule uses gradients, or the schedule changes the model's structure.
    """
    mode = config.gradskip_settings().mode
    if mode not in WEIGHT_RULES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with compression: its signal would depend on what is pruned in the "
            "same step; use CAC_RULE=variance or manual stops"
        )
    if any(kind in policy for policy in schedule["policies"] for kind in ("quantizer", "extension")):
        raise UserError(
            "Gradient-Skip can't be combined with quantizers or extensions, which change the layers that it numbers: "
            "leave them out of the schedule, or search one of the two methods"
        )


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> GradskipBeside:
    """Attach both methods.

    Raises:
        UserError: see `check_together`.
    """
    check_together(config, schedule_of(config))
    compress = compression.attach(optimizer, config, run)
    return GradskipBeside(gradskip.attach(optimizer, config, run), compress, "compression")
