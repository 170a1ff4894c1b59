"""The epoch table against published numbers and counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.compression.schedule import (
    ModelFacts,
    epoch_table,
    planned_share,
    read_schedule,
    resolve,
    table_cells,
)


def agp(final: float, *weights: str, initial: float = 0.05) -> dict[str, Any]:
    return {
        "class": "AutomatedGradualPruner", "initial_sparsity": initial, "final_sparsity": final,
        "weights": list(weights),
    }  # fmt: skip


def schedule_of(pruners: dict[str, Any], *policies: dict[str, Any], **sections: Any) -> Any:
    return read_schedule({"version": 1, "pruners": pruners, **sections, "policies": list(policies)})


def use(name: str, start: int, end: int, every: int = 1, kind: str = "pruner", **args: Any) -> dict[str, Any]:
    inner = {"instance_name": name, **({"args": args} if args else {})}
    return {kind: inner, "starting_epoch": start, "ending_epoch": end, "frequency": every}


def test_gradual_pruning_as_published() -> None:
    schedule = schedule_of({"p": agp(0.8, "w")}, use("p", 0, 10, 2))
    shares = [planned_share(schedule.pruners["p"], schedule.policies[0], epoch) for epoch in (0, 2, 4, 6, 8)]
    assert [share and share[0] for share in shares] == pytest.approx([0.05, 0.4836, 0.7063, 0.7883, 0.8], abs=5e-5)
    assert all(share is not None and share[0] == share[1] for share in shares)


def test_a_gradual_ranking_plans_a_growing_share_of_structures() -> None:
    arguments = agp(0.5, "a", initial=0.1) | {"class": "GradientRankedFilterPruner_AGP", "group_type": "Filters"}
    schedule = schedule_of({"p": arguments}, use("p", 4, 7))
    shares = [planned_share(schedule.pruners["p"], schedule.policies[0], epoch) for epoch in (4, 5, 6)]
    # 0.5 - 0.4 / 8 half way.
    assert shares == [pytest.approx((0.1, 0.1)), pytest.approx((0.45, 0.45)), (0.5, 0.5)]


def test_levels_of_a_policy_count_instead_of_the_pruners() -> None:
    pruner = {"class": "SparsityLevelParameterPruner", "levels": {"a": 0.2}}
    schedule = schedule_of({"p": pruner}, use("p", 0, 1), use("p", 1, 2, levels=0.5), use("p", 2, 3, levels={"a": 0.9}))
    found = [planned_share(schedule.pruners["p"], policy, 0) for policy in schedule.policies]
    assert found == [(0.2, 0.2), (0.5, 0.5), (0.9, 0.9)]


FACTS = ModelFacts(parameters={"a": (10, 10), "b": (5, 4, 5), "bias": (7,)})
LEVEL = {"class": "SparsityLevelParameterPruner", "levels": {"a": 0.255}}


def totals(schedule: Any, epochs: int) -> list[float | None]:
    return [row.total for row in epoch_table(schedule, epochs, resolve(schedule, FACTS))]


def test_totals_count_whole_elements_of_weights_and_outlive_the_policy() -> None:
    other = {"other": {"class": "L1Regularizer", "reg_regims": {"b": 1}}}
    schedule = schedule_of({"p": LEVEL}, use("p", 1, 2), use("other", 0, 4, kind="regularizer"), regularizers=other)
    # int(0.255 * 100) of the 200 weights; the regularizer zeroes nothing by plan.
    assert totals(schedule, 4) == [0.0, 0.125, 0.125]
    assert table_cells(epoch_table(schedule, 4, resolve(schedule, FACTS)), with_totals=True) == [
        ["epochs", "acts", "weights pruned"],
        ["0", "other", "0.00 %"],
        ["1", "p 0.255, other", "12.50 %"],
        ["2-3", "other", "12.50 %"],
    ]


def test_a_later_decision_counts_and_data_makes_the_total_unknown() -> None:
    pruners = {"p": LEVEL, "q": agp(0.8, "*"), "r": {"class": "SensitivityPruner", "sensitivities": {"a": 1}}}
    schedule = schedule_of(pruners, use("p", 0, 1), use("r", 1, 2), use("q", 2, 6, 3), use("p", 6, 7, levels={"b": 1}))
    # r's data decides on a until q does; q prunes 5, then 80 of each hundred; then all of b.
    assert totals(schedule, 7) == [0.125, None, 0.05, 0.8, 0.9]
    assert totals(schedule_of({"p": LEVEL}, use("p", 0, 1, levels=0.5)), 1) == [0.25]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("xy"), st.integers(0, 8), st.integers(1, 15), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 30),
)
def test_rows_say_each_active_epoch_once(uses: list[tuple[str, int, int, int]], epochs: int) -> None:
    pruners = {name: {"class": "SensitivityPruner", "sensitivities": {"a": 1}} for name, *_ in uses}
    schedule = schedule_of(pruners, *[use(name, start, start + span, every) for name, start, span, every in uses])
    said: dict[int, list[str]] = {}
    for row in epoch_table(schedule, epochs):
        for epoch in range(row.first, row.last + 1):
            assert epoch not in said
            said[epoch] = [act.name for act in row.acts]
    by_hand: dict[int, list[str]] = {}
    for epoch in range(epochs):
        acting = [name for name, start, span, every in uses if epoch in range(start, start + span, every)]
        if acting:
            by_hand[epoch] = acting
    assert said == by_hand
