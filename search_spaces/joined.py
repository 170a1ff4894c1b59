"""Several spaces searched together: each trial has the parameters of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.space import ANY_RUN, Space, SpaceContext, Suggests, corners, describe
from trainables.config import JOINS_GRADSKIP
from trainables.errors import UserError
from trainables.gradients.fields import ESTIMATORS
from trainables.gradskip.rules.choice import NAMED
from trainables.savings import BOTH, BOTH_SPARSE, SPARSE, TIME, TRAINING

#: Methods in the order of a joined method's name.
_ORDER = ("gradskip", "compression", *JOINS_GRADSKIP)

#: Steps of a compiled run at which layers may stop.
COMPILED_STOPS = 3
#: Fields that decide this, if the search fixes them.
GATHERING = ("compile_mode", "batch_size", "CAC_STOP_INTERVAL")


@dataclass(frozen=True)
class _All:
    """The functions of a joined space; methods of an object, not closures, so that it can be sent between processes."""

    spaces: tuple[Space, ...]

    def suggest(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        found = {name: value for space in self.spaces for name, value in space.suggest(trial, context).items()}
        values = {**context.fixed, **found}
        rule, decides = NAMED.get(str(values.get("CAC_RULE"))), any(name.startswith("CAC_") for name in found)
        is_gathered = decides and "CAC_STOP_LAYER_ITR" not in values and (rule is None or rule.brakes)
        if values.get("compile_mode") and "CAC_STOP_INTERVAL" not in values and is_gathered:
            # Each new set of stopped layers is compiled anew, which takes as long as many steps.
            found["CAC_STOP_INTERVAL"] = -(-_steps(context, values.get("batch_size")) // (COMPILED_STOPS + 1))
        return found

    def start(self, context: SpaceContext) -> Mapping[str, Any]:
        return {name: value for space in self.spaces for name, value in space.start(context).items()}

    def further_starts(self, context: SpaceContext) -> list[dict[str, Any]]:
        common = self.start(context)
        return [{**common, **found} for space in self.spaces for found in space.further_starts(context)]

    def notes(self, context: SpaceContext) -> list[str]:
        return [f"{space.name}: {note}" for space in self.spaces for note in space.notes(context)]


def _steps(context: SpaceContext, batch_size: int | None) -> int:
    """Return the steps of a run with batches of that size (None: the workload's own), or a few more than it has."""
    in_epoch = -(-context.total_steps // context.epochs)
    if batch_size is not None and context.batch_size is not None:
        in_epoch = -(-in_epoch * context.batch_size // batch_size)
    return in_epoch * context.epochs


def compiled(space: Space) -> Space:
    """Return the space for models that are compiled in every trial: its stops come at few steps."""
    return replace(space, suggest=_All((space,)).suggest, may_be_fixed=(*GATHERING, *space.may_be_fixed))


def joined(spaces: Sequence[Space]) -> Space:
    """Return one space that combines the spaces.

    Raises:
        UserError: two of them search the same parameter, or no trial can have the parameters of both.
    """
    names = [space.name for space in spaces]
    methods = [space.method for space in spaces]
    if len(set(names)) < len(names):
        raise UserError(f"a space can be searched once in a trial, got {'+'.join(names)}")
    ours = [space.method for space in spaces if space.name.isidentifier()]
    if ours.count("gradskip") > 1:
        raise UserError(
            f"spaces of Gradient-Skip can't be searched together, got {'+'.join(names)}: they set the same variables; "
            "join one of them with a space of compression"
        )
    alone = [space for space in spaces if space.method in ESTIMATORS and space.method not in JOINS_GRADSKIP]
    if alone and len(spaces) > 1:
        raise UserError(
            f"space {alone[0].name} can't be searched together with another, got {'+'.join(names)}: an estimator "
            "replaces the gradients that other methods read; search it alone and compare the studies"
        )
    beside = [space for space in spaces if space.method in JOINS_GRADSKIP]
    if beside and not {*methods} <= {beside[0].method, "gradskip", "none"}:
        raise UserError(
            f"space {beside[0].name} can be searched together with spaces of Gradient-Skip alone, got "
            f"{'+'.join(names)}: join auto_thresholds, braking_distance or manual_layers"
        )
    parts = {part for method in methods for part in method.split("+")}
    others = parts - {"gradskip", "none", "recipe"}
    asked: dict[str, str] = {}
    for space in spaces:
        ends = corners(space, ANY_RUN)
        parameters = [found.name for found in describe(space, ANY_RUN)]
        for name in dict.fromkeys([*(name for corner in ends for name in corner), *parameters]):
            if name in asked:
                raise UserError(f"spaces {asked[name]} and {space.name} both search {name}: join others")
            asked[name] = space.name
        if others and {corner.get("CAC_RULE", "variance") for corner in ends} != {"variance"}:
            raise UserError(
                f"space {space.name} can't be searched together with {' and '.join(sorted(others))}, got "
                f"{'+'.join(names)}: other rules than variance look at more than weights; join auto_thresholds, "
                "braking_distance or manual_layers"
            )
    together = _All(tuple(spaces))
    savings = {space.saving for space in spaces if space.method != "none"} or {TRAINING}
    method = "+".join(method for method in _ORDER if method in parts)
    return Space(
        name="+".join(names),
        method=method or ("recipe" if "recipe" in parts else "none"),
        suggest=together.suggest,
        start=together.start,
        further_starts=together.further_starts,
        uses_forward_cache=any(space.uses_forward_cache for space in spaces),
        may_be_fixed=(*GATHERING, *(name for space in spaces for name in space.may_be_fixed)),
        free=tuple(name for space in spaces for name in space.free),
        start_is_published=all(space.start_is_published for space in spaces),
        meanings={name: meaning for space in spaces for name, meaning in space.meanings.items()},
        notes=together.notes,
        saving=_joint_saving(savings),
        description="; ".join(space.description for space in spaces),
    )


def _joint_saving(savings: set[str]) -> str:
    """Return the saving that counts all of these."""
    if len(savings) == 1:
        return next(iter(savings))
    if TIME in savings:  # the clock shows what all of them save
        return TIME
    if TRAINING in savings:
        return BOTH_SPARSE if SPARSE in savings else BOTH
    return SPARSE
