"""A trial's compression settings in one line. Pure; loads no YAML reader.

A schedule's text is never shown in full, only its marked values or its number of lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.formatting import plural

#: Fields whose value is the text of a whole file.
WHOLE_FILES = ("schedule",)
#: Suffix of parameter names, omitted in the output.
_WEIGHT = ".weight"
#: Default temperature, weight and first epoch of distillation (`from_config`).
_TEMPERATURE, _DISTILL_WEIGHT, _DISTILL_FROM = 1.0, 0.5, 0


def compression_text(values: Mapping[str, Any]) -> str:
    r"""Return the compression fields of a configuration in short; empty if none is set.

    Epochs are those of the schedule: from the first that prunes to the one after the last.

    Args:
        values: fields of `TrialConfig` that are set.

    >>> compression_text({"pruning_sensitivities": ("conv1.weight=0.5", "fc.weight=0"), "pruning_start_epoch": 3})
    's: conv1 0.5 from epoch 3'
    >>> compression_text({"agp_final_sparsity": 0.8, "pruning_start_epoch": 0, "pruning_end_epoch": 18})
    'agp 0.8 epochs 0-18 every 1'
    >>> compression_text({"distill_temperature": 4.0, "distill_weight": 0.5, "distill_start_epoch": 0})
    'T=4 w=0.5 from 0'
    >>> compression_text({"schedule": "version: 1\n", "schedule_values": ("pruners.agp.final_sparsity=0.7",)})
    'final_sparsity=0.7'
    """
    parts = [
        marks_text(values.get("schedule_values", ())),
        _sensitivities(values),
        _gradual(values),
        _distillation(values),
    ]
    found = "; ".join(part for part in parts if part)
    return found or ("as scheduled" if "schedule" in values else "")


def _sensitivities(values: Mapping[str, Any]) -> str:
    given = values.get("pruning_sensitivities")
    if given is None:
        return ""
    epochs = "" if "agp_final_sparsity" in values else _epochs(values)
    return f"s: {sensitivities_text(given)}{epochs}"


def sensitivities_text(texts: Sequence[str]) -> str:
    """Return layers and their sensitivities; a layer with sensitivity 0 is never pruned and is omitted.

    >>> sensitivities_text(["conv1.weight=0.5", "conv2.weight=0", "fc.weight=0.25"])
    'conv1 0.5, fc 0.25'
    """
    pairs = [_pair(text) for text in texts]
    return ", ".join(f"{name.removesuffix(_WEIGHT)} {value}" for name, value in pairs if value.strip("0.")) or "none"


def _gradual(values: Mapping[str, Any]) -> str:
    if "agp_final_sparsity" not in values:
        return ""
    initial = values.get("agp_initial_sparsity")
    begin = f"{initial:g} to " if initial else ""
    return f"agp {begin}{values['agp_final_sparsity']:g}{_epochs(values)}"


def _epochs(values: Mapping[str, Any]) -> str:
    """Return the pruning epochs and the pruning frequency as far as they are set."""
    start, end = values.get("pruning_start_epoch"), values.get("pruning_end_epoch")
    frequency = values.get("pruning_frequency")
    if start is not None and end is not None:
        return f" epochs {start}-{end} every {frequency or 1}"
    said = "" if start is None else f" from epoch {start}"
    said += "" if end is None else f" to epoch {end}"
    return said + ("" if frequency is None else f" every {frequency}")


def _distillation(values: Mapping[str, Any]) -> str:
    if not any(name.startswith("distill_") for name in values):
        return ""
    teacher = values.get("distill_teacher")
    return (
        f"T={values.get('distill_temperature', _TEMPERATURE):g} w={values.get('distill_weight', _DISTILL_WEIGHT):g} "
        f"from {values.get('distill_start_epoch', _DISTILL_FROM)}" + (f" teacher {teacher}" if teacher else "")
    )


def marks_text(texts: Sequence[str]) -> str:
    """Return the values of a schedule's marks, each named by the shortest unambiguous end of its path.

    >>> marks_text(["pruners.a.final_sparsity=0.7", "pruners.b.final_sparsity=0.8", "policies.0.ending_epoch=9"])
    'a.final_sparsity=0.7 b.final_sparsity=0.8 ending_epoch=9'
    """
    pairs = [_pair(text) for text in texts]
    paths = [name.removesuffix(_WEIGHT).split(".") for name, _ in pairs]
    return " ".join(f"{_last(path, paths)}={value}" for path, (_, value) in zip(paths, pairs, strict=True))


def _last(path: list[str], paths: Sequence[list[str]]) -> str:
    """Return the shortest end of a path that no other path has and that does not begin with a list index."""
    for length in range(1, len(path)):
        end = path[-length:]
        if not end[0].isdigit() and sum(other[-length:] == end for other in paths) == 1:
            return ".".join(end)
    return ".".join(path)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def schedule_summary(text: str) -> str:
    r"""Return a replacement for a schedule's text that fits into one cell or line.

    >>> schedule_summary("version: 1\npolicies: []\n")
    'YAML of 2 lines'
    """
    return f"YAML of {plural(len(text.strip().splitlines()), 'line')}"


def without_files(hold: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search's fixed parameters for display in one line; a whole file is replaced by its length."""
    return {name: schedule_summary(value) if name in WHOLE_FILES else value for name, value in hold.items()}


def field_text(name: str, text: str) -> str:
    """Return a table's field in short form; lists are given as JSON.

    >>> field_text("pruning_sensitivities", '["conv1.weight=0.5"]'), field_text("CAC_STOP_LAYER_NUM", "[3, 9]")
    ('conv1 0.5', '3,9')
    """
    if name in WHOLE_FILES:
        return schedule_summary(text)
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, list):
        return text
    if name == "pruning_sensitivities":
        return sensitivities_text(found)
    return marks_text(found) if name == "schedule_values" else ",".join(map(str, found))
