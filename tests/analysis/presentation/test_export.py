"""What is exported reads back: in a shell, as YAML, JSON, CSV and Parquet; tables are well formed."""

from __future__ import annotations

import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from compressed import pruned, write_compressed
from studies import result_row, write_study

import analysis
from analysis.io.layout import Layout
from analysis.presentation.best_env import best_env
from analysis.presentation.export import export_table, export_trial, paper_cells
from analysis.presentation.settings_text import EPOCHS_VARIABLE
from trainables.compression.schedule import read_schedule
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME

CONFIGS = {
    "auto": TrialConfig(
        CAC_VAR_START_ITR=3, CAC_VAR_START_THR=0.1 + 0.2, CAC_VAR_SAMPLES=7, CAC_BRAKING_DISTANCE=2, epochs=12, seed=4
    ),
    "manual": TrialConfig(CAC_STOP_LAYER_NUM=(2, 10), CAC_STOP_LAYER_ITR=(0, 1_000_000)),
    "rule": TrialConfig(
        CAC_RULE="freezeout", CAC_RULE_START_ITR=5, CAC_RULE_END_ITR=50, CAC_RULE_CUBIC=True, CAC_RULE_SCALED=False,
        CAC_WATCH=("conv", "linear"), CAC_WHOLE_UNITS=True, CAC_NORM_STATISTICS="hold",
    ),
    "tolerance": TrialConfig(CAC_RULE="plasticity", CAC_RULE_TOLERANCE=1e-5, CAC_RULE_INTERVAL=9, forward_cache_mb=50),
    "off": TrialConfig(method="none"),
}  # fmt: skip


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """A baseline, a trial of each configuration, and one that failed."""
    trials = [
        {"row": result_row(0.97, saved, backward_saved=1.5 * saved), "config": config.to_dict()}
        for saved, config in zip((0.1, 0.2, 0.3, 0.0, -0.1), CONFIGS.values(), strict=True)
    ]
    return write_study(tmp_path / "s", [{"row": result_row()}, *trials, {"error": "it broke\nrm -rf /"}])


def row_of(layout: Layout, trial: int) -> pd.Series:
    return analysis.load(layout.root).iloc[trial]


def export(layout: Layout, trial: int, format: str) -> str:
    return export_trial(row_of(layout, trial), layout.read_info(), format)


def environment_after(text: str, folder: Path, **before: str) -> dict[str, str]:
    """The variables of a real POSIX shell that has sourced a file with this text."""
    (folder / "trial.env").write_text(text)
    done = subprocess.run(
        ["sh", "-eu", "-c", f". {folder / 'trial.env'} && env"], env={"PATH": "/usr/bin:/bin", **before},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name.startswith("CAC_") or name == EPOCHS_VARIABLE}


# --- one trial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 6))
def test_every_format_has_exactly_the_settings(number: int, study: Layout, tmp_path: Path) -> None:
    config = list(CONFIGS.values())[number - 1]
    found = Settings.from_environment(
        environment_after(export(study, number, "env"), tmp_path, **dict.fromkeys(BY_NAME, "1"))
    )
    expected = config.gradskip_settings() if config.method == "gradskip" else Settings(start_thr=-1)
    assert found == Settings.from_environment(expected.to_environment())  # an unset interval is written out
    text = export(study, number, "yaml")
    assert TrialConfig.from_mapping(yaml.safe_load(text)) == config
    assert "!!" not in text  # plain types alone
    assert TrialConfig.from_mapping(json.loads(export(study, number, "json"))) == config


@pytest.mark.parametrize("cut", [True, False])
def test_epochs_of_an_answer_that_was_sourced_before_are_not_left(cut: bool, study: Layout, tmp_path: Path) -> None:
    row = row_of(study, 1)
    if cut:
        row = row.copy()
        row["epochs"], row["of_epochs"] = 12, 30
    info = study.read_info()
    for text in (export_trial(row, info, "env"), best_env(info, row, 0.9)):
        left = environment_after(text, tmp_path, **{EPOCHS_VARIABLE: "7"}).get(EPOCHS_VARIABLE)
        assert left == ("12" if cut else None)


def test_comments_are_true_and_text_from_elsewhere_stays_in_them(study: Layout, tmp_path: Path) -> None:
    lines = export(study, 4, "env").splitlines()
    assert lines[:2] == [
        "# tune_cac: digits, 30 epochs, space auto_thresholds, seed 0",
        "# trial 4: compute saved 0.0 %, validation accuracy 0.9700, accuracy loss 0.00 points",
    ]
    assert any("forward_cache_mb=50" in line for line in lines)
    assert max(map(len, lines)) <= 120
    info = replace(
        study.read_info(), space="a\nexport CAC_VAR_START_THR=0.1", workload="w\r\nexit 7; `touch x` $(exit 3)"
    )
    row = row_of(study, 2)
    assert "CAC_VAR_START_THR" not in environment_after(export_trial(row, info, "env"), tmp_path)
    assert yaml.safe_load(export_trial(row, info, "yaml"))["CAC_STOP_LAYER_NUM"] == [2, 10]


def test_a_trial_without_a_result_and_a_wrong_format_are_refused(study: Layout) -> None:
    with pytest.raises(UserError) as caught:
        export(study, 6, "env")
    assert str(caught.value) == (
        "only a completed trial can be exported, trial 6 is failed (it broke rm -rf /): choose another"
    )
    with pytest.raises(UserError, match="unknown format of a trial 'jsn': did you mean 'json'"):
        export(study, 1, "jsn")


# --- tables ---------------------------------------------------------------------------------------------------------


def ranking_of(layout: Layout) -> pd.DataFrame:
    return analysis.rank(analysis.load(layout.root))


def test_data_formats_read_back_equal_without_the_test_split(study: Layout) -> None:
    ranking = ranking_of(study)
    content, text = export_table(ranking, "parquet"), export_table(ranking, "csv")
    assert isinstance(content, bytes)
    assert isinstance(text, str)
    ranking = ranking.drop(columns=["test_accuracy", "test_accuracy_drop"])
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(content)), ranking)
    # Text that is empty and text that is missing are one in a CSV file.
    texts = [name for name, dtype in ranking.dtypes.items() if dtype == "string"]
    ranking[texts] = ranking[texts].replace("", pd.NA)
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=dict(ranking.dtypes)), ranking)


def test_the_table_of_a_paper(study: Layout) -> None:
    assert paper_cells(ranking_of(study))[:3] == [
        ["rank", "accuracy (%)", "accuracy loss (points)", "compute saved (%)", "backward saved (%)", "settings"],
        [
            "1", "97.00", "0.00", "30.0", "45.0",
            "RULE=freezeout RULE_START_ITR=5 RULE_END_ITR=50 RULE_CUBIC=1 RULE_SCALED=0 WATCH=conv,linear "
            "WHOLE_UNITS=1 NORM_STATISTICS=hold",
        ],
        ["2", "97.00", "0.00", "20.0", "30.0", "STOP_LAYER_NUM=2,10 STOP_LAYER_ITR=0,1000000"],
    ]  # fmt: skip
    (baseline,) = [row for row in paper_cells(ranking_of(study)) if row[-1] == "baseline"]
    assert baseline[1:4] == ["97.00", "0.00", "0.0"]
    old = ranking_of(study).drop(columns="backward_saved")
    old["accuracy_drop"] = float("nan")
    assert paper_cells(old)[1][1:5] == ["97.00", "-", "30.0", "-"]


def test_latex_is_one_balanced_table(study: Layout) -> None:
    text = export_table(ranking_of(study), "latex")
    assert isinstance(text, str)
    lines = text.splitlines()
    assert (lines[1], lines[-1]) == (r"\begin{tabular}{rrrrrl}", r"\end{tabular}")
    rows = [line for line in lines if line.endswith(r" \\")]
    assert len(rows) == 1 + 6
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == 5
        assert not re.search(r"(?<!\\)[%#$_]", row)
    assert r"STOP\_LAYER\_NUM=2,10" in text
    trials = ranking_of(study).assign(options="rule=a<b|c>d")
    assert r"rule=a\textless{}b\textbar{}c\textgreater{}d" in str(export_table(trials, "latex"))


def test_wrong_tables_are_refused(study: Layout) -> None:
    with pytest.raises(UserError, match="unknown format of a table 'tex': did you mean 'latex'"):
        export_table(ranking_of(study), "tex")
    with pytest.raises(UserError, match="top must be an integer >= 1, got 0"):
        export_table(ranking_of(study), "csv", top=0)


# --- trials that compress -------------------------------------------------------------------------------------------

MARKED = """version: 1
pruners: {one: {class: SparsityLevelParameterPruner, levels: {fc.weight: !search {low: 0.1, high: 0.9}}}}
policies: [{pruner: {instance_name: one}, epochs: [2]}]
"""


def test_schedules_are_exported_plain_and_printed_in_no_table(tmp_path: Path) -> None:
    together = {"CAC_VAR_START_THR": 0.97, "agp_final_sparsity": 0.8, "agp_weights": ("fc.weight",)}
    marked = {"schedule": MARKED, "schedule_values": ("pruners.one.levels.fc.weight=0.25",)}
    trials = [
        pruned(0.968, 0.5, 0.1),
        pruned(0.967, 0.4, method="gradskip+compression", **together),
        pruned(0.966, 0.3, **marked),
    ]
    compressed = write_compressed(tmp_path / "c", trials)
    text = export(compressed, 3, "schedule")
    assert text.startswith("# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0\n# trial 3: inference")
    assert "!search" not in text
    assert yaml.safe_load(text)["pruners"]["one"]["levels"] == {"fc.weight": 0.25}
    assert [len(read_schedule(export(compressed, n, "schedule")).policies) for n in (1, 2, 3)] == [1, 1, 1]
    for format in ("csv", "latex", "markdown"):
        table = export_table(ranking_of(compressed), format)
        assert isinstance(table, str)
        assert "LevelParameterPruner" not in table
        assert ("YAML of 3 lines" in table) == (format == "csv")
