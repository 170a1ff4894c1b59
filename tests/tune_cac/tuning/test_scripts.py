"""The root that a script's baseline leaves, and files that are none of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState, create_trial
from searchers import searcher

from analysis.metrics.ranking import CUT
from analysis.trace_replay.traces import OF_SCRIPT, read_trace
from trainables.config import TrialConfig
from trainables.gradskip.script_counting.trace_file import ScriptFacts, to_bytes
from trainables.script.run import RUN_FACTS
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.scripts import ALIKE, ScriptSearch, write_root

CONFIG = TrialConfig(workload="script", workload_options=("command=true",), method="none", epochs=1)
FACTS = ScriptFacts(
    signals=["variance:0"], layer_names=["conv.weight", "fc.weight"], trains="11", weight_decays=[0.1], blueprints=[],
    forward_flops=100, backward_flops={"11": 200, "01": 90},
)  # fmt: skip
TOLD = {"total_steps": 6, "layer_names": ["conv.weight", "fc.weight"]}
ROW: dict[str, Any] = {"quality": 0.5, "epoch": 1}


@pytest.mark.parametrize("behind", [0, 2])
def test_the_root_is_read_as_a_recorded_run(behind: int, tmp_path: Path) -> None:
    """Its steps are those up to the last report, whatever the script trains ``behind`` it."""
    values = np.arange(6 + behind, dtype=np.float32).reshape(-1, 1)
    root = write_root(tmp_path, CONFIG, ROW, TOLD, to_bytes(FACTS, values))
    trace = read_trace(StageStore(tmp_path, root))
    assert trace.run[OF_SCRIPT]
    assert (trace.total_steps, trace.layer_names) == (6, ("conv.weight", "fc.weight"))
    assert trace.dense.signal("variance:0")[0].tolist() == list(range(6))
    assert trace.dense.result(6) == ROW
    assert trace.costs_of("01").before(4) == (4 * 190, 4 * 90)
    with pytest.raises(Exception, match=re.escape("of a script only stops at layers of CAC_WATCH are known")):
        trace.costs_of("10")


@pytest.mark.parametrize("told", [{**TOLD, "total_steps": 7}, {**TOLD, "layer_names": ["a", "b"]}])
def test_a_file_of_another_run_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    content = to_bytes(FACTS, np.zeros((6, 1), np.float32))
    with pytest.raises(ValueError, match=r"trace.npz is of another run of 6 steps than the reports"):
        write_root(tmp_path, CONFIG, ROW, told, content)
    assert not list(tmp_path.iterdir())


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, values=np.array([Path], dtype=object), facts=np.array("{}"))
    with pytest.raises(ValueError, match="allow_pickle"):
        write_root(tmp_path, CONFIG, ROW, TOLD, path.read_bytes())


@pytest.mark.parametrize(
    ("error", "attrs", "ends"),
    [
        ("ScriptFailed: the script ended with exit code 1", {"role": "search"}, True),
        ("interrupted", {"role": "search", "continued_by": "later"}, False),
        ("TrainingDiverged: the accuracy is nan in report 1", {"role": "search"}, False),
        ("ScriptFailed: the script ended with exit code 1", {"role": CUT}, False),
    ],
)
def test_settings_that_fail_alike_end_a_search(error: str, attrs: dict[str, str], ends: bool, tmp_path: Path) -> None:
    """Trials of a killed search, which begin again, are none, nor those that lost the metric or were shorter."""
    search = searcher(tmp_path, kind=ScriptSearch, base=CONFIG, space="manual_layers", begin=False)
    facts = {**TOLD, "unit_ends": [0], "has_model": True}
    done = {"role": "baseline", "row": ROW, "config": CONFIG.to_dict(), RUN_FACTS: json.dumps(facts)}
    search.study.add_trial(create_trial(values=[0.5, 0.0], user_attrs=done))
    for _ in range(ALIKE):
        search.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={**attrs, "error": error}))
    assert search.gave_up == ("all 3 settings failed alike" if ends else "")
    assert not ScriptSearch(search.plan).gave_up  # of --resume
