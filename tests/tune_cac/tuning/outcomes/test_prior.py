"""What earlier studies found, in features that models share, against integrals and sums of FLOPs by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from searchers import learning
from tiny_workload import HeadFirst, Tiny, tiny  # noqa: F401 - a fixture

from analysis.trace_replay.predicted import trains_after
from analysis.trace_replay.traces import load_trace
from trainables.quality import ACCURACY
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy, first_length, prior_rows, shares_at
from tune_cac.tuning.outcomes.prior_reading import priors_in


def run(saved: float, loss: float, ended: float = 1.0, *stops: tuple[float, float]) -> PriorRun:
    return PriorRun(stops=stops, ended=ended, saved=saved, loss=loss)


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


def test_rows_have_saving_length_and_shares_and_the_number_of_their_study() -> None:
    priors = [
        PriorStudy.of("a", [run(0.5, 0.04, 0.8, (0.2, 0.3)), run(0.1, 0.0)], 0.75, ACCURACY, 0.02),
        PriorStudy.of("b", [run(0.4, -0.015, 0.6)], 0.75, ACCURACY, "2%"),
    ]
    rows, losses, studies = prior_rows(priors, [0.3, 0.9])
    assert rows.tolist() == [[0.5, 0.8, 0.2, 0.8], [0.1, 1.0, 1.0, 1.0], [0.4, 0.6, 0.6, 0.6]]
    assert losses.tolist() == pytest.approx([2.0, 0.0, -1.0])  # in allowed ones
    assert studies.tolist() == [1, 1, 2]
    assert prior_rows([], [0.3, 0.9])[0].shape == (0, 4)
    stored = json.loads(json.dumps([one.to_dict() for one in priors]))
    assert PriorStudy.from_dict(stored[0], ACCURACY, 0.02) == priors[0]
    (again,) = priors_in(stored[:1], ACCURACY, 0.08)  # a search that goes on with another allowed drop
    assert prior_rows([again], [0.3, 0.9])[1].tolist() == pytest.approx([0.5, 0.0])
    assert (priors[0].best(), again.best()) == (priors[0].runs[1], priors[0].runs[0])


def test_the_first_length_is_the_mean_of_the_best_runs() -> None:

    def study(*runs: PriorRun) -> PriorStudy:
        return PriorStudy.of("a", runs, 0.9, ACCURACY, 0.01)

    a = study(run(0.5, 0.01, 0.6), run(0.7, 0.011, 0.4), run(0.2, 0.0))
    b = study(run(0.3, -0.02, 0.8))
    nothing = study(run(0.9, 0.03, 0.1))
    assert (a.best(), nothing.best()) == (a.runs[0], None)
    assert first_length([a, b, nothing], 30) == 21
    for ended in (0.6, 0.5, 0.1):
        assert first_length([study(run(0.5, 0.0, ended))], 1) is None  # one epoch can't be cut
        assert first_length([study(run(0.5, 0.0, ended))], 2) in (1, None)
    assert first_length([nothing], 30) is None
    assert first_length([study(run(0.2, 0.0))], 30) is None


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
