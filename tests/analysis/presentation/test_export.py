"""What is exported reads back: in a shell, as YAML and as JSON."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from compressed import pruned, write_compressed
from studies import result_row, write_study

import analysis
from analysis.io.study_files import Layout
from analysis.presentation.best_env import best_env
from analysis.presentation.export import export_trial
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
    assert "export TUNE_CAC_FORWARD_CACHE_MB=50" in lines
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
    with pytest.raises(UserError, match="unknown --format 'jsn': did you mean 'json'"):
        export(study, 1, "jsn")


# --- trials that compress -------------------------------------------------------------------------------------------

MARKED = """version: 1
pruners: {one: {class: SparsityLevelParameterPruner, levels: {fc.weight: !search {low: 0.1, high: 0.9}}}}
policies: [{pruner: {instance_name: one}, epochs: [2]}]
"""


def test_schedules_are_exported_plain(tmp_path: Path) -> None:
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
