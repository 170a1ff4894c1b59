"""Values that train as a setting did, against runs trained alone at both ends of each range, and just beyond them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import rows_alone
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis import load_trace
from analysis.trace_replay.same_run import RESOLUTION, same_run, same_run_text
from analysis.trace_replay.step_by_step import replay_one
from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing

SETTING: dict[str, Any] = {
    "CAC_VAR_START_ITR": 5, "CAC_VAR_START_THR": 0.99, "CAC_VAR_MT_COUNT_THR": 3, "CAC_VAR_MT_THR": 0.97,
    "CAC_VAR_SLOPE_THR": 0.98, "CAC_VAR_SAMPLES": 3,
}  # fmt: skip


def trained(folder: Path, **values: Any) -> TrialConfig:
    config = TrialConfig(workload="tiny", epochs=4, method="gradskip", **values)
    with SharedRun(config, Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        while not run.finished:
            run.train_epoch()
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_both_ends_train_as_the_setting_did_and_what_lies_beyond_does_not(tmp_path: Path) -> None:
    learning(tmp_path).learn()
    config = trained(tmp_path, **SETTING)
    trace = load_trace(tmp_path)
    found = same_run(trace, config)
    assert set(found) >= {"CAC_VAR_START_THR", "CAC_VAR_MT_COUNT_THR"}
    alone = rows_alone(config)
    own = replay_one(trace, config).events[0]
    for name, ends in found.items():
        assert ends[0] <= SETTING[name] <= ends[1]
        for end in ends:
            assert rows_alone(replace(config, **{name: end})) == alone, (name, end)
        step = RESOLUTION if isinstance(SETTING[name], float) else 1
        top = 1.0 if isinstance(SETTING[name], float) else trace.total_steps
        for beyond in (ends[0] - step, ends[1] + step):
            if step <= beyond <= top:
                assert replay_one(trace, replace(config, **{name: round(beyond, 6)})).events[0] != own, (name, beyond)


@pytest.mark.usefixtures("tiny")
def test_nothing_is_told_of_what_was_not_recorded_or_has_another_rule(tmp_path: Path) -> None:
    learning(tmp_path).learn()
    trace = load_trace(tmp_path)
    base = TrialConfig(workload="tiny", epochs=4, method="gradskip", **SETTING)
    assert same_run(trace, base) == {}  # it stops something, and its run beyond was not trained
    assert same_run(trace, replace(base, CAC_STOP_LAYER_NUM=(0,), CAC_STOP_LAYER_ITR=(3,))) == {}
    assert same_run(trace, replace(base, method="none")) == {}
    assert same_run(trace, replace(base, CAC_VAR_SAMPLES=None, CAC_BRAKING_DISTANCE=2)) == {}  # that is the interval
    assert same_run_text({}) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_rows_of_a_range_are_equal_whatever_it_is_asked_of(tmp_path: Path) -> None:
    """Asked of either end of a range, the answer is the same range."""
    learning(tmp_path).learn()
    config = trained(tmp_path, **SETTING)
    trace = load_trace(tmp_path)
    ends = same_run(trace, config)["CAC_VAR_START_THR"]
    for end in ends:
        again = replace(config, CAC_VAR_START_THR=end)
        assert same_run(trace, again)["CAC_VAR_START_THR"] == pytest.approx(ends)
