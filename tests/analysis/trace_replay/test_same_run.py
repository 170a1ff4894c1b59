"""Values that train as a setting did, against runs trained alone at both ends of each range, and just beyond them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import finish, rows_alone
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis import load_trace
from analysis.trace_replay.same_run import MOST_TRIED, RESOLUTION, VARIED, _values, same_run, same_run_text
from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing

SETTING: dict[str, Any] = {
    "CAC_VAR_START_ITR": 5, "CAC_VAR_START_THR": 0.99, "CAC_VAR_MT_COUNT_THR": 3, "CAC_VAR_MT_THR": 0.97,
    "CAC_VAR_SLOPE_THR": 0.98, "CAC_VAR_SAMPLES": 3,
}  # fmt: skip

#: Distance of the values that are tried of a variable, and its highest one, where they are not a fraction's.
STEPS = {
    "CAC_RULE_DEPTH": (0.005, 1.0), "CAC_RULE_PERCENTILE": (0.5, 100.0),
    "CAC_RULE_TOLERANCE": (0.005, 0.995),
}  # fmt: skip


def trained(folder: Path, **values: Any) -> TrialConfig:
    config = TrialConfig(workload="tiny", epochs=4, method="gradskip", **values)
    with SharedRun(config, Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        finish(run)
    return config


#: A setting of each rule whose variables may have other values, and some of these.
RULES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "variance": (SETTING, {"CAC_VAR_START_THR", "CAC_VAR_MT_COUNT_THR"}),
    "linear": ({"CAC_RULE_START_ITR": 3, "CAC_RULE_END_ITR": 32, "CAC_RULE_DEPTH": 0.6}, {"CAC_RULE_DEPTH"}),
    "gradient_norm": (
        {"CAC_RULE_START_ITR": 2, "CAC_RULE_INTERVAL": 4, "CAC_RULE_PERCENTILE": 50.0}, {"CAC_RULE_PERCENTILE"},
    ),
    "plasticity": (
        {"CAC_RULE_START_ITR": 0, "CAC_RULE_INTERVAL": 2, "CAC_RULE_TOLERANCE": 0.8, "CAC_RULE_WINDOW": 2},
        {"CAC_RULE_TOLERANCE"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("rule", RULES)
def test_both_ends_train_as_the_setting_did_and_what_lies_beyond_does_not(tmp_path: Path, rule: str) -> None:
    given, at_least = RULES[rule]
    learning(tmp_path, **({} if rule == "variance" else {"space": "stop_rules"})).learn()
    config = trained(tmp_path, CAC_RULE=rule, **given)
    trace = load_trace(tmp_path)
    found = same_run(trace, config)
    assert set(found) >= at_least
    alone = rows_alone(config)
    assert alone[-1]["stop_events"] != "[]"
    for name, ends in found.items():
        assert ends[0] <= given[name] <= ends[1]
        for end in ends:
            assert rows_alone(replace(config, **{name: end})) == alone, (name, end)
        whole = isinstance(given[name], int)
        step, top = (1, trace.total_steps) if whole else STEPS.get(name, (RESOLUTION, 1.0))
        for beyond in (ends[0] - step, ends[1] + step):
            if step <= beyond <= top and not (name == "CAC_RULE_WINDOW" and beyond < 2):
                other = replace(config, **{name: beyond if whole else round(beyond, 6)})
                assert rows_alone(other) != alone, (name, beyond)


@pytest.mark.parametrize("own", [5, 1000, 4000])
def test_an_interval_is_told_of_its_neighbours_alone(own: int) -> None:
    """Layers stop on its multiples, so 4 and 6 say nothing of 5."""
    found = _values(VARIED["auto"]["CAC_VAR_SAMPLES"], own, 5000, every=True)
    assert own in found
    assert np.diff(found).tolist() == [1] * (len(found) - 1)
    assert min(found) >= 1
    assert len(found) <= MOST_TRIED + 1
    # Of others values are left out, for what trains alike on both sides does so between.
    assert np.diff(_values(0, 5, 5000, every=False)).max() > 1
    assert _values(0, 5, 300, every=False) == list(range(301))


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
