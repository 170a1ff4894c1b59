"""benchmarks/freezing_or_shorter.py: what its trainings execute, and what it compares them with."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainables.workloads import build

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def test_frozen_and_cached_trainings_execute_what_torch_counts() -> None:
    from freezing_or_shorter import Plan, Settings, bench_of, trained

    bench, layers, steps = bench_of("digits", ()), 3, 20  # two epochs of ten batches
    workload = build("digits", ())
    torch.manual_seed(0)
    model = workload.make_model()
    bench.freeze(list(model.parameters()), layers)
    counted = []
    for epoch in range(2):
        for batch in workload.train_batches(epoch, 0):
            with FlopCounterMode(display=False) as counter:
                workload.loss(model, batch).backward()
            counted.append(counter.get_total_flops())
    frozen = trained(bench, Plan(steps=steps, frozen=((0, layers),)), 0)
    assert frozen["executed"] == pytest.approx(sum(counted) / (bench.steps * bench.costs[0]), rel=1e-6)
    stop = Settings(stop_layer_num=(bench.ends[layers - 1],), stop_layer_itr=(-1,), prefix_mode="eval")
    cached = trained(bench, Plan(steps=steps, settings=stop, caches=True), 0)["executed"]
    prefix = (bench.costs[0] - bench.costs[layers]) / 2  # forward; only the step before the stop trains it
    assert cached < frozen["executed"]
    assert cached == pytest.approx(
        frozen["executed"] - (8 * prefix - (bench.costs[0] - bench.costs[layers])) / (bench.steps * bench.costs[0]),
        rel=0.02,
    )


def test_a_difference_is_to_shorter_of_the_same_seed_at_the_same_compute() -> None:
    from freezing_or_shorter import OTHER_SEED, table_of

    columns = ["method", "budget", "seed", "executed", "validation", "test", "seconds", "peak_mb"]
    rows = [
        ("dense", 1.0, 0, 1.0, 0.9, 0.9, 10.0, 4.0), ("shorter", 0.5, 0, 0.5, 0.8, 0.8, 5.0, 4.0),
        ("dense", 1.0, 1, 1.0, 0.8, 0.8, 10.0, 4.0), ("shorter", 0.5, 1, 0.5, 0.6, 0.6, 5.0, 4.0),
        ("linear", 0.5, 0, 0.6, 0.83, 0.83, 6.0, 2.0), ("linear", 0.5, 1, 0.6, 0.63, 0.63, 6.0, 2.0),
        ("linear", 0.5, OTHER_SEED, 0.6, 0.0, 0.0, 6.0, 2.0),
    ]  # fmt: skip
    table = table_of(pd.DataFrame(rows, columns=columns)).set_index("method")
    # shorter at 0.6: 82 and 64 %
    assert table.loc["linear", ["accuracy", "to shorter", "time", "memory"]].tolist() == pytest.approx(
        [73, 0, 0.6, 0.5]
    )
    assert table.loc["linear", "±"] >= 1.0  # differences of +1 and -1
