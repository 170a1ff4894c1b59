"""What earlier studies found, in features that models share, against integrals and sums of FLOPs by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis.trace_replay.traces import load_trace
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy, first_length, prior_rows, shares_at


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
        PriorStudy(study="a", runs=(run(0.5, 2.0, 0.8, (0.2, 0.3)), run(0.1, 0.0))),
        PriorStudy(study="b", runs=(run(0.4, -1.0, 0.6),)),
    ]
    rows, losses, studies = prior_rows(priors, [0.3, 0.9])
    assert rows.tolist() == [[0.5, 0.8, 0.2, 0.8], [0.1, 1.0, 1.0, 1.0], [0.4, 0.6, 0.6, 0.6]]
    assert losses.tolist() == [2.0, 0.0, -1.0]
    assert studies.tolist() == [1, 1, 2]
    assert prior_rows([], [0.3, 0.9])[0].shape == (0, 4)
    assert [PriorStudy.from_dict(json.loads(json.dumps(asdict(one)))) for one in priors] == priors


def test_the_first_length_is_the_mean_of_the_best_runs() -> None:
    a = PriorStudy(study="a", runs=(run(0.5, 1.0, 0.6), run(0.7, 1.1, 0.4), run(0.2, 0.0)))
    b = PriorStudy(study="b", runs=(run(0.3, -2.0, 0.8),))
    nothing = PriorStudy(study="c", runs=(run(0.9, 3.0, 0.1),))
    assert (a.best(), nothing.best()) == (a.runs[0], None)
    assert first_length([a, b, nothing], 30) == 21
    assert first_length([a], 1) is None  # one epoch can't be cut
    assert first_length([nothing], 30) is None
    assert first_length([PriorStudy(study="d", runs=(run(0.2, 0.0),))], 30) is None


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
    assert depths.of(len(names)) == max(*found, depths.of(names.index("9.weight")))
