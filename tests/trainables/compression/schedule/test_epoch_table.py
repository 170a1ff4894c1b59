"""The epoch table against published numbers and counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from trainables.compression.schedule import read_schedule
from trainables.compression.schedule.parts import epoch_table, planned_share


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


def test_a_gradual_ranking_plans_a_growing_share_of_structures() -> None:
    arguments = agp(0.5, "a", initial=0.1) | {"class": "GradientRankedFilterPruner_AGP", "group_type": "Filters"}
    schedule = schedule_of({"p": arguments}, use("p", 4, 7))
    shares = [planned_share(schedule.sections["pruners"]["p"], schedule.policies[0], epoch) for epoch in (4, 5, 6)]
    # 0.5 - 0.4 / 8 half way.
    assert shares == [pytest.approx((0.1, 0.1)), pytest.approx((0.45, 0.45)), (0.5, 0.5)]


def test_levels_of_a_policy_count_instead_of_the_pruners() -> None:
    pruner = {"class": "SparsityLevelParameterPruner", "levels": {"a": 0.2}}
    schedule = schedule_of({"p": pruner}, use("p", 0, 1), use("p", 1, 2, levels=0.5), use("p", 2, 3, levels={"a": 0.9}))
    found = [planned_share(schedule.sections["pruners"]["p"], policy, 0) for policy in schedule.policies]
    assert found == [(0.2, 0.2), (0.5, 0.5), (0.9, 0.9)]


def test_equal_epochs_have_one_row_with_planned_shares() -> None:
    level = {"class": "SparsityLevelParameterPruner", "levels": {"a": 0.255, "b": 0.5}}
    other = {"other": {"class": "L1Regularizer", "reg_regims": {"b": 1}}}
    policies = (use("p", 1, 2), use("other", 0, 4, kind="regularizer"))
    assert epoch_table(schedule_of({"p": level}, *policies, regularizers=other), 4) == [
        ["epochs", "acts"], ["0", "other"], ["1", "p 0.255 to 0.5, other"], ["2-3", "other"],
    ]  # fmt: skip
