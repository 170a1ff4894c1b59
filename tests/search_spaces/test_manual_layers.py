"""Manual stops: always a valid pair of lists, and the layers are named."""

from __future__ import annotations

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import optuna
from hypothesis import given

from search_spaces import SpaceContext, load
from search_spaces.manual_layers import in_order

NAMES = tuple(f"p{i}.weight" for i in range(20))
UNITS = SpaceContext(total_steps=300, layer_names=NAMES, unit_ends=(2, 5, 8))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
@hypothesis.example([(1, 5), (1, 9), (2, 9)])
def test_stops_are_strictly_ascending_and_made_of_what_was_asked_for(stops: list[tuple[int, int]]) -> None:
    found = in_order(stops)
    assert found
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))
    assert {d for d, _ in found} <= {d for d, _ in stops}
    assert {i for _, i in found} <= {i for _, i in stops}
    assert max(found)[0] == max(d for d, _ in stops)  # the deepest layer is never lost
    assert min(i for _, i in found) == min(i for _, i in stops)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_dropping_a_stop_changes_nothing_that_happens(stops: list[tuple[int, int]]) -> None:
    pairs = list(zip(sorted(d for d, _ in stops), sorted(i for _, i in stops), strict=True))
    for now in range(6):
        assert max((d for d, i in in_order(stops) if i <= now), default=-1) == max(
            (d for d, i in pairs if i <= now), default=-1
        )


def test_layers_come_from_the_workload_and_every_depth_and_count_is_tried() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [load("manual_layers").suggest(study.ask(), UNITS) for _ in range(300)]
    assert {n for values in found for n in values["CAC_STOP_LAYER_NUM"]} == {2, 5, 8}
    assert {len(values["CAC_STOP_LAYER_NUM"]) for values in found} == {1, 2, 3}
    assert all(0 <= i < 300 for values in found for i in values["CAC_STOP_LAYER_ITR"])


def test_the_notes_name_the_layers() -> None:
    assert [line for line in load("manual_layers").notes(UNITS) if "CAC_STOP" in line] == [
        "  0: p2.weight (CAC_STOP_LAYER_NUM=2)",
        "  1: p5.weight (CAC_STOP_LAYER_NUM=5)",
        "  2: p8.weight (CAC_STOP_LAYER_NUM=8)",
    ]
