"""A frozen prefix: through which layer, from when, with what held, for how many epochs; for fine-tuning.

Settings are explicit stops (`CAC_STOP_LAYER_*`). With the default sampler the search decides them one after the other,
what matters most first (`next_point`): whether norms hold their statistics, then the depth that is frozen from the
first step on, by bisection, then fewer epochs at that depth, then a deeper prefix that is frozen later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from search_spaces.manual_layers import by_depth, stoppable
from search_spaces.space import Space, SpaceContext, Suggests, Tried
from trainables.gradskip.settings import OFF_FIELD

#: When a prefix may be frozen, as shares of the run.
STARTS = (0.0, 0.1, 0.25, 0.5)
#: Share of the run from which the prefix is frozen that was too deep from the first step on.
LATER = 0.25
#: Parts of the depth that are told apart: of a network of many layers the answer is a few layers too shallow.
PARTS = 16
NORMS, MODE = "CAC_NORM_STATISTICS", "CAC_PREFIX_MODE"
HELD, MOVING = "hold_all", "go_on"


def prefix_ends(context: SpaceContext) -> tuple[int, ...]:
    """Return the numbers of the parameters through which a prefix may reach: ends of blocks where they are known."""
    return context.kept_ends or stoppable(context)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for one setting: nothing frozen, or a prefix."""
    ends = prefix_ends(context)
    norms = {NORMS: trial.suggest_categorical(NORMS, (HELD, MOVING))} if context.has_norms else {}
    if not ends or trial.suggest_categorical("frozen", ("prefix", "nothing")) == "nothing":
        return {**OFF_FIELD, **norms}
    depth = trial.suggest_int("depth", 0, len(ends) - 1)
    begin = round(trial.suggest_categorical("start", STARTS) * context.total_steps)
    mode = trial.suggest_categorical(MODE, ("eval", "train"))
    return {
        "CAC_STOP_LAYER_NUM": (ends[depth],),
        "CAC_STOP_LAYER_ITR": (min(context.total_steps - 1, begin),),
        MODE: mode,
        "forward_cache_mb": context.forward_cache_mb if mode == "eval" else 0,
        **norms,
    }


def point(context: SpaceContext, depth: int | None, *, norms: str = HELD, start: float = 0.0) -> dict[str, Any]:
    """Return the parameters of a prefix frozen through a depth, in evaluation mode; None for nothing frozen."""
    held = {NORMS: norms} if context.has_norms else {}
    if not prefix_ends(context):
        return held
    if depth is None:
        return {**held, "frozen": "nothing"}
    return {**held, "frozen": "prefix", "depth": depth, "start": start, MODE: "eval"}


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the run with held norms and nothing frozen; without norms, a prefix of half of the depth."""
    ends = prefix_ends(context)
    return point(context, None if context.has_norms or not ends else (len(ends) - 1) // 2)


def next_point(context: SpaceContext, tried: Sequence[Tried]) -> Tried | None:
    """Return the next setting to train; None if there is none, or if one that is being trained decides it."""
    for wanted in _walk(context, tried):
        known = wanted.among(tried)
        if known is None:
            return wanted
        if not known.has_ended:
            return None
    return None


def _walk(context: SpaceContext, tried: Sequence[Tried]) -> Iterator[Tried]:
    """Yield the settings that are wanted; what follows depends on how those before have ended."""
    full, ends, norms = context.epochs, prefix_ends(context), HELD

    def at(depth: int | None, start: float = 0.0, epochs: int = full) -> Tried:
        wanted = Tried(parameters=point(context, depth, norms=norms, start=start), epochs=epochs)
        return wanted.among(tried) or wanted

    if context.has_norms:
        yield at(None)
        if at(None).lost > 0:
            norms = MOVING
    shallow, deep = -1, len(ends)  # frozen through the first no more than allowed is lost, through the second more
    while deep - shallow > max(1, len(ends) // PARTS):
        middle = (shallow + deep) // 2
        yield at(middle)
        shallow, deep = (middle, deep) if at(middle).is_within else (shallow, middle)
    for share in context.lengths if shallow >= 0 else ():
        epochs = max(1, round(share * full))
        yield at(shallow, epochs=epochs)
        if not at(shallow, epochs=epochs).is_within:
            yield at(shallow // 2, epochs=epochs)
            break
    if deep < len(ends):
        yield at(deep, LATER)


def notes(context: SpaceContext) -> list[str]:
    """Return lines that list the layers by depth, and what is fixed."""
    ends = prefix_ends(context)
    if not ends:
        return ["no layer of this model can stop before its last"]
    lines = ["layers by depth; a prefix is every parameter up to the one named:", *by_depth(context, ends)]
    if context.forward_cache_mb:
        lines.append(
            f"in evaluation mode the prefix is computed once a sample: forward_cache_mb={context.forward_cache_mb}"
        )
    return lines


SPACE = Space(
    name="frozen_prefix",
    method="gradskip",
    suggest=suggest,
    start=start,
    start_is_published=False,
    next_point=next_point,
    uses_forward_cache=True,
    meanings={
        "frozen": "whether a prefix is frozen",
        "depth": "depth of the layer that the prefix reaches through, among those listed above",
        "start": "share of the run after which the prefix is frozen",
    },
    notes=notes,
)
