"""What the model of the quality knows of a run, against integrals and sums of FLOPs by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from searchers import learning
from tiny_workload import HeadFirst, Tiny, tiny  # noqa: F401 - a fixture

from analysis.trace_replay.traces import load_trace, trains_after
from tune_cac.tuning.outcomes.distinct_outcomes import Depths, features_of, shares_at


def test_shares_of_a_layer_are_the_mean_of_the_steps_over_its_depths() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        stops = [(float(when), float(through)) for when, through in draw.random((3, 2)).round(3)]
        depths = sorted(draw.random(4).round(3).tolist())
        middles = (np.arange(100_000) + 0.5) / 100_000
        steps = np.min([np.where(middles <= through, when, 0.9) for when, through in stops], axis=0).clip(max=0.9)
        edges = [0.0, *depths]
        for place, found in enumerate(shares_at([s for s in stops if s[0] < 0.9], depths, end=0.9)):
            inside = (middles > edges[place]) & (middles <= edges[place + 1])
            assert found == pytest.approx(steps[inside].mean(), abs=1e-4)


def test_at_the_depths_of_the_stops_a_share_is_the_time_of_the_first_stop_through_the_layer() -> None:
    assert shares_at([(0.1, 0.25), (0.5, 0.5)], [0.25, 0.5, 1.0], end=0.6).tolist() == [0.1, 0.5, 0.6]


def test_features_are_saving_length_and_shares() -> None:
    assert features_of([(0.2, 0.3)], [0.3, 0.9], end=0.8, saved=0.5).tolist() == [0.5, 0.8, 0.2, 0.8]
    assert features_of([], [0.3, 0.9], end=0.6, saved=0.4).tolist() == [0.4, 0.6, 0.6, 0.6]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("reverse", [False, True])
def test_depths_follow_the_order_in_which_layers_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """A model that registers its layers in another order than it runs them in, whose whole units stop."""
    monkeypatch.setattr(Tiny, "make_model", lambda self: HeadFirst(reverse=reverse))
    learning(tmp_path, space="stop_rules").learn()
    trace = load_trace(tmp_path)
    depths, names = Depths(trace), list(trace.layer_names)
    _, whole = trace.costs_of(trace.trains).before(trace.steps_per_epoch)
    for blueprint in trace.facts.values():
        units = blueprint.plan.units[: blueprint.stoppable]
        assert len(units) == 4
        for unit in units:
            left = trace.costs_of(trains_after(trace, blueprint, unit.end)).before(trace.steps_per_epoch)[1]
            own = [
                number for number, name in enumerate(names) if name.split(".")[1] == names[unit.number].split(".")[1]
            ]
            assert [depths.of(number) for number in own] == pytest.approx([1 - left / whole] * len(own))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_depth_is_the_share_of_the_backward_pass_that_a_stop_spares(tmp_path: Path) -> None:
    learning(tmp_path).learn()
    trace = load_trace(tmp_path)
    depths = Depths(trace)
    names = list(trace.layer_names)
    found = [depths.of(names.index(f"{block}.weight")) for block in (0, 3, 6)]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] < 1
    # Backward FLOPs of a convolution: of its weight and, but for the first, of its input, each as many as forward.
    pixels = {0: 36 * 9 * 4, 3: 36 * 9 * 16, 6: 36 * 9 * 24, 9: 36 * 9 * 36}
    flops = {block: 2 * macs * (1 if block == 0 else 2) for block, macs in pixels.items()}
    total = sum(flops.values()) + 2 * 2 * 6 * 3
    spared = np.cumsum(
        [flops[0], flops[3], flops[6]]
    )  # the norm before the next layer still wants its input's gradient
    assert found == pytest.approx((spared / total).tolist(), rel=1e-6)
    assert depths.of(-1) == 0.0
    assert depths.of(len(names) - 1) == max(*found, depths.of(names.index("9.weight")))
