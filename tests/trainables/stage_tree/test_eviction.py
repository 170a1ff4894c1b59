"""What is dropped, against counting every fork step by step and a greedy choice that recomputes everything."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from trainables.stage_tree.checkpoints import Entry, StageWeight, expected_cost, to_drop

Stages = dict[str, list[Entry]]


def entry(step: int, *, size: int = 1, kind: str = "any", content: str | None = None) -> Entry:
    return Entry(step=step, kind=kind, bytes=size, sha256=content or f"{kind}-{step}")


def retraining(steps: list[int], weight: StageWeight) -> Fraction:
    """What forks cost in the mean with checkpoints at these steps: each from the nearest one at or before it."""
    total = 0
    for fork in range(weight.start, weight.end):
        total += fork - max([step for step in steps if step <= fork], default=weight.start)
    return Fraction(total * weight.visits, weight.end - weight.start)


def greedy(stages: Stages, weights: dict[str, StageWeight], bytes_to_free: int) -> list[tuple[str, Entry]]:
    """The rule as one would write it down, with every value counted anew after each drop."""
    kept = sorted(
        ((stage, one) for stage, entries in stages.items() for one in entries),
        key=lambda item: (item[0], item[1].kind, item[1].step, item[1].sha256),
    )
    sizes = {one.sha256: one.bytes for _, one in kept}
    dropped: list[tuple[str, Entry]] = []

    def missed(stage: str, one: Entry) -> Fraction:
        steps = [other.step for at, other in kept if at == stage and other.kind == one.kind]
        without = steps.copy()
        without.remove(one.step)
        return (retraining(without, weights[stage]) - retraining(steps, weights[stage])) / one.bytes

    def held() -> set[str]:
        return {one.sha256 for _, one in kept}

    while kept and sum(size for content, size in sizes.items() if content not in held()) < bytes_to_free:
        least = min(kept, key=lambda item: missed(*item))
        kept.remove(least)
        dropped.append(least)
    return [item for item in dropped if item[1].sha256 not in held()]


@st.composite
def forests(draw: st.DrawFn) -> tuple[Stages, dict[str, StageWeight], int]:
    """Spans and sizes are such that no value needs rounding, so both sides see the same ties."""
    stages: Stages = {}
    weights: dict[str, StageWeight] = {}
    sizes = {content: draw(st.sampled_from([1, 2, 8])) for content in "abcdefgh"}
    for stage in ("root", "left", "right")[: draw(st.integers(1, 3))]:
        start, span = draw(st.integers(0, 9)), draw(st.sampled_from([1, 4, 16]))
        weights[stage] = StageWeight(
            start=start,
            end=start + span,
            visits=draw(st.integers(0, 5)),
        )
        places = st.tuples(
            st.integers(start, start + span - 1), st.sampled_from(["any", "ema"]), st.sampled_from("abcdefgh")
        )
        stages[stage] = [
            entry(step, kind=kind, content=content, size=sizes[content])
            for step, kind, content in draw(st.lists(places, unique=True, max_size=8))
        ]
    return stages, weights, draw(st.integers(-1, 40))


@given(forests())
def test_the_choice_is_the_greedy_one(forest: tuple[Stages, dict[str, StageWeight], int]) -> None:
    stages, weights, bytes_to_free = forest
    assert to_drop(stages, weights.__getitem__, bytes_to_free) == greedy(stages, weights, bytes_to_free)


@given(
    steps=st.sets(st.integers(3, 30), min_size=1, max_size=6),
    visits=st.integers(0, 9),
    end=st.integers(31, 50),
    data=st.data(),
)
def test_the_value_is_what_forks_would_retrain_more(
    steps: set[int], visits: int, end: int, data: st.DataObject
) -> None:
    weight = StageWeight(start=3, end=end, visits=visits)
    step = data.draw(st.sampled_from(sorted(steps)))
    more = retraining(sorted(steps - {step}), weight) - retraining(sorted(steps), weight)
    previous = max([other for other in steps if other < step], default=weight.start)
    following = min([other for other in steps if other > step], default=weight.end)
    value = expected_cost(step, previous=previous, following=following, weight=weight)
    assert abs(Fraction(value) - more) <= more / 10**12


def test_thousands_of_checkpoints() -> None:
    stages = {
        f"stage{s}": [entry(step, content=f"{s}-{step}", size=step % 7 + 1) for step in range(s, 5000, 50)]
        for s in range(1, 51)
    }
    weights = {f"stage{s}": StageWeight(start=s - 1, end=5000, visits=s) for s in range(1, 51)}
    total = sum(one.bytes for entries in stages.values() for one in entries)
    dropped = to_drop(stages, weights.__getitem__, total // 2)
    freed = sum(one.bytes for _, one in dropped)
    assert total // 2 <= freed < total // 2 + 7
    assert len(set(dropped)) == len(dropped)
