"""Descriptions of interventions in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.presentation.estimator_text import estimator_text
from trainables.gradients.fields import ESTIMATORS
from trainables.gradskip.settings import Settings

#: The key of a compression schedule's actions (`trainables.compression.trial.replay`).
_SCHEDULE = "compression"
#: Text templates for the other effects of a stop, by key.
_HOW = {"norm_statistics": "norm statistics {}", "forward_cache_mb": "forward cache {} MB"}


def action_words(action: str, layer_names: Sequence[str], *, before: str | None = None) -> str:
    """Describe an action in words.

    Args:
        action: an intervention's action.
        layer_names: names of the parameters by number, as far as they are known.
        before: the action of the previous intervention, if there was one.

    >>> action_words('{"braking":6,"stop":[0,1]}', ["conv1.weight", "conv1.bias"])
    'stop through conv1.bias, braking 6'
    >>> action_words('{"prune":0.5}', [])
    'prune 0.5'
    >>> action_words('{"central_difference":{"gradient_epsilon":0.01,"gradient_layers":["fc.bias"]}}', [])
    'central difference gradient_layers=fc.bias gradient_epsilon=0.01'
    """
    values = _values(action)
    if values is None:
        return action
    schedule = values.pop(_SCHEDULE, None)
    begins = "" if schedule is None else _schedule_words(schedule)
    return ", ".join(part for part in (begins, _other_words(values, layer_names, before)) if part)


def _other_words(values: dict[str, Any], layer_names: Sequence[str], before: str | None) -> str:
    if "stop" in values:
        return _stop_words(values, layer_names, _values(before or "") or {})
    if "rule" in values:
        return _rule_words(values)
    for method in ESTIMATORS:
        if method in values:
            return f"{method.replace('_', ' ')} {estimator_text(values[method], digits=4)}"
    return ", ".join(_pair(name, value) for name, value in values.items())


def _values(action: str) -> dict[str, Any] | None:
    try:
        values = json.loads(action)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _stop_words(values: Mapping[str, Any], layer_names: Sequence[str], before: Mapping[str, Any]) -> str:
    stopped = [int(number) for number in values["stop"]]
    if "order" in values:  # custom order: the highest number may not be the last layer stopped, so name the new ones
        new = sorted(set(stopped) - set(before.get("stop", ()))) or stopped
        others = f" and {len(new) - 2} more" if len(new) > 2 else ""
        parts = [f"stop {', '.join(_layer(number, layer_names) for number in new[:2])}{others}"]
    else:
        parts = [f"stop through {_layer(max(stopped), layer_names)}" if stopped else "stop nothing"]
    if values.get("braking"):
        parts.append(f"braking {values['braking']}")
    parts += [_pair(name, value) for name, value in values.items() if name not in ("stop", "braking", "order")]
    return ", ".join(parts)


def _schedule_words(acts: Sequence[Any]) -> str:
    """Describe the policies of a compression schedule that begin here, by the instances that they apply.

    >>> _schedule_words([{"policy": {"pruner": {"instance_name": "agp"}}}, "learning rates"])
    'agp, learning rates begin'
    """
    names = dict.fromkeys(act if isinstance(act, str) else _instance(act) for act in acts)
    return f"{', '.join(names)} begin{'' if len(names) > 1 else 's'}"


def _instance(act: Mapping[str, Any]) -> str:
    inner = [part["instance_name"] for part in act["policy"].values() if isinstance(part, dict)]
    return str(inner[0]) if inner else "a policy"


def _rule_words(values: Mapping[str, Any]) -> str:
    """Describe a rule that applies to the whole run: name, iterations and settings that differ from the defaults."""
    schedule = ("rule", "rule_start_itr", "rule_end_itr")
    begin, end = values.get("rule_start_itr"), values.get("rule_end_itr")
    defaults = vars(Settings())
    told = [
        _pair(name.removeprefix("rule_"), value)
        for name, value in values.items()
        if name not in schedule and value != _plain(defaults.get(name))
    ]
    return ", ".join([f"{values['rule']} {begin}..{end}", *told])


def _layer(number: int, layer_names: Sequence[str]) -> str:
    return layer_names[number] if number < len(layer_names) else f"parameter {number}"


def _pair(name: str, value: Any) -> str:
    if name in _HOW:
        return _HOW[name].format(value)
    said = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if isinstance(value, bool):
        said = "on" if value else "off"
    return f"{name.replace('_', ' ')} {said}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
