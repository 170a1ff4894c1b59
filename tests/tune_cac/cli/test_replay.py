"""The command replay on a small study that was really trained: words, numbers, and what is filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from recorded_runs import new_study, train_and_record

import analysis
from analysis import load_trace
from analysis.io.dtypes import trial_dtypes, typed
from analysis.io.study_files import Layout
from analysis.metrics.ranking import relative_names
from trainables.config import TrialConfig
from trainables.gradskip.settings import Settings
from trainables.quality import ACCURACY
from trainables.stage_tree.root import plain_shapes
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main
from tune_cac.cli.replay import prediction_lines

BASE = TrialConfig(method="none", epochs=3)
STOPPING = {"CAC_STOP_LAYER_NUM": (0, 6), "CAC_STOP_LAYER_ITR": (5, 20), "CAC_BRAKING_DISTANCE": 2}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A baseline and a manual trial, their rows; no costs, and no plan of layers of the variance rule."""
    folder = tmp_path_factory.mktemp("results") / "small"
    store = new_study(folder, BASE)
    dense = train_and_record(store, BASE)
    row = train_and_record(store, TrialConfig(epochs=3, **STOPPING))
    with TrainingRun(BASE) as run:
        batches = [(1, batch) for batch in run.workload.train_batches(0, 0)]
    store.write("shapes.json", plain_shapes(batches))
    trials = pd.DataFrame({"trial": [0, 1], "status": "completed", "stage": ["r" * 24, last_stage(folder)]})
    Layout(folder).journal.touch()
    dtypes = {**trial_dtypes(), **dict.fromkeys(relative_names(ACCURACY), "float64")}
    typed(trials, dtypes).to_parquet(Layout(folder).trials)
    return folder, dense, row


def last_stage(folder: Path) -> str:
    return max(load_trace(folder).stages, key=lambda stage: stage.start).id


def sets(**values: Any) -> list[str]:
    texts = [f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in values.items()]
    return [part for text in texts for part in ("--set", text)]


@pytest.mark.slow
def test_a_trained_setting_is_told_as_it_was(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, row = study
    assert main(["replay", str(folder), *sets(**STOPPING)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "digits, 3 epochs, 30 steps, seed 0"
    assert "CAC_STOP_LAYER_NUM=0,6" in said[1]
    assert said[2:4] == [
        "iteration 5: stops through 0 (conv1.weight), manual",
        "iteration 20: stops through 6 (conv3.weight), manual",
    ]
    assert said[4].startswith(f"compute saved {100 * row['compute_saved']:.1f} % (backward ")
    assert said[5] == f"exact: trained before as trial 1, accuracy {row['quality']:.4f}"


@pytest.mark.slow
def test_what_the_study_lacks_is_counted_and_kept(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The variance rule was never attached in this study, and no costs were counted."""
    folder, dense, _ = study
    quick = sets(CAC_VAR_START_ITR=0, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
    assert main(["replay", str(folder), *quick]) == 0
    said = capsys.readouterr().out
    assert re.search(r"iteration \d+: stops through 0 \(conv1.weight\), start at variance/peak 0\.99", said)
    assert re.search(r"exact up to iteration \d+, estimated from the dense run after it", said)
    trace = load_trace(folder)
    assert trace.blueprint(TrialConfig()).names == trace.layer_names
    config = TrialConfig(CAC_VAR_START_ITR=0, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
    assert analysis.replay(trace, config).loc[0, "stops"] >= 1
    assert main(["replay", str(folder), *sets(CAC_VAR_START_THR=-1)]) == 0
    said = capsys.readouterr().out
    assert "stops nothing: CAC_VAR_START_THR is -1 (off)\ncompute saved 0.0 % (" in said
    assert said.endswith(f"exact: trained before as trial 0, accuracy {dense['quality']:.4f}\n")


def test_variables_of_the_environment_count(
    study: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = study
    monkeypatch.setenv("CAC_STOP_LAYER_NUM", "3")
    monkeypatch.setenv("CAC_STOP_LAYER_ITR", "7")
    assert main(["replay", str(folder), *sets(CAC_STOP_LAYER_ITR=9)]) == 0
    said = capsys.readouterr().out
    assert "iteration 9: stops through 3 (conv2.weight), manual" in said
    assert "exact in stops and savings; this run was not trained to its end, so its accuracy is not known" in said


def test_a_schedule_of_finetuning_scheduler_is_replayed_as_the_stop_that_it_is(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it never thaws is frozen: all up to conv2 and its norm; shown with the setting that says so."""
    folder, _, _ = study
    names = load_trace(folder).layer_names
    (tmp_path / "s.yaml").write_text(
        "0: {params: ['conv[3-9].*', 'norm[3-9].*', '(?!conv|norm).*']}\n1: {params: [], max_transition_epoch: 3}\n"
    )
    assert main(["replay", str(folder), "--finetuning-scheduler", str(tmp_path / "s.yaml")]) == 0
    said = capsys.readouterr().out
    through = max(number for number, name in enumerate(names) if name.startswith(("conv2", "norm2")))
    assert main(["replay", str(folder), *sets(CAC_STOP_LAYER_NUM=through, CAC_STOP_LAYER_ITR=-1)]) == 0
    assert said == capsys.readouterr().out
    assert f"iteration -1: stops through {through} (" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--finetuning-scheduler none.yaml", "cannot read schedule none.yaml: No such file"),
        ("--root x", "has no root 'x': give one of rrrr"),
        ("--set epochs=2", "epochs has an option of its own"),
        ("--set CAC_STOP_LAYER_NUM=90 --set CAC_STOP_LAYER_ITR=3", "CAC_STOP_LAYER_NUM must be at most 19"),
        ("--set svrg_alpha=0.5", "replay predicts Gradient-Skip alone, got settings of svrg"),
        ("--set agp_final_sparsity=0.5", "replay predicts Gradient-Skip alone, got settings of compression"),
    ],
)
def test_bad_input_is_one_line(study: Any, arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(study[0]), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def a_row(**changes: Any) -> dict[str, Any]:
    row = {
        "stops": 1, "stop_events": "[]", "compute_saved": 0.1, "backward_saved": 0.2, "exact": False,
        "accuracy": float("nan"), "exact_until": 12, "stage": "child",
    }  # fmt: skip
    return row | changes


def test_estimates_are_marked(study: Any) -> None:
    trace = load_trace(study[0])
    events = [
        {"iteration": 5, "layer": 0, "name": "a", "ratio": 0.98765, "rule": "start"},
        {"iteration": 15, "layer": 3, "name": "b", "ratio": 0.9, "rule": "slope"},
    ]
    assert prediction_lines(a_row(stop_events=json.dumps(events)), trace, [], Settings()) == [
        "iteration 5: stops through 0 (a), start at variance/peak 0.9877",
        "iteration 15: stops through 3 (b), slope at variance/peak 0.9000 (estimate)",
        "compute saved 10.0 % (backward 20.0 %)",
        "exact up to iteration 12, estimated from the nearest recorded run after it",
    ]
    blind = a_row(compute_saved=float("nan"), backward_saved=float("nan"), exact_until=4)
    assert prediction_lines(blind, trace, [], Settings(rule="plasticity")) == [
        "exact up to iteration 4, not predicted after it: what plasticity looks at is recorded only where a trial with "
        "the same timings has run it"
    ]
