"""A frozen prefix: through which layer, from when, with what held, for how many epochs; for fine-tuning.

Settings are explicit stops. With the default sampler the search decides them one after the other (`next_point`):
whether norms hold their statistics, the depth that is frozen from the first step on, by bisection, a deeper prefix that
follows later, fewer epochs; what loses too much is tried with doubled learning rates. What would be the answer and
loses too much over further seeds counts as too deep, and the search goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from search_spaces.manual_layers import by_depth, in_order, stoppable
from search_spaces.space import Space, SpaceContext, Suggests, Tried
from trainables.gradskip.settings import OFF_FIELD

#: When a prefix may be frozen, and when a deeper one may follow it, as shares of the run.
STARTS, LATER = (0.0, 0.1, 0.25, 0.5), (0.25, 0.5, 0.75)
#: The one of both that `next_point` tries for what is too deep from the first step on.
HALF = 0.5
#: Parts of the depth that are told apart, and the least difference in compute saved, a fraction of the run's: so much
#: more an answer might save.
PARTS, WORTHWHILE = 16, 0.03
LAYER, ITERATION = "CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR"
NORMS, MODE, RATE = "CAC_NORM_STATISTICS", "CAC_PREFIX_MODE", "CAC_LR_FACTOR"
HELD, MOVING = "hold_all", "go_on"
#: Factors on the learning rate: fewer layers, and fewer epochs, may want a higher one.
RATES = (1.0, 2.0)
#: Parameters that are not asked for where a field is fixed (`--set`).
SETTLES = {LAYER: ("frozen", "depth"), ITERATION: ("frozen", "start"), NORMS: (NORMS,), MODE: (MODE,), RATE: (RATE,)}


def prefix_ends(context: SpaceContext) -> tuple[int, ...]:
    """Return the numbers of the parameters through which a prefix may reach: ends of blocks where they are known."""
    return tuple(context.fixed.get(LAYER, ()))[:1] or context.kept_ends or stoppable(context)


def settled(context: SpaceContext) -> set[str]:
    """Return the parameters that fixed fields decide."""
    return {parameter for name, parameters in SETTLES.items() if name in context.fixed for parameter in parameters}


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for one setting: nothing frozen, a prefix, or a prefix and later a deeper one."""
    ends, known = prefix_ends(context), settled(context)
    found: dict[str, Any] = {}
    if context.has_norms and NORMS not in known:
        found[NORMS] = trial.suggest_categorical(NORMS, (HELD, MOVING))
    if ends and RATE not in known and (rate := trial.suggest_categorical(RATE, RATES)) != 1:
        found[RATE] = rate
    kinds = ("prefix", "deepening", "nothing") if len(ends) > 1 else ("prefix", "nothing")
    kind = "nothing" if not ends else "prefix"
    if ends and "frozen" not in known:
        kind = trial.suggest_categorical("frozen", kinds)
    if kind == "nothing":
        return {**OFF_FIELD, **found}
    mode = context.fixed[MODE] if MODE in known else trial.suggest_categorical(MODE, ("eval", "train"))
    depth = 0 if "depth" in known else trial.suggest_int("depth", 0, len(ends) - 1)
    start = 0.0 if "start" in known else trial.suggest_categorical("start", STARTS)
    shares = [(depth, start)]
    if kind == "deepening":
        deeper = min(len(ends) - 1, depth + trial.suggest_int("deeper", 1, len(ends) - 1))
        shares.append((deeper, start + (1 - start) * trial.suggest_categorical("later", LATER)))
    stops = in_order(
        (depth, min(context.total_steps - 1, round(at * context.total_steps) or -1)) for depth, at in shares
    )
    return {
        LAYER: tuple(ends[depth] for depth, _ in stops),
        ITERATION: tuple(iteration for _, iteration in stops),
        MODE: mode,
        "forward_cache_mb": context.forward_cache_mb if mode == "eval" else 0,
        **found,
    }


def point(
    context: SpaceContext, depth: int | None, *, norms: str = HELD, rate: float = 1.0, start: float = 0.0,
    deeper: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return the parameters of a prefix frozen through a depth, in evaluation mode, and later deeper; None: nothing."""
    known = settled(context)
    values: dict[str, Any] = {NORMS: norms} if context.has_norms else {}
    if prefix_ends(context):
        values[RATE] = rate
    if prefix_ends(context) and depth is None:
        values["frozen"] = "nothing"
    elif prefix_ends(context):
        values |= {"frozen": "prefix", MODE: "eval", "depth": depth, "start": start}
        if deeper and "frozen" not in known:
            values |= {"frozen": "deepening", "deeper": deeper, "later": HALF}
    return {name: value for name, value in values.items() if name not in known}


def start(context: SpaceContext) -> dict[str, Any]:
    """Return a prefix of half of the depth, all norms held."""
    ends = prefix_ends(context)
    return point(context, (len(ends) - 1) // 2 if ends else None)


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
    full, ends, norms, rate = context.epochs, prefix_ends(context), HELD, RATES[0]
    doubled = {} if RATE in settled(context) else dict([RATES])  # the factor to try behind another

    def at(depth: int | None, start: float = 0.0, deeper: int = 0, epochs: int = full) -> Tried:
        parameters = point(context, depth, norms=norms, rate=rate, start=start, deeper=deeper)
        wanted = Tried(parameters=parameters, epochs=epochs)
        return wanted.among(tried) or wanted

    def deepest(
        reached: int, too_deep: int, setting: Callable[[int], Tried]
    ) -> Generator[Tried, None, tuple[int, int]]:
        """Bisect between two depths; return the deepest one that is within the allowed loss, and one that is not."""
        saved_deeper = 1.0
        while too_deep - reached > max(1, len(ends) // PARTS):
            if reached >= 0 and saved_deeper - setting(reached).saved < WORTHWHILE:
                break
            middle = (reached + too_deep) // 2
            yield setting(middle)
            if setting(middle).is_within:
                reached = middle
            else:
                too_deep, saved_deeper = middle, setting(middle).saved
        return reached, too_deep

    if context.has_norms and ends:
        yield (held := at((len(ends) - 1) // 2))
        if not held.is_within:
            norms = MOVING
            yield (moving := at((len(ends) - 1) // 2))
            norms = MOVING if moving.lost < held.lost else HELD
    first, too_deep = yield from deepest(-1, len(ends), at)
    lost = max((one.lost for one in tried if one.is_within), default=-math.inf)
    # What is too deep over further seeds alone has lost no more than others here.
    if too_deep < len(ends) and rate in doubled and at(too_deep).lost > lost:
        rate = doubled[rate]
        yield (faster := at(too_deep))
        if faster.is_within:
            first, too_deep = yield from deepest(too_deep, len(ends), at)
        else:
            rate = RATES[0]
    found: Callable[..., Tried] | None = partial(at, first) if first >= 0 else None
    if found is None or _is_worth_deepening(context, found().saved, at(too_deep).saved):
        # What is too deep from the first step on may follow later.
        later = (
            partial(at, start=HALF) if found is None else lambda depth, **more: at(first, deeper=depth - first, **more)
        )
        then, _ = yield from deepest(first, len(ends), later)
        found = partial(later, then) if then > first else found
    reached = 0.0 if found is None else found().saved
    for share in context.lengths:
        epochs, slower = max(1, round(share * full)), rate
        if found is None:
            break
        yield found(epochs=epochs)
        if not found(epochs=epochs).is_within and rate in doubled:
            rate = doubled[rate]
            yield found(epochs=epochs)
        if not found(epochs=epochs).is_within:
            rate = slower
            if first > 0 and 1 - share * (1 - reached / 2) > reached:
                yield at(first // 2, epochs=epochs)
            break
    holds = context.has_norms and norms == HELD and NORMS not in settled(context)
    if ends and (holds or rate != RATES[0]) and "frozen" not in settled(context):
        yield at(None)  # what norms and rates do without a frozen layer


def _is_worth_deepening(context: SpaceContext, saved: float, saved_deeper: float) -> bool:
    """Return whether a deeper prefix from half of the run on saves more than its forward cache costs to begin anew."""
    # A forward pass is a third of a step.
    filled_again = saved / 3 / context.epochs if context.forward_cache_mb else 0.0
    return (1 - HALF) * (saved_deeper - saved) > filled_again


def notes(context: SpaceContext) -> list[str]:
    """Return lines that list the layers by depth, and what is fixed."""
    if not (ends := prefix_ends(context)):
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
    may_be_fixed=(*SETTLES, "forward_cache_mb"),
    uses_forward_cache=True,
    meanings={
        "frozen": "whether a prefix is frozen, and whether a deeper one follows",
        "depth": "depth of the layer that the prefix reaches through, among those listed above",
        "start": "share of the run after which the prefix is frozen",
        "deeper": "how many layers the deeper prefix reaches further",
        "later": "share of the rest of the run after which it follows",
    },
    notes=notes,
)
