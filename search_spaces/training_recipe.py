"""The training recipe: what depends on model and machine, by the clock: precision, batch size, kernels, loading.

Which fields are asked for depends on the run: loading only where batches can be prepared by other processes, and so on.
Every trial trains alone, because its time is measured. Joined with a space of Gradient-Skip, both are searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.savings import TIME
from trainables.training.recipe.fields import RECIPE_MEANINGS

#: A choice that leaves a field as it is.
DEFAULT = "unchanged"
#: Fields whose first alternative the search starts with: they are faster on many machines, and train the same model.
STARTS_WITH = ("precision", "fused_optimizer", "channels_last")
#: A compiled model is not checkpointed: the compiler itself chooses what is computed again.
_EXCLUDES = {"activation_checkpointing": "compile_mode"}


def choices(context: SpaceContext) -> dict[str, tuple[str, ...]]:
    """Return the choices of each field on a run, as texts."""
    return {name: tuple(map(_text, values)) for name, values in context.recipe.items()}


def _text(value: Any) -> str:
    return DEFAULT if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for each field that makes a difference on the run; those left at their default are not set."""
    found: dict[str, Any] = {}
    texts_of = choices(context)
    # What excludes another field is asked for before it.
    for name in sorted(context.recipe, key=lambda name: name in _EXCLUDES):
        if _EXCLUDES.get(name) in found:
            continue
        texts = texts_of[name]
        value = context.recipe[name][texts.index(trial.suggest_categorical(name, texts))]
        if value is not None:
            found[name] = value
    return found


def start(context: SpaceContext) -> dict[str, Any]:
    """Return what is faster on many machines; everything else as it is."""
    return {name: texts[1] if name in STARTS_WITH else texts[0] for name, texts in choices(context).items()}


def one_by_one(context: SpaceContext) -> list[dict[str, str]]:
    """Return the baseline with one choice changed, for each choice: what each brings by itself."""
    texts_of, found = choices(context), []
    unchanged = {name: texts[0] for name, texts in texts_of.items()}
    for name, texts in texts_of.items():
        for text in texts[1:]:
            changed = {**unchanged, name: text}
            found.append({key: value for key, value in changed.items() if key not in _excluded(changed)})
    return found


def _excluded(chosen: Mapping[str, str]) -> set[str]:
    return {name for name, other in _EXCLUDES.items() if chosen.get(other, DEFAULT) != DEFAULT}


def notes(context: SpaceContext) -> list[str]:
    """Return lines on what is searched and how it is measured."""
    if not context.recipe:
        return ["nothing of the recipe makes a difference for this workload"]
    return [
        "trials run one at a time, each alone and in a process of its own, so that times and memory are comparable; "
        "the time of compilation counts"
    ]


SPACE = Space(
    name="training_recipe",
    method="recipe",
    suggest=suggest,
    start=start,
    further_starts=one_by_one,
    free=tuple(name for name in RECIPE_MEANINGS if name not in _EXCLUDES.values()),
    start_is_published=False,
    meanings=RECIPE_MEANINGS,
    notes=notes,
    saving=TIME,
)
