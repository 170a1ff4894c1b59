"""What is exported reads back: in a shell, as YAML, JSON, CSV and Parquet; tables are well formed."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from compressed import pruned, write_compressed
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import result_row, write_study

import analysis
from analysis.io.layout import Layout, StudyInfo
from analysis.presentation.export import export_table, export_trial, latex_text, paper_cells
from analysis.presentation.settings_text import EPOCHS_VARIABLE
from analysis.presentation.summary_text import best_env
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


def environment_after(script: Path, **before: str) -> dict[str, str]:
    """The variables of a real POSIX shell that has sourced a file."""
    done = subprocess.run(
        ["sh", "-eu", "-c", f". {script} && env"], env={"PATH": "/usr/bin:/bin", **before}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name.startswith("CAC_") or name == EPOCHS_VARIABLE}


# --- one trial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 6))
def test_a_shell_that_sources_env_has_exactly_the_settings(number: int, study: Layout, tmp_path: Path) -> None:
    config = list(CONFIGS.values())[number - 1]
    script = tmp_path / "trial.env"
    script.write_text(export_trial(row_of(study, number), study.read_info(), "env"))
    left_over = dict.fromkeys(BY_NAME, "1")
    found = Settings.from_environment(environment_after(script, **left_over))
    expected = config.gradskip_settings() if config.method == "gradskip" else Settings(start_thr=-1)
    assert found == Settings.from_environment(expected.to_environment())  # an unset interval is written out
    assert found.mode == expected.mode


@pytest.mark.parametrize("cut", [True, False])
def test_epochs_of_an_answer_that_was_sourced_before_are_not_left(cut: bool, study: Layout, tmp_path: Path) -> None:
    row = row_of(study, 1)
    if cut:
        row = row.copy()
        row["epochs"], row["of_epochs"] = 12, 30
    info = study.read_info()
    for place, text in enumerate((export_trial(row, info, "env"), best_env(info, row, 0.9))):
        script = tmp_path / f"{place}.env"
        script.write_text(text)
        assert environment_after(script, **{EPOCHS_VARIABLE: "7"}).get(EPOCHS_VARIABLE) == ("12" if cut else None)


@pytest.mark.parametrize("number", range(1, 6))
def test_yaml_and_json_are_the_config(number: int, study: Layout) -> None:
    config = list(CONFIGS.values())[number - 1]
    text = export_trial(row_of(study, number), study.read_info(), "yaml")
    assert TrialConfig.from_mapping(yaml.safe_load(text)) == config
    assert "!!" not in text  # plain types alone
    assert (
        TrialConfig.from_mapping(json.loads(export_trial(row_of(study, number), study.read_info(), "json"))) == config
    )


@pytest.mark.parametrize("number", [2, 3, 5])
def test_what_the_lines_say_is_true(number: int, study: Layout) -> None:
    lines = export_trial(row_of(study, number), study.read_info(), "env").splitlines()
    saved = {2: "20.0 %", 3: "30.0 %", 5: "-10.0 %"}[number]
    assert lines[0] == "# tune_cac: digits, 30 epochs, space auto_thresholds, seed 0"
    assert lines[1] == f"# trial {number}: compute saved {saved}, validation accuracy 0.9700, accuracy loss 0.00 points"
    assert ("forward_cache_mb=50" in "".join(lines)) == (number == 4)
    assert max(map(len, lines)) <= 120


def test_text_from_elsewhere_stays_in_its_comment(study: Layout, tmp_path: Path) -> None:
    info = StudyInfo(
        space="a\nexport CAC_VAR_START_THR=0.1", workload="w\r\nexit 7; `touch x` $(exit 3)", epochs=1, seed=0,
        trials=1, allowed_drop=0.005, versions={},
    )  # fmt: skip
    script = tmp_path / "trial.env"
    script.write_text(export_trial(row_of(study, 2), info, "env"))
    assert "CAC_VAR_START_THR" not in environment_after(script)
    assert yaml.safe_load(export_trial(row_of(study, 2), info, "yaml"))["CAC_STOP_LAYER_NUM"] == [2, 10]


def test_a_trial_without_a_result_and_a_wrong_format_are_refused(study: Layout) -> None:
    info = study.read_info()
    with pytest.raises(UserError) as caught:
        export_trial(row_of(study, 6), info, "env")
    assert str(caught.value) == (
        "only a completed trial can be exported, trial 6 is failed (it broke rm -rf /): choose another"
    )
    with pytest.raises(UserError, match="unknown format of a trial 'jsn': did you mean 'json'"):
        export_trial(row_of(study, 1), info, "jsn")


# --- tables ---------------------------------------------------------------------------------------------------------


def ranking_of(layout: Layout) -> pd.DataFrame:
    return analysis.rank(analysis.load(layout.root))


def without_test(ranking: pd.DataFrame) -> pd.DataFrame:
    return ranking.drop(columns=["test_accuracy", "test_accuracy_drop"])


def test_parquet_reads_back_equal(study: Layout) -> None:
    ranking = ranking_of(study)
    content = export_table(ranking, "parquet")
    assert isinstance(content, bytes)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(content)), without_test(ranking))


def test_csv_reads_back_equal(study: Layout) -> None:
    ranking = without_test(ranking_of(study))
    text = export_table(ranking_of(study), "csv")
    assert isinstance(text, str)
    found = pd.read_csv(io.StringIO(text), dtype=dict(ranking.dtypes))
    # Text that is empty and text that is missing are one in a CSV file.
    texts = [name for name, dtype in ranking.dtypes.items() if dtype == "string"]
    ranking[texts] = ranking[texts].replace("", pd.NA)
    pd.testing.assert_frame_equal(found, ranking)
    assert "test_accuracy" not in text


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
    assert lines[1] == r"\begin{tabular}{rrrrrl}"
    assert lines[-1] == r"\end{tabular}"
    assert text.count(r"\begin{") == text.count(r"\end{") == 1
    rows = [line for line in lines if line.endswith(r" \\")]
    assert len(rows) == 1 + 6
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == 5
        assert not re.search(r"(?<!\\)[%#$_]", row)
    assert r"STOP\_LAYER\_NUM=2,10" in text
    assert r"accuracy (\%)" in rows[0]


#: What LaTeX makes of our escapes, written out anew.
_SHOWN = {
    r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textless{}": "<",
    r"\textgreater{}": ">", r"\textbar{}": "|",
}  # fmt: skip


@settings(max_examples=200)
@given(st.text(alphabet="\\&%$#_{}~^<>|\"ab '-", max_size=12))
def test_every_character_survives_latex(text: str) -> None:
    commands = "|".join(map(re.escape, _SHOWN))
    tokens = re.findall(rf"{commands}|\\[&%$#_{{}}]|[^\\&%$#_{{}}~^<>|]", latex_text(text))
    assert "".join(tokens) == latex_text(text)  # nothing special is left bare
    shown = "".join(_SHOWN.get(token, token[-1]) for token in tokens)
    assert shown == " ".join(text.split())


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("tex", {}, "unknown format of a table 'tex': did you mean 'latex'"),
        ("csv", {"top": 0}, "top must be an integer >= 1, got 0"),
    ],
)
def test_wrong_tables_are_refused(format: str, given: dict[str, Any], message: str, study: Layout) -> None:
    with pytest.raises(UserError, match=message):
        export_table(ranking_of(study), format, **given)


# --- trials that compress -------------------------------------------------------------------------------------------

MARKED = """version: 1
pruners: {one: {class: SparsityLevelParameterPruner, levels: {fc.weight: !search {low: 0.1, high: 0.9}}}}
policies: [{pruner: {instance_name: one}, epochs: [2]}]
"""


@pytest.fixture
def compressed(tmp_path: Path) -> Layout:
    """One that prunes by sensitivities, one that also skips gradients, and one with a schedule of its own."""
    together = {"CAC_VAR_START_THR": 0.97, "agp_final_sparsity": 0.8, "agp_weights": ("fc.weight",)}
    marked = {"schedule": MARKED, "schedule_values": ("pruners.one.levels.fc.weight=0.25",)}
    trials = [
        pruned(0.968, 0.5, 0.1),
        pruned(0.967, 0.4, method="gradskip+compression", **together),
        pruned(0.966, 0.3, **marked),
    ]
    return write_compressed(tmp_path / "c", trials)


def test_the_plain_schedule_of_a_trial(compressed: Layout) -> None:
    info = compressed.read_info()
    text = export_trial(row_of(compressed, 3), info, "schedule")
    assert text.startswith("# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0\n# trial 3: inference")
    assert "!search" not in text
    assert yaml.safe_load(text)["pruners"]["one"]["levels"] == {"fc.weight": 0.25}
    assert [len(read_schedule(export_trial(row_of(compressed, n), info, "schedule")).policies) for n in (1, 2, 3)] == [
        1, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("format", ["csv", "latex", "markdown"])
def test_no_table_prints_a_schedule(format: str, compressed: Layout) -> None:
    text = export_table(ranking_of(compressed), format)
    assert isinstance(text, str)
    assert "LevelParameterPruner" not in text
    assert ("YAML of 3 lines" in text) == (format == "csv")
