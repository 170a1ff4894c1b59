"""The stop rules and braking against sequences worked by hand from the published description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.errors import UserError
from trainables.gradskip.rules.choice import make_rule
from trainables.gradskip.rules.published import AutoRule
from trainables.gradskip.rules.state_machine import SkipMachine, StepPlan
from trainables.gradskip.settings import Settings


def run_auto(rule: AutoRule, traces: dict[int, Sequence[float]]) -> list[tuple[int, int, str, float]]:
    """Feed recorded variances step by step; (iteration, layer, rule, ratio) of each stop."""
    stops = []
    for iteration in range(len(next(iter(traces.values())))):
        decision = rule.decide(iteration, lambda layer, i=iteration: traces[layer][i])  # type: ignore[misc]
        if decision is not None:
            assert decision.ratio is not None
            stops.append((iteration, decision.layer, decision.rule, decision.ratio))
    return stops


def test_start_slope_and_mountain_by_hand() -> None:
    settings = Settings(start_itr=2, samples=1, start_thr=0.9, mt_count_thr=2, mt_thr=0.8, slope_thr=0.95)
    traces = {
        # Nothing counts before iteration 2. Peak 10 at 3; 9.1 / 10 is not below 0.9; 8.9 / 10 is: stop at 5.
        0: [99.0, 50.0, 8.0, 10.0, 9.1, 8.9, 0, 0, 0, 0, 0, 0, 0, 0],
        # First peak 20 at iteration 5 (count 1 <= 2: slope). 19.2 / 20 = 0.96 stays, 18.9 / 20 = 0.945 stops at 7.
        4: [0, 0, 0, 0, 0, 20.0, 19.2, 18.9, 0, 0, 0, 0, 0, 0],
        # First peak at 7, updates at 8 and 9: count 3 > 2, a mountain. 0.85 would stop a slope; 0.79 stops at 12.
        7: [0, 0, 0, 0, 0, 0, 0, 1.0, 5.0, 10.0, 8.5, 8.0, 7.9, 0],
    }
    stops = run_auto(AutoRule(settings, [0, 4, 7]), traces)
    assert [stop[:3] for stop in stops] == [(5, 0, "start"), (7, 4, "slope"), (12, 7, "mountain")]
    assert [stop[3] for stop in stops] == pytest.approx([0.89, 0.945, 0.79], rel=1e-6)


def test_the_first_peak_of_the_next_target_is_set_in_the_same_step_and_cannot_stop_it() -> None:
    settings = Settings(start_itr=0, samples=1, start_thr=0.99, slope_thr=1.0, mt_count_thr=9)
    seen: list[tuple[int, int]] = []
    rule = AutoRule(settings, [0, 1, 2])
    values = {0: [2.0, 1.0, 0.5, 0.4], 1: [9.0, 5.0, 4.0, 3.0], 2: [9.0, 9.0, 6.0, 5.0]}
    stops = []
    for iteration in range(4):

        def variance(layer: int, iteration: int = iteration) -> float:
            seen.append((iteration, layer))
            return values[layer][iteration]

        decision = rule.decide(iteration, variance)
        stops.append(None if decision is None else decision.layer)
    assert stops == [None, 0, 1, 2]
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]


def test_ratios_are_compared_in_single_precision_for_single_precision_weights() -> None:
    # 0.95 is 0.949999988... in float32 and so is this ratio: equal there, below in double precision.
    settings = Settings(start_itr=0, samples=1, start_thr=0.95)
    below = 0.95 - 1e-9
    assert run_auto(AutoRule(settings, [0], single_precision=True), {0: [1.0, below]}) == []
    assert len(run_auto(AutoRule(settings, [0], single_precision=False), {0: [1.0, below]})) == 1


def machine_steps(settings: Settings, steps: int, variance: Callable[[int], float] = lambda _: 1.0) -> list[StepPlan]:
    machine = SkipMachine(settings, make_rule(settings, [0]))
    return [machine.step(variance) for _ in range(steps)]


def test_braking_counts_down_and_stops_at_zero() -> None:
    plans = machine_steps(Settings(stop_layer_num=(2,), stop_layer_itr=(3,), braking_distance=4), 9)
    # (c / D)^2 with c = 3, 2, 1, 0 in the steps 3, 4, 5, 6; the layer is stopped after step 6.
    assert [plan.scaled for plan in plans[2:8]] == [
        (),
        *[((range(3), factor),) for factor in (9 / 16, 4 / 16, 1 / 16, 0.0)],
        (),
    ]
    assert [plan.stop_through for plan in plans] == [None] * 6 + [2] + [None] * 2
    assert [i for i, plan in enumerate(plans) if plan.decision is not None] == [3]


def test_a_stop_due_while_braking_comes_after_it_and_is_missed_in_reference() -> None:
    lists = {"stop_layer_num": (1, 4), "stop_layer_itr": (2, 3), "braking_distance": 3}
    plans = machine_steps(Settings(**lists), 12)  # type: ignore[arg-type]
    assert [(i, p.stop_through) for i, p in enumerate(plans) if p.stop_through is not None] == [(4, 1), (7, 4)]
    assert [p.scaled[0][0] for p in plans[5:8]] == [
        range(2, 5)
    ] * 3  # only the layers after the last finished stop brake
    published = machine_steps(Settings(**lists, reference=True), 12)  # type: ignore[arg-type]
    assert [(i, p.stop_through) for i, p in enumerate(published) if p.stop_through is not None] == [(4, 1)]


@given(
    ends=st.lists(st.integers(0, 30), min_size=1, max_size=5), interval=st.integers(1, 12),
    saved_at=st.integers(0, 39),
)  # fmt: skip
def test_gathered_stops_wait_for_their_turn(ends: list[int], interval: int, saved_at: int) -> None:
    """Against the times of the rule itself, rounded up; of those in one turn the last layer counts."""
    ends = sorted(ends)

    def made(**more: Any) -> SkipMachine:
        settings = Settings(start_itr=0, samples=1, start_thr=0.5, slope_thr=0.5, mt_thr=0.5, **more)
        return SkipMachine(settings, make_rule(settings, range(len(ends))))

    def stops(machine: SkipMachine, again: SkipMachine | None = None) -> list[tuple[int, int]]:
        found = []
        for step in range(40):
            if again is not None and step == saved_at:
                again.load_state_dict(machine.state_dict())
                machine = again
            if machine.quiet_until() > step:
                machine.iteration += 1
                continue
            plan = machine.step(lambda layer, step=step: 0.1 if step >= ends[layer] else 1.0)  # type: ignore[misc]
            if plan.stop_through is not None:
                found.append((step, plan.stop_through))
        return found

    wanted: dict[int, int] = {}
    for step, layer in stops(made()):
        wanted[-(-step // interval) * interval] = layer
    gathered = made(stop_interval=interval)
    assert gathered.rule.first_stop() == -(-made().rule.first_stop() // interval) * interval
    assert stops(gathered, made(stop_interval=interval)) == [one for one in wanted.items() if one[0] < 40]


def test_layers_of_freezeout_are_not_gathered() -> None:
    with pytest.raises(UserError, match=r"CAC_STOP_INTERVAL must be 0 with CAC_RULE=freezeout, .* got 3"):
        Settings(rule="freezeout", rule_end_itr=9, stop_interval=3)


def test_a_stop_that_waits_ends_at_the_last_layer_that_is_left() -> None:
    settings = Settings(start_itr=0, samples=1, start_thr=0.5, slope_thr=0.5, mt_thr=0.5, stop_interval=10)
    rule = make_rule(settings, [0, 1, 2])
    for step in range(5):
        rule.decide(step, lambda layer, step=step: 1.0 / (step + 1 - layer) ** 2)  # type: ignore[misc]
    left, none = make_rule(settings, [0, 3]), make_rule(settings, [5])
    for other in (left, none):  # the user has frozen layers meanwhile
        other.load_state_dict(rule.state_dict())
        other.begin_after(-1)
    assert rule.state_dict()["waiting"][0] >= 1
    decision = left.decide(10, lambda layer: 1.0)
    assert decision is not None
    assert decision.layer == 0
    assert none.decide(10, lambda layer: 1.0) is None
