"""The compression schedule of a trial as plain YAML with all values filled in. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainables.config import TrialConfig


def compresses(config: TrialConfig) -> bool:
    """Return whether a trial's configuration compresses anything, that is, has a schedule with a policy."""
    return config.compresses and bool(_schedule(config)["policies"])


def schedule_text(config: TrialConfig, about: Sequence[str] = ()) -> str:
    """Return the schedule of a configuration that compresses, without marks, after comment lines.

    The YAML can be run by a plain training loop.

    Args:
        config: configuration of a trial.
        about: comment lines, with their number signs.

    Raises:
        UserError: if the schedule cannot be read.
    """
    from trainables.compression.schedule import dump

    comments = "".join(f"{line}\n" for line in about)
    return comments + dump(_schedule(config))


def _schedule(config: TrialConfig) -> Mapping[str, Any]:
    from trainables.compression.trial.from_config import schedule_of  # loads pydantic and a YAML reader

    return schedule_of(config)
