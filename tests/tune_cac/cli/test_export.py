"""The command ``export`` on studies written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from compressed import pruned, write_compressed
from studies import result_row, write_study
from thorough import rest_thorough

from analysis.io.study_files import Layout
from trainables.config import TrialConfig
from tune_cac.cli.main import main
from tune_cac.study.study_result import answer, write_answer

CONFIG = TrialConfig(CAC_VAR_START_THR=0.97, CAC_VAR_SAMPLES=5)


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """A baseline, the best, one that drops too much, one that saves nothing, and one that failed."""
    trials: list[dict[str, Any]] = [
        {"row": result_row()},
        {"row": result_row(0.97, 0.25), "config": CONFIG.to_dict()},
        {"row": result_row(0.95, 0.5)},
        {"row": result_row(0.97, 0.0), "config": TrialConfig(CAC_VAR_START_ITR=9).to_dict()},
        {"error": "it broke"},
    ]
    return write_study(tmp_path / "s", trials)


def run(layout: Layout, *arguments: str) -> int:
    return main(["export", layout.root.name, "--results", str(layout.root.parent), *arguments])


@pytest.mark.slow
def test_without_a_trial_it_is_best_env(study: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    write_answer(study, answer(study, allowed_drop=0.005))
    assert run(study) == 0
    out = capsys.readouterr().out
    assert out == study.best.read_text()
    assert "export CAC_VAR_START_THR=0.97\n" in out


def test_the_best_as_yaml_and_json(study: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(study, "--as", "yaml") == 0
    assert TrialConfig.from_mapping(yaml.safe_load(capsys.readouterr().out)) == CONFIG
    assert run(study, "--as", "json") == 0
    assert TrialConfig.from_mapping(json.loads(capsys.readouterr().out)) == CONFIG


def test_the_allowed_drop_chooses_the_best(study: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(study, "--as", "yaml", "--allowed-drop", "0.03") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("# trial 2: compute saved 50.0 %")


def test_a_trial_by_its_number(study: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(study, "--trial", "3") == 0
    out = capsys.readouterr().out
    assert "# trial 3: compute saved 0.0 %, validation accuracy 0.9700, accuracy loss 0.00 points\n" in out
    assert "export CAC_VAR_START_ITR=9\n" in out


def test_a_trial_into_a_file(study: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trial.json"
    assert run(study, "--trial", "1", "--as", "json", "--output", str(file)) == 0
    assert TrialConfig.from_mapping(json.loads(file.read_text())) == CONFIG
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--trial 99", r"no trial 99 in .*s: it has 0 to 4"),
        ("--trial 4", r"only a completed trial can be exported, trial 4 is failed \(it broke\): choose another"),
        ("--as schedule", "a trial must compress something to have a schedule, trial 1 does not: choose another"),
        ("--as csv", "--as csv is gone: the study's folder has ranking.csv and trials.parquet"),
        ("--as ymal", "unknown --as 'ymal': did you mean 'yaml'"),
        ("--allowed-drop 2.0", "the allowed accuracy loss must be a fraction in .*, got 2.0"),
        ("--output /dev/null/best.env", "cannot write --output /dev/null/best.env: Not a directory; choose another"),
    ],
)
def test_what_is_wrong_is_said(arguments: str, message: str, study: Layout, refused: Callable[..., str]) -> None:
    assert re.match(message, refused("export", str(study.root), *arguments.split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trials", "message"),
    rest_thorough(
        [
            ([], "has no best trial to export: no trial has completed, so there is nothing to rank; give --trial"),
            (
                [{"error": "x"}, {"row": result_row(0.9, 0.5)}],
                "to export: the baseline did not complete, so no accuracy loss",
            ),
            (
                [{"row": result_row()}, {"row": result_row(0.5, 0.5)}],
                "to export: no setting tried saves compute within the allowed accuracy loss of 0.50 points. Nearest is",
            ),
        ],
        of_several=True,
    ),
)
def test_no_best_is_said(
    trials: list[dict[str, Any]], message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for format in ("env", "yaml", "json", "schedule"):
        root = write_study(tmp_path / format, trials).root
        assert message in refused("export", str(root), "--as", format)


def test_a_study_that_has_not_begun(tmp_path: Path, refused: Callable[..., str]) -> None:
    root = str(write_study(tmp_path / "s", []).root)
    assert refused("export", root, "--trial", "0").endswith("s: it has none yet")


@pytest.mark.slow
def test_the_best_schedule_is_best_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_compressed(tmp_path / "c", [pruned(0.968, 0.5), pruned(0.95, 0.9), pruned(0.97, 0.2)])
    write_answer(study, answer(study, allowed_drop=0.005))
    assert run(study, "--as", "schedule") == 0
    out = capsys.readouterr().out
    assert out == study.best_schedule.read_text()
    assert yaml.safe_load(out)["pruners"]["sensitivity_pruner"]["sensitivities"] == {
        "conv1.weight": 0.5, "conv2.weight": 0.25,
    }  # fmt: skip
    assert run(study, "--as", "env") == 0
    assert capsys.readouterr().out == study.best.read_text()
    assert run(study, "--as", "schedule", "--trial", "2", "--output", str(tmp_path / "two.yaml")) == 0
    assert "# trial 2: inference compute saved 90.0 %" in (tmp_path / "two.yaml").read_text()
    assert run(study, "--as", "schedule", "--allowed-drop", "0.03") == 0
    assert "# Take the settings of trial 2: saves 90.0 % of the inference compute" in capsys.readouterr().out
