"""Settings of each network: NETWORK.VARIABLE=VALUE texts over the ``CAC_*`` variables of all. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.settings import Settings
from trainables.gradskip.variable_types import as_text
from trainables.gradskip.variables import VARIABLES, variable_named

#: Rules that may decide for one of several networks: their signals are of the weights alone, or there is none.
NETWORK_RULES = ("off", "auto", "manual", "linear")


def network_text(network: str, name: str, value: Any) -> str:
    """Return one setting of a network as a configuration stores it.

    >>> network_text("generator", "CAC_STOP_LAYER_NUM", (3, 9))
    'generator.CAC_STOP_LAYER_NUM=3,9'
    """
    return f"{network}.{name}={as_text(value)}"


def split_name(name: str) -> tuple[str, str] | None:
    """Return network and variable of ``NETWORK.CAC_...``; None for another name.

    >>> split_name("generator.CAC_VAR_START_THR"), split_name("CAC_VAR_START_THR"), split_name("a.b")
    (('generator', 'CAC_VAR_START_THR'), None, None)
    """
    network, _, variable = name.rpartition(".")
    return (network, variable) if network and variable.startswith("CAC_") else None


def read_networks(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the variables of each network by name, in types.

    >>> read_networks(["generator.CAC_STOP_LAYER_NUM=3,9", "generator.CAC_STOP_LAYER_ITR=10,20"])
    {'generator': {'CAC_STOP_LAYER_NUM': (3, 9), 'CAC_STOP_LAYER_ITR': (10, 20)}}

    Raises:
        UserError: a text of another form, an unknown variable, or a value that is not valid.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, separator, value = str(text).partition("=")
        parts = split_name(name.strip())
        if parts is None or not separator:
            raise UserError(
                "network_settings must be NETWORK.VARIABLE=VALUE, such as generator.CAC_VAR_START_THR=0.97, got "
                f"{text!r}"
            )
        network, variable = parts
        found.setdefault(network, {})[variable] = variable_named(variable).read(value.strip())
    return found


def canonical_networks(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the texts in their canonical form: networks by name, the variables of each in order of declaration.

    Raises:
        UserError: as `read_networks`.
    """
    found = read_networks(texts)
    return tuple(
        network_text(network, variable.name, found[network][variable.name])
        for network in sorted(found)
        for variable in VARIABLES
        if variable.name in found[network]
    )


def settings_of(variables: Mapping[str, Any], texts: Iterable[str], network: str) -> Settings:
    """Return the settings of one network: the variables of all networks, under its own.

    Args:
        variables: ``CAC_*`` variables of all networks that are set, by name.
        texts: the networks' own.
        network: its name.

    Raises:
        UserError: a value that is not valid, or a rule that networks cannot have.
    """
    own = read_networks(texts).get(network, {})
    settings = Settings.from_environment({}, **{**variables, **own})
    if settings.mode not in NETWORK_RULES:
        raise UserError(
            f"CAC_RULE={settings.mode} of network {network} needs measurements of its own, which settings by network "
            "do not have: use CAC_RULE=variance, linear, or manual stops"
        )
    if not settings.prefix_autograd:
        raise UserError(
            f"CAC_PREFIX_AUTOGRAD must be 1 with settings by network, got 0 for {network}: leave it out, for the "
            "networks' backward passes are connected"
        )
    return settings


def check_networks(texts: Iterable[str], networks: Iterable[str], workload: str) -> None:
    """Raise UserError for a network that a workload's model does not have.

    Args:
        texts: the networks' own settings.
        networks: the model's.
        workload: its name.
    """
    known = tuple(networks)
    if not known:
        raise UserError(
            f"settings by network need a model of several networks, got workload {workload}, which names none: set the "
            "CAC_* variables themselves, or have the workload name its networks"
        )
    for network in read_networks(texts):
        if network not in known:
            raise unknown_name(f"network of workload {workload}", network, known)
