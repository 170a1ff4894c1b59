"""Gradient-Skip while samples with nearly no loss gradient are left out of the backward pass."""

from __future__ import annotations

from torch.optim import Optimizer

from trainables.attachment import RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients import variance_trial
from trainables.gradskip import method as gradskip
from trainables.gradskip.beside import WEIGHT_RULES, GradskipBeside


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> GradskipBeside:
    """Attach both methods.

    Raises:
        UserError: Gradient-Skip's rule looks at gradients.
    """
    mode = config.gradskip_settings().mode
    if mode not in WEIGHT_RULES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with zero gradients: its signal would depend on which samples are left "
            "out in the same step; use CAC_RULE=variance or manual stops"
        )
    other = variance_trial.attach(optimizer, config, run)
    return GradskipBeside(gradskip.attach(optimizer, config, run), other, "gradients")
