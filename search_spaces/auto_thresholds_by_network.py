"""Gradient-Skip in auto mode on each network of a model, such as a generator, with thresholds of its own.

Each network is asked for what `auto_thresholds` asks for, under its name: ``generator.CAC_VAR_START_THR``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces import auto_thresholds
from search_spaces.space import Branch, Space, SpaceContext, Suggests, branch_name
from trainables.gradskip.networks.network_settings import network_text
from trainables.registry import BY_NETWORK


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the settings of every network."""
    context = _as_of_any_network(context)
    return {
        "network_settings": tuple(
            network_text(network, name, value)
            for network in context.networks
            for name, value in auto_thresholds.suggest(Branch(trial, network), context).items()
        )
    }


def _as_of_any_network(context: SpaceContext) -> SpaceContext:
    """Return the context with one range of thresholds: the first layer of one network is a later one of the model."""
    known = [found for found in (context.start_thr_range, context.later_thr_range) if found]
    wide = (min(low for low, _ in known), max(high for _, high in known)) if known else None
    return replace(context, start_thr_range=wide, later_thr_range=wide, latest_start_itr=None)


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the published defaults for every network, with iterations scaled from ImageNet's run to this one."""
    common = auto_thresholds.start(context)
    return {branch_name(network, name): value for network in context.networks for name, value in common.items()}


SPACE = Space(name="auto_thresholds_by_network", method=BY_NETWORK, suggest=suggest, start=start)
