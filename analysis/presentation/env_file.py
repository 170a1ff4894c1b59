"""A configuration's variables as lines that a POSIX shell can source."""

from __future__ import annotations

import shlex
import textwrap

from analysis.presentation.schedule_text import compresses
from trainables.config import TrialConfig
from trainables.gradskip.settings import BY_NAME, Settings

#: Columns of a line of names.
_WIDTH = 110


def environment_lines(config: TrialConfig, *, schedule: str) -> list[str]:
    """Comments, ``unset`` of every other variable and ``export`` of these, for a POSIX shell.

    Args:
        config: of a trial.
        schedule: where its compression schedule is, which no variable holds; said where it has one. If that is all
            that it has, there is nothing to unset or export.
    """
    lines = []
    if compresses(config):
        if not config.skips_gradients:
            return [f"# It compresses, and no variable says how: the answer is {schedule}."]
        lines.append(f"# It compresses, too, and no variable says how: the schedule is {schedule}.")
    # Without a method nothing stops, which in the variables is auto mode turned off.
    settings = config.gradskip_settings() if config.skips_gradients else Settings(start_thr=-1)
    environment = settings.to_environment()
    if config.forward_cache_mb:
        lines.append(f"# The trial had forward_cache_mb={config.forward_cache_mb}, which no variable sets.")
    ours = [name for name in environment if not BY_NAME[name].published]
    if ours:
        lines.append("# Unknown to the published library, read by tune_cac.gradskip, which wants model= for them:")
        lines += textwrap.wrap(", ".join(ours), width=_WIDTH, initial_indent="#   ", subsequent_indent="#   ")
    # One left over in the shell could win over these, or be refused beside them.
    unset = [name for name in BY_NAME if name not in environment]
    lines += textwrap.wrap(" ".join(unset), width=_WIDTH, initial_indent="unset ", subsequent_indent="unset ")
    # Plain numbers, names and comma lists need no quotes and get none.
    return [*lines, *(f"export {name}={shlex.quote(value)}" for name, value in environment.items())]
