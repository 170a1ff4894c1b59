"""Settings by network in tables, and as comments to paste."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from analysis.formatting import LINE_WIDTH, short_name
from trainables.config import TrialConfig
from trainables.gradskip.networks.network_settings import read_networks
from trainables.gradskip.variable_types import as_text
from trainables.gradskip.variables import BY_NAME


def networks_text(values: Mapping[str, Any]) -> str:
    """Return the settings of single networks in short form; empty if none has its own.

    >>> networks_text({"network_settings": ["critic.CAC_VAR_START_THR=0.97", "critic.CAC_BRAKING_DISTANCE=5"]})
    'critic: START_THR=0.97 BRAKING_DISTANCE=5'
    """
    found = read_networks(values.get("network_settings") or ())
    return "; ".join(
        f"{network}: " + " ".join(f"{short_name(name)}={as_text(value)}" for name, value in own.items())
        for network, own in found.items()
    )


def network_lines(config: TrialConfig) -> list[str]:
    """Return comments with settings by network: how to try them, and lines of code to paste."""
    own = config.network_settings or ()
    common = [f"{name}={as_text(getattr(config, name))}" for name in BY_NAME if getattr(config, name) is not None]
    options = "".join(f" --option {shlex.quote(option)}" for option in config.options)
    lines = [
        "# Each network has settings of its own, which no variable sets:",
        f"#   python -m tune_cac trial --workload {config.workload}{options} --epochs {config.epochs} \\",
        f"#     --method {config.method} " + " ".join(f"--set {shlex.quote(text)}" for text in (*common, *own)),
    ]
    networks = read_networks(own)
    if networks:
        lines.append("# In a script of yours, with an optimizer for each network (settings=):")
    for network in networks:
        environment = config.settings_of_network(network).to_environment()
        values = ", ".join(f"{name}={value!r}" for name, value in environment.items())
        lines += textwrap.wrap(
            f"{network} = tune_cac.gradskip.Settings.from_environment({{}}, {values})",
            width=LINE_WIDTH, initial_indent="#   ", subsequent_indent="#       ", break_long_words=False,
        )  # fmt: skip
    return lines
