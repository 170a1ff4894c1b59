"""The compression schedule of a trial as plain YAML, filled in: what a plain training loop can run. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainables.config import TrialConfig


def compresses(config: TrialConfig) -> bool:
    """Whether a trial's configuration compresses anything: it has a schedule with a policy."""
    return config.compresses and bool(_schedule(config)["policies"])


def schedule_text(config: TrialConfig, about: Sequence[str] = ()) -> str:
    """The schedule of a configuration that compresses, without marks, under comment lines.

    Args:
        config: of a trial.
        about: comment lines, with their number signs.

    Raises:
        UserError: its schedule cannot be read.
    """
    from trainables.compression.schedule import dump

    comments = "".join(f"{line}\n" for line in about)
    return comments + dump(_schedule(config))


def _schedule(config: TrialConfig) -> Mapping[str, Any]:
    from trainables.compression.trial.from_config import schedule_of  # it loads pydantic and a reader of YAML

    return schedule_of(config)
