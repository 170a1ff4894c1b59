"""The compression schedule of a trial's configuration, in plain types. Does not import torch.

A configuration combines up to three parts: a whole schedule with marked values (``schedule``), one sensitivity per
layer or automated gradual pruning (``pruning_sensitivities``, ``agp_*``), and distillation (``distill_*``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from trainables.compression.schedule.parts import KINDS
from trainables.compression.schedule.reading import Mark, read_marks, to_mapping
from trainables.config import TrialConfig
from trainables.errors import UserError

#: Instance names of the components that the fields describe.
PRUNER, GRADUAL, DISTILLER = "sensitivity_pruner", "gradual_pruner", "distiller"
#: Fields that have no effect unless at least one of the listed fields is given.
_NEEDS = {
    "schedule_values": ("schedule",),
    "schedule_compatible": ("schedule",),
    **dict.fromkeys(
        ("pruning_start_epoch", "pruning_end_epoch", "pruning_frequency"),
        ("pruning_sensitivities", "agp_final_sparsity"),
    ),
    **dict.fromkeys(("agp_initial_sparsity", "agp_weights"), ("agp_final_sparsity",)),
    **dict.fromkeys(
        ("distill_temperature", "distill_start_epoch"), ("distill_teacher", "distill_checkpoint", "distill_weight")
    ),
}
#: Default timing of pruning: start and end as shares of the run's epochs, and the frequency in epochs.
START_SHARE, END_SHARE, FREQUENCY = 0.2, 0.6, 1


def schedule_of(config: TrialConfig) -> dict[str, Any]:
    """Return the schedule as a plain mapping with marks filled in; without policies if nothing is compressed.

    UserError: the schedule's text cannot be read, a value belongs to no mark, or a field has no effect.
    """
    for name, owners in _NEEDS.items():
        if getattr(config, name) is not None and all(getattr(config, owner) is None for owner in owners):
            raise UserError(f"{name} has no effect without {' or '.join(owners)}: leave it out, or give that, too")
    schedule: dict[str, Any] = {"version": 1}
    policies: list[dict[str, Any]] = []
    if config.schedule is not None:
        filled = filled_schedule(
            config.schedule, config.schedule_values or (), compatible=bool(config.schedule_compatible)
        )
        policies += filled.pop("policies", [])
        schedule.update(filled)
    start, end = pruning_epochs(config)
    timing = {"starting_epoch": start, "ending_epoch": end, "frequency": config.pruning_frequency or FREQUENCY}
    values = {name: value for name, value in _numbers(config.pruning_sensitivities or ()).items() if value > 0}
    if values:
        arguments: dict[str, Any] = {"class": "SensitivityPruner", "sensitivities": values}
        policies.append(_added(schedule, "pruner", PRUNER, arguments, timing))
    if config.agp_final_sparsity is not None:
        initial = min(config.agp_initial_sparsity or 0.0, config.agp_final_sparsity)
        if not config.agp_weights:
            raise UserError("agp_final_sparsity needs agp_weights, the parameters to prune, got none")
        arguments = {
            "class": "AutomatedGradualPruner",
            "initial_sparsity": initial,
            "final_sparsity": config.agp_final_sparsity,
            "weights": list(config.agp_weights),
        }
        if end - start <= timing["frequency"]:
            raise UserError(
                "automated gradual pruning needs two active epochs: pruning_end_epoch must be above "
                f"pruning_start_epoch + pruning_frequency, got {start} to {end} with frequency {timing['frequency']}"
            )
        if twice := [name for name in values if name in config.agp_weights]:
            raise UserError(
                f"{twice[0]} is pruned by pruning_sensitivities and by agp_weights in the same epochs, so that the "
                "second would undo the first: leave it out of one"
            )
        if config.agp_final_sparsity > initial:
            policies.append(_added(schedule, "pruner", GRADUAL, arguments, timing))
    if (config.distill_weight, config.distill_teacher, config.distill_checkpoint) != (None, None, None):
        weight = 0.5 if config.distill_weight is None else config.distill_weight
        arguments = {
            "class": "KnowledgeDistillation",
            "temperature": config.distill_temperature or 1.0,
            "distill_weight": weight,
            "student_weight": round(1.0 - weight, 9),
        }
        given = {"teacher": config.distill_teacher, "checkpoint": config.distill_checkpoint}
        arguments |= {name: value for name, value in given.items() if value is not None}
        begin = config.distill_start_epoch or 0
        if begin >= config.epochs:
            raise UserError(
                f"distill_start_epoch must be below the {config.epochs} epochs of the run, got {begin}: begin earlier, "
                "or give more epochs"
            )
        if weight > 0:
            timing = {"starting_epoch": begin, "ending_epoch": config.epochs, "frequency": 1}
            policies.append(_added(schedule, "distiller", DISTILLER, arguments, timing))
    return {**schedule, "policies": policies}


def pruning_epochs(config: TrialConfig) -> tuple[int, int]:
    """Return the first epoch of pruning and the epoch after the last, from the configuration or by default.

    UserError: both are given and the end is not above the start.
    """
    start = config.pruning_start_epoch
    if start is None:
        start = min(config.epochs - 1, int(START_SHARE * config.epochs))
    end = config.pruning_end_epoch
    if end is None:
        end = max(start + 1, int(END_SHARE * config.epochs))
    elif config.pruning_start_epoch is None:
        start = min(start, end - 1)
    if end <= start:
        raise UserError(
            f"pruning_end_epoch must be above pruning_start_epoch {start} (the end is exclusive), got {end}"
        )
    return start, end


def filled_schedule(text: str, values: tuple[str, ...], *, compatible: bool = False) -> dict[str, Any]:
    """Return a schedule's text as a plain mapping with its marked values, texts NAME=VALUE, filled in.

    A mark without a value gets the middle of its range. What Distiller silently accepted is left out without warnings
    if ``compatible``: they were given when the file was read. UserError: a value belongs to no mark, or the text cannot
    be read.
    """
    marked = read_marks(text)
    given: dict[str, Any] = {}
    for item in values:
        name, _, value = item.rpartition("=")
        if name not in marked.marks:
            raise UserError(f"schedule_values has {name!r}, which is no marked value of the schedule: "
                            f"{', '.join(marked.marks) or 'it has none'}")  # fmt: skip
        given[name] = _read(marked.marks[name], value)
    if not compatible:
        return dict(marked.fill({**marked.middles(), **given}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return to_mapping(marked.read({**marked.middles(), **given}, compatible=True))


def _read(mark: Mark, text: str) -> Any:
    """Convert text to a mark's value; invalid text is returned unchanged, and the mark rejects it later."""
    if mark.choices is not None:
        return next((choice for choice in mark.choices if str(choice) == text), text)
    try:
        return int(text) if mark.integer else float(text)
    except ValueError:
        return text


def _numbers(texts: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            separator = ""
        if not separator or not found[name] >= 0:
            raise UserError(f"pruning_sensitivities must be texts NAME=NUMBER with numbers >= 0, got {text!r}")
    return found


def _added(
    schedule: dict[str, Any], kind: str, name: str, component: Mapping[str, Any], timing: Mapping[str, int]
) -> dict[str, Any]:
    section = KINDS[kind]
    if name in schedule.get(section, {}):
        raise UserError(f"the schedule has {section}.{name} already: rename it, for the search adds one of that name")
    schedule[section] = {**schedule.get(section, {}), name: dict(component)}
    return {kind: {"instance_name": name}, **timing}
