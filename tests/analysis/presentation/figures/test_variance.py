"""The variance picture against the machine itself over invented runs, and against a trial really trained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gradient_rows import STEPS, statistics, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import invented_trace, new_study, train_and_record
from report_data import report_data

from analysis import load_trace, replay
from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.variance import VarianceFrames, gradient_noise, layer_noise, shown_trial
from analysis.presentation.html import variance_frames
from trainables.config import TrialConfig


def row_of(config: TrialConfig, stage: str, events: str) -> pd.Series:
    values = {k: json.dumps(v) if isinstance(v, list) else v for k, v in config.to_dict().items()}
    return pd.Series({**values, "stage": stage, "stop_events": events})


def a_config(rng: random.Random, total_steps: int) -> TrialConfig:
    thresholds = [0.95, 0.98, 0.99, 0.999, 1.0]
    return TrialConfig(
        CAC_VAR_START_ITR=rng.randint(0, total_steps // 2),
        CAC_VAR_START_THR=rng.choice(thresholds),
        CAC_VAR_MT_COUNT_THR=rng.randint(0, 4),
        CAC_VAR_MT_THR=rng.choice(thresholds),
        CAC_VAR_SLOPE_THR=rng.choice(thresholds),
        CAC_VAR_SAMPLES=rng.choice([1, 2, 3, 5]),
        CAC_BRAKING_DISTANCE=rng.choice([0, 0, 1, 2, 7]),
    )


def examined(found: VarianceFrames, layer: str) -> pd.DataFrame:
    lines = found.variance
    return lines[(lines["layer"] == layer) & lines["examined"]]


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_picture_shows_what_the_rule_compared(seed: int) -> None:
    rng = random.Random(seed)
    configs = [a_config(rng, 40) for _ in range(4)]
    trace = invented_trace(rng, layers=4, total_steps=40, steps_per_epoch=8, trained=configs)
    followed = replay(trace, configs)
    for config, (_, predicted) in zip(configs, followed.iterrows(), strict=True):
        if not predicted["exact"]:
            continue
        found = variance_frames(trace, row_of(config, predicted["stage"], predicted["stop_events"]))
        assert found is not None
        events = json.loads(predicted["stop_events"])
        assert list(found.stops["iteration"]) == [event["iteration"] for event in events]
        assert list(found.stops["layer"]) == [event["name"] for event in events]
        assert found.stops["ratio"].tolist() == pytest.approx([event["ratio"] for event in events], rel=1e-6)
        assert found.variance["ratio"].between(0, 1).all()
        looks = examined(found, "p0")
        waited = looks["ratio"].iloc[:-1] if events else looks["ratio"]
        assert (waited >= np.float32(config.CAC_VAR_START_THR or 0) - 1e-7).all()
        assert (looks["iteration"] % config.gradskip_settings().sampling_interval == 0).all()


def test_of_a_trial_really_trained(tmp_path: Path, tiny: str) -> None:
    config = TrialConfig(workload=tiny, epochs=4, CAC_VAR_START_ITR=2, CAC_VAR_START_THR=1.0, CAC_VAR_SLOPE_THR=1.0,
                         CAC_VAR_MT_THR=1.0, CAC_VAR_SAMPLES=2, CAC_BRAKING_DISTANCE=3)  # fmt: skip
    store = new_study(tmp_path / "study", config)
    train_and_record(store, TrialConfig(workload=tiny, epochs=4, method="none"))
    row = train_and_record(store, config)
    trace = load_trace(tmp_path / "study")
    events = json.loads(row["stop_events"])
    assert len(events) > 1
    found = variance_frames(trace, row_of(config, trace.stages[-1].id, row["stop_events"]))
    assert found is not None
    assert list(found.stops["iteration"]) == [event["iteration"] for event in events]
    assert found.stops["ratio"].tolist() == pytest.approx([event["ratio"] for event in events], rel=1e-5)
    assert dict(found.thresholds.itertuples(index=False)) == {
        "CAC_VAR_START_THR": 1.0, "CAC_VAR_MT_THR": 1.0, "CAC_VAR_SLOPE_THR": 1.0,
    }  # fmt: skip
    # A layer's examination begins where the layer before it stopped, and after its braking.
    second = examined(found, events[1]["name"])["iteration"].tolist()
    assert second[0] == events[0]["iteration"]
    assert second[1] >= events[0]["iteration"] + 3


def test_what_is_not_recorded_has_no_picture() -> None:
    rng = random.Random(1)
    trace = invented_trace(rng, layers=2, total_steps=20, steps_per_epoch=5)
    assert variance_frames(trace, row_of(TrialConfig(), "nowhere", "[]")) is None
    missing: Any = pd.NA
    assert variance_frames(trace, row_of(TrialConfig(), missing, "[]")) is None


def test_without_stops_and_thresholds() -> None:
    rng = random.Random(2)
    trace = invented_trace(rng, layers=3, total_steps=30, steps_per_epoch=5)
    manual = TrialConfig(CAC_STOP_LAYER_NUM=(3,), CAC_STOP_LAYER_ITR=(12,))
    events = json.dumps([{"iteration": 12, "layer": 3, "name": "p3", "ratio": None, "rule": "manual"}])
    found = variance_frames(trace, row_of(manual, trace.dense.id, events))
    assert found is not None
    assert not found.variance["examined"].any()
    assert len(found.thresholds) == 0
    last = found.variance.groupby("layer")["iteration"].max()
    assert last["p0"] <= 12
    assert last["p3"] <= 12
    assert last["p6"] > 12


# --- gradient statistics --------------------------------------------------------------------------------------------


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_every_trial_has_a_line_of_each_estimator() -> None:
    figure = drawn(gradient_noise(with_gradients(2)))
    lines = {(t["name"], *t["y"]) for t in figure.traces}
    sgd = {("SGD", *(round(0.4 + 0.1 * place + trial / 100, 6) for place in range(4))) for trial in (1, 2)}
    others = {("gradient_clustering", *(round(y / 2, 6) for y in own)) for _, *own in sgd}
    assert lines == sgd | others
    assert all(t["x"] == list(STEPS) for t in figure.traces)
    assert {t["name"]: t["line"]["dash"] for t in figure.traces} == {"SGD": "dash", "gradient_clustering": "solid"}
    assert [t["name"] for t in figure.traces if t["showlegend"]] == ["SGD", "gradient_clustering"]
    assert "SGD 0.415 to 0.715, gradient_clustering 0.208 to 0.358" in figure.alt


def test_of_many_trials_mean_and_range_are_drawn() -> None:
    figure = drawn(gradient_noise(with_gradients(9)))
    sgd = [t["y"] for t in figure.traces if t["name"] == "SGD"]
    assert len(figure.traces) == 6
    for offset, line in zip((0.01, 0.09, 0.05), sgd, strict=True):  # smallest, largest, mean
        assert line == pytest.approx([0.4 + 0.1 * place + offset for place in range(4)])
    assert figure.notes == ["Mean of 9 trials (thick), smallest and largest."]


def test_layers_are_in_order_at_the_last_measurement() -> None:
    figure = drawn(layer_noise(with_gradients(2)))
    trial = shown_trial(with_gradients(2), statistics(2))
    assert trial is not None
    last = 0.7 + trial / 100
    assert figure.layout["yaxis"]["ticktext"] == ["a.weight", "b.weight"]
    points = {t["name"]: (t["y"], t["x"]) for t in figure.traces}
    assert points["SGD"] == ([0, 1], pytest.approx([last, last - 0.1]))
    assert points["gradient_clustering"] == ([0, 1], pytest.approx([last / 2, (last - 0.1) / 2]))
    assert f"Trial {trial}, at its last measurement (step {STEPS[-1]})" in figure.notes[0]


def test_the_shown_trial_is_the_chosen_one_or_the_first_of_the_ranking() -> None:
    data = report_data(12)
    ranked = [int(trial) for trial in data.ranking["trial"]]

    def rows(*trials: int) -> pd.DataFrame:
        return pd.DataFrame({"trial": trials})

    assert data.best is not None
    assert shown_trial(data, rows(*range(12))) == int(data.best["trial"])
    assert shown_trial(replace(data, best=None), rows(ranked[3], ranked[5], 99)) == ranked[3]
    assert shown_trial(data, rows(99, 98)) == 98
    assert shown_trial(data, rows()) is None
    assert shown_trial(data, None) is None
