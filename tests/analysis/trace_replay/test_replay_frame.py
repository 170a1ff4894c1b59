"""Replay against the machine itself, step by step over invented runs, and against trials really trained."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import count_costs, invented_trace, new_study, train_and_record

from analysis import load_trace, replay
from analysis.trace_replay.replay_frame import COLUMNS, missing_costs, missing_facts, replay_one
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.stage_tree.store import StageStore


def folder_of(store: StageStore) -> Path:
    return Path(store.tree) / store.root


def a_setting(rng: random.Random, total_steps: int) -> dict[str, Any]:
    thresholds = [0.9, 0.95, 0.97, 0.98, 0.99, 0.999, 1.0]
    return {
        "CAC_VAR_START_ITR": rng.randint(0, total_steps),
        "CAC_VAR_START_THR": rng.choice([*thresholds, -1.0]),
        "CAC_VAR_MT_COUNT_THR": rng.randint(0, 6),
        "CAC_VAR_MT_THR": rng.choice(thresholds),
        "CAC_VAR_SLOPE_THR": rng.choice(thresholds),
        "CAC_VAR_SAMPLES": rng.choice([None, 1, 1, 2, 3, 5, 9]),
        "CAC_BRAKING_DISTANCE": rng.choice([0, 0, 1, 2, 7]),
        "CAC_STOP_INTERVAL": rng.choice([0, 0, 0, 5]),
    }


def settings_of(rng: random.Random, total_steps: int, count: int) -> list[dict[str, Any]]:
    """Random settings; some equal in all but a threshold, as those that share a stage."""
    found = [a_setting(rng, total_steps) for _ in range(count)]
    return found + [{**setting, "CAC_VAR_SLOPE_THR": 0.985} for setting in found[: count // 2]]


def one_by_one(trace: RunTrace, config: TrialConfig) -> dict[str, Any]:
    """What the machine does over the same recording, and its savings counted step by step."""
    found = replay_one(trace, config)
    events = json.loads(f"[{found.events[0]}]")
    stops = {event["iteration"] + max(config.CAC_BRAKING_DISTANCE or 0, 1): event["layer"] for event in events}
    dense = executed = 0
    through = -1
    for step in range(trace.total_steps):
        through = stops.get(step, through)
        trains = "".join("0" if number <= through else digit for number, digit in enumerate(trace.trains))
        dense += flops_of_step(trace, trace.trains, step)
        executed += flops_of_step(trace, trains, step)
    stage = trace.stages[found.stage[0]]
    exact = bool(found.own[0]) and stage.result(trace.total_steps) is not None
    return {
        "stops": len(events),
        "stopped_through": through_at_end(events, config, trace.total_steps),
        "first_stop": events[0]["iteration"] if events else -1,
        "stop_events": json.dumps(events),
        "compute_saved": (dense - executed) / dense,
        "exact": exact,
        "exact_until": int(found.certain_until[0]),
        "stage": stage.id,
    }


def flops_of_step(trace: RunTrace, trains: str, step: int) -> int:
    costs, place = trace.costs[trains], step % trace.steps_per_epoch
    return sum(int(part[place + 1] - part[place]) for part in (costs.forward, costs.backward))


def through_at_end(events: list[dict[str, Any]], config: TrialConfig, total_steps: int) -> int:
    """The last stop whose braking ends within the run."""
    braking = max(config.CAC_BRAKING_DISTANCE or 0, 1)
    return max((e["layer"] for e in events if e["iteration"] + braking <= total_steps), default=-1)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), single_precision=st.booleans())
def test_many_at_once_are_what_the_machine_does_one_by_one(seed: int, single_precision: bool) -> None:
    rng = random.Random(seed)
    total_steps, per_epoch = rng.choice([(12, 4), (40, 10), (61, 61), (30, 1)])
    layers = rng.randint(1, 4)
    rows = settings_of(rng, total_steps, 12)
    trained = [TrialConfig(**row) for row in rows[::2]]
    trace = invented_trace(
        rng,
        layers=layers,
        total_steps=total_steps,
        steps_per_epoch=per_epoch,
        trained=[config for config in trained if config.CAC_VAR_START_THR != -1],
        single_precision=single_precision,
    )
    found = replay(trace, pd.DataFrame(rows))
    for number, row in enumerate(rows):
        config = TrialConfig(**row)
        if row["CAC_VAR_START_THR"] == -1:
            assert found.loc[number, "stops"] == 0
            assert found.loc[number, "exact"]
            continue
        expected = one_by_one(trace, config)
        assert {name: found.loc[number, name] for name in expected} == expected, row


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_exact_means_what_was_trained(seed: int) -> None:
    """Settings that were trained whole are exact, with their accuracy; no others differ from a run of their own."""
    rng = random.Random(seed)
    rows = settings_of(rng, 40, 6)
    trained = [TrialConfig(**row) for row in rows if row["CAC_VAR_START_THR"] != -1]
    trace = invented_trace(rng, layers=3, total_steps=40, steps_per_epoch=10, trained=trained)
    found = replay(trace, trained)
    for number in range(len(trained)):
        stage = next(stage for stage in trace.stages if stage.id == found.loc[number, "stage"])
        row = stage.result(40)
        assert not found.loc[number, "exact"] or row is not None
        assert found.loc[number, "exact_until"] >= min(stage.known_until, 40)
        if found.loc[number, "exact"]:
            assert found.loc[number, "accuracy"] == row["quality"]  # type: ignore[index]
            assert found.loc[number, "exact_until"] == 40
        else:
            assert np.isnan(found.loc[number, "accuracy"])
    dense = replay(trace.dense_only(), trained)
    assert list(dense["first_stop"]) == list(found["first_stop"])
    assert list(dense["exact"]) == list(found["stops"] == 0)


def test_forms_of_settings_are_one() -> None:
    trace = invented_trace(random.Random(3), layers=3, total_steps=40, steps_per_epoch=10)
    row = {"CAC_VAR_START_ITR": 4, "CAC_VAR_START_THR": 0.99, "CAC_VAR_SLOPE_THR": 0.99, "CAC_VAR_SAMPLES": 2}
    expected = replay(trace, TrialConfig(**row))
    assert list(expected.columns) == list(COLUMNS)
    assert expected.loc[0, "stops"] > 0
    for form in (
        [TrialConfig(**row)],
        [row],
        TrialConfig(**row, epochs=7, seed=3),  # where it trains is the trace's
        pd.DataFrame([{**row, "CAC_VAR_MT_THR": np.nan, "CAC_WATCH": None, "trial": 7, "epochs": 3}]),
        pd.DataFrame([{**row, "CAC_WATCH": '["conv"]', "CAC_WHOLE_UNITS": pd.NA, "CAC_RULE": "variance"}]),
        pd.DataFrame([{name: str(value) for name, value in row.items()}]),
    ):
        pd.testing.assert_frame_equal(replay(trace, form), expected)
    again = replay(trace, pd.DataFrame([row, row], index=[5, 2]))
    assert list(again.index) == [5, 2]
    assert len(replay(trace, [])) == 0


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (pd.DataFrame({"CAC_VAR_START_THR": [1.5]}), "CAC_VAR_START_THR must be"),
        (pd.DataFrame({"CAC_VAR_SAMPLES": [1.0, 2.5]}), "CAC_VAR_SAMPLES must be an integer >= 1, got 2.5"),
        (pd.DataFrame({"CAC_VAR_SLOPE_THR": [0.9, 0.0]}), "CAC_VAR_SLOPE_THR must be in (0, 1], got 0.0"),
        (
            pd.DataFrame({"CAC_VAR_STRT_THR": [0.9]}),
            "unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'?",
        ),
        (pd.DataFrame({"CAC_RULE": ["freezeout"]}), "CAC_RULE_END_ITR must be set for CAC_RULE=freezeout"),
        (
            TrialConfig(CAC_STOP_LAYER_NUM=(90,), CAC_STOP_LAYER_ITR=(3,)),
            "CAC_STOP_LAYER_NUM must be at most 10",
        ),
        (
            TrialConfig(CAC_STOP_LAYER_NUM=(4,), CAC_STOP_LAYER_ITR=(3,)),
            "the study has not counted what a step costs with p0, p1, ... 2 more, p4 stopped: ",
        ),
        (
            TrialConfig(CAC_WATCH=("linear",)),
            "CAC_WATCH=linear CAC_WHOLE_UNITS=0: the command replay looks at the model itself",
        ),
        (5, "settings must be a TrialConfig, several of them or a DataFrame, got 5"),
    ],
)
def test_what_cannot_be_replayed_is_said(form: Any, message: str) -> None:
    trace = invented_trace(random.Random(0), layers=3, total_steps=40, steps_per_epoch=10)
    with pytest.raises(UserError, match=re.escape(message)):
        replay(trace, form)


def test_what_is_missing_can_be_asked_for_first() -> None:
    trace = invented_trace(random.Random(0), layers=3, total_steps=40, steps_per_epoch=10)
    manual = TrialConfig(CAC_STOP_LAYER_NUM=(1, 10), CAC_STOP_LAYER_ITR=(3, 5))
    assert missing_costs(trace, [TrialConfig(), TrialConfig(CAC_VAR_START_THR=-1.0)]) == []
    # Through the last parameter: one stays in the graph, so that the loss has a gradient.
    assert missing_costs(trace, manual) == ["00111111111", "00000000001"]
    whole = TrialConfig(CAC_WHOLE_UNITS=True)
    assert missing_facts(trace, [TrialConfig(), whole, whole, manual]) == [whole]


def test_other_rules_are_followed_by_their_schedules() -> None:
    """linear on three layers: floor(1.0 * 3) stops at 3, 6, 9 of 12 steps, told from the rule's formula."""
    trace = invented_trace(random.Random(1), layers=3, total_steps=12, steps_per_epoch=4)
    schedule = {"CAC_RULE": "linear", "CAC_RULE_START_ITR": 0, "CAC_RULE_END_ITR": 9, "CAC_RULE_DEPTH": 1.0}
    found = replay(trace, pd.DataFrame([schedule, {**schedule, "CAC_BRAKING_DISTANCE": 2}]))
    for number, braking in ((0, 1), (1, 2)):
        events = json.loads(found.loc[number, "stop_events"])
        assert [(e["iteration"], e["layer"]) for e in events] == [(3, 0), (6, 3), (9, 6)]
        spent, dense = 0.0, 0.0
        for step in range(12):
            through = max((layer for t, layer in ((3, 0), (6, 3), (9, 6)) if step >= t + braking), default=-1)
            forward, scale = (31, 1 / 3) if step % 4 == 3 else (100, 1)
            spent += forward + int(sum((n + 1) * 7 for n in range(11) if n > through) * scale + 1e-9)
            dense += forward + int(sum((n + 1) * 7 for n in range(11)) * scale + 1e-9)
        assert found.loc[number, "compute_saved"] == pytest.approx(1 - spent / dense, abs=1e-15)
        assert found.loc[number, "exact_until"] == 12  # no signal is looked at
        assert not found.loc[number, "exact"]


@settings(max_examples=40)
@given(
    start=st.integers(0, 38),
    cubic=st.booleans(),
    scaled=st.booleans(),
    end=st.integers(39, 60),
    layers=st.integers(1, 4),
)
def test_freezeout_stops_as_its_machine_does_step_by_step(
    start: int, cubic: bool, scaled: bool, end: int, layers: int
) -> None:
    trace = invented_trace(random.Random(1), layers=layers, total_steps=40, steps_per_epoch=10)
    config = TrialConfig(
        CAC_RULE="freezeout",
        CAC_RULE_START_ITR=start,
        CAC_RULE_END_ITR=end,
        CAC_RULE_CUBIC=cubic,
        CAC_RULE_SCALED=scaled,
    )
    machine = trace.blueprint(config).machine(config.gradskip_settings())
    decided = [
        (t, plan.decision.layer) for t in range(40) if (plan := machine.step(lambda _: 0.0)).decision is not None
    ]
    found = replay(trace, config).loc[0]
    assert [(e["iteration"], e["layer"]) for e in json.loads(found["stop_events"])] == decided
    assert found["stopped_through"] == machine.stopped_through
    assert (found["exact"], found["exact_until"]) == (
        False,
        40,
    )  # scaled from the first step on, so never the dense run


def test_signals_that_nobody_recorded_leave_savings_open() -> None:
    trace = invented_trace(random.Random(1), layers=3, total_steps=40, steps_per_epoch=10)
    for rule, first in (("gradient_norm", 4), ("plasticity", 4)):
        found = replay(trace, TrialConfig(CAC_RULE=rule, CAC_RULE_START_ITR=4, CAC_RULE_INTERVAL=3)).loc[0]
        assert (found["exact"], found["exact_until"]) == (False, first)
        assert np.isnan(found["compute_saved"])
    assert replay(trace, TrialConfig(CAC_RULE="plasticity", CAC_RULE_START_ITR=40)).loc[0, "exact"]


#: Settings of every kind, with whether they read a signal, and the first iteration at which they do.
_OF_A_KIND: tuple[tuple[dict[str, Any], int], ...] = (
    ({"CAC_VAR_START_THR": -1.0}, 40),
    ({"CAC_STOP_LAYER_NUM": (3, 6), "CAC_STOP_LAYER_ITR": (5, 20)}, 40),
    ({"CAC_RULE": "linear", "CAC_RULE_END_ITR": 40}, 40),
    ({"CAC_VAR_START_ITR": 4, "CAC_VAR_SAMPLES": 3}, 6),
    ({"CAC_VAR_START_ITR": 60}, 40),
    ({"CAC_RULE": "plasticity", "CAC_RULE_START_ITR": 4}, 4),
)


@pytest.mark.parametrize("held", [False, True], ids=["a run without", "a run with"])
def test_norms_that_hold_from_the_first_step_on_are_another_run(held: bool) -> None:
    """What reads no signal saves what it saves; nothing is exact, and no signal is certain, from the other run."""
    trace = invented_trace(random.Random(1), layers=3, total_steps=40, steps_per_epoch=10)
    trace = replace(trace, run={**trace.run, **({"norm_statistics": "hold_all"} if held else {})})
    settings = [values for values, _ in _OF_A_KIND]
    configs = [TrialConfig(**values) for values in settings]
    holding = [TrialConfig(**values, CAC_NORM_STATISTICS="hold_all") for values in settings]
    alike, other = (replay(trace, given) for given in ((holding, configs) if held else (configs, holding)))
    assert not other["exact"].any()
    assert other["accuracy"].isna().all()
    assert list(other["exact_until"]) == [until for _, until in _OF_A_KIND]
    assert list(alike["exact"]) == [True, False, False, False, True, False]
    pd.testing.assert_series_equal(other["compute_saved"], alike["compute_saved"])
    pd.testing.assert_series_equal(other["stop_events"], alike["stop_events"])
    frame = pd.DataFrame([{**values, "CAC_NORM_STATISTICS": "hold_all"} for values in settings], dtype=object)
    pd.testing.assert_frame_equal(replay(trace, frame), alike if held else other)
    dense = TrialConfig(method="none", CAC_NORM_STATISTICS="hold_all")  # nothing holds them without Gradient-Skip
    assert replay(trace, dense).loc[0, "exact"] != held


# --- against training -----------------------------------------------------------------------------------------------

#: The steps of these differ from each other's late or early, with and without braking, some not at all.
_TRAINED = (
    {"CAC_VAR_START_ITR": 0, "CAC_VAR_START_THR": 0.999, "CAC_VAR_MT_THR": 0.999, "CAC_VAR_SLOPE_THR": 0.999,
     "CAC_VAR_SAMPLES": 3},
    {"CAC_VAR_START_ITR": 10, "CAC_VAR_START_THR": 0.999, "CAC_VAR_MT_THR": 0.99, "CAC_VAR_SLOPE_THR": 0.999,
     "CAC_VAR_SAMPLES": 5, "CAC_BRAKING_DISTANCE": 12},
    {"CAC_VAR_START_ITR": 2, "CAC_VAR_START_THR": 0.998, "CAC_VAR_MT_COUNT_THR": 0, "CAC_VAR_SAMPLES": 2,
     "CAC_BRAKING_DISTANCE": 6},
    {"CAC_STOP_LAYER_NUM": (0, 6), "CAC_STOP_LAYER_ITR": (50, 53), "CAC_BRAKING_DISTANCE": 9},
)  # fmt: skip
_EPOCHS = 10


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StageStore, StageStore, list[dict[str, Any]]]]:
    """A study with only its dense run, one with all, and the rows of the trials.

    A strong weight decay lets every layer's variance fall, whatever a processor's rounding makes of ten epochs.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr("trainables.workloads.digits.WEIGHT_DECAY", 0.01)
    base = TrialConfig(method="none", epochs=_EPOCHS)
    whole = new_study(tmp_path_factory.mktemp("whole"), base)
    dense = new_study(tmp_path_factory.mktemp("dense"), base)
    train_and_record(whole, base)
    trials = [TrialConfig(epochs=_EPOCHS, **values) for values in _TRAINED]
    rows = []
    shutil.copytree(folder_of(whole), folder_of(dense))
    for config in trials:
        rows.append(train_and_record(whole, config))
    for path in folder_of(whole).glob("facts-*"):
        shutil.copy(path, folder_of(dense))
    trace = load_trace(folder_of(whole).parent.parent)
    assert missing_facts(trace, trials) == []
    for store in (whole, dense):
        count_costs(store, base, missing_costs(trace, trials))
    yield dense, whole, rows
    patch.undo()


@pytest.mark.thorough
@pytest.mark.slow
def test_where_the_tree_has_been_replay_is_the_trial(studies: Any) -> None:
    _, whole, rows = studies
    trace = load_trace(folder_of(whole).parent.parent)
    found = replay(trace, [TrialConfig(**values) for values in _TRAINED])
    assert list(found["exact"]) == [True] * len(rows)
    assert list(found["exact_until"]) == [trace.total_steps] * len(rows)
    for name in ("stopped_through", "stop_events", "compute_saved", "backward_saved"):
        assert list(found[name]) == [row[name] for row in rows], name
    assert list(found["accuracy"]) == [row["quality"] for row in rows]
    assert found["stops"].min() >= 1


@pytest.mark.slow
def test_from_the_dense_run_alone_the_first_stop_is_exact(studies: Any) -> None:
    dense, _, rows = studies
    trace = load_trace(folder_of(dense).parent.parent)
    assert len(trace.stages) == 1
    found = replay(trace, [TrialConfig(**values) for values in _TRAINED])
    assert not found["exact"].any()
    for number, row in enumerate(rows):
        (predicted, trained) = (json.loads(text) for text in (found.loc[number, "stop_events"], row["stop_events"]))
        certain = [event for event in predicted if event["iteration"] < found.loc[number, "exact_until"]]
        assert certain == trained[: len(certain)]
        assert certain
        assert found.loc[number, "compute_saved"] == pytest.approx(row["compute_saved"], abs=0.1)
    manual = len(rows) - 1  # nothing is looked at, so all of it is certain
    assert found.loc[manual, "exact_until"] == trace.total_steps
    assert found.loc[manual, "compute_saved"] == rows[manual]["compute_saved"]


# --- what compression changes ---------------------------------------------------------------------------------------

_COMPRESSES = r"^replay predicts Gradient-Skip alone, got a setting with method {}, which trains on other weights"


@pytest.mark.parametrize("method", ["compression", "gradskip+compression"])
@pytest.mark.parametrize("form", [lambda c: c, lambda c: [TrialConfig(), c]])
def test_a_setting_that_compresses_is_refused(method: str, form: Any) -> None:
    trace = invented_trace(random.Random(1), layers=3, total_steps=40, steps_per_epoch=10)
    setting = form(TrialConfig(method=method, pruning_sensitivities=("a.weight=1",)))
    for predict in (replay, missing_facts, missing_costs):
        with pytest.raises(UserError, match=_COMPRESSES.format(re.escape(method))):
            predict(trace, setting)


def test_rows_that_compress_have_no_prediction_and_the_others_theirs() -> None:
    trace = invented_trace(random.Random(1), layers=3, total_steps=40, steps_per_epoch=10)
    rng = random.Random(2)
    rows = [a_setting(rng, 40) for _ in range(6)]
    methods = ["gradskip", "compression", "gradskip", "gradskip+compression", "none", "compression"]
    table = pd.DataFrame(rows, index=list("abcdef")).assign(method=methods)
    found = replay(trace, table)
    alone = replay(trace, table[~table["method"].str.contains("compression")])
    pd.testing.assert_frame_equal(found.loc[alone.index], alone)
    unknown = found.loc[["b", "d", "f"]]
    assert unknown[["compute_saved", "backward_saved", "accuracy"]].isna().all(axis=None)
    assert unknown[["exact", "exact_until", "stops"]].values.tolist() == [[False, 0, 0]] * 3
    assert set(unknown["stop_events"]) == {"[]"}
    assert missing_facts(trace, table.assign(CAC_WHOLE_UNITS=True).loc[["b"]]) == []
    assert missing_costs(trace, table.assign(CAC_WHOLE_UNITS=True).loc[["b"]]) == []
