"""The flags of a training script: names, defaults, types, and the help text."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from trainables.compression.distillation import add_distillation_args

DEFAULTS: dict[str, Any] = {
    "kd_teacher": None, "kd_pretrained": False, "kd_resume": None, "kd_temp": 1.0, "kd_distill_wt": 0.5,
    "kd_student_wt": 0.5, "kd_teacher_wt": 0.0, "kd_start_epoch": 0,
}  # fmt: skip


def parser(**more: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100))
    add_distillation_args(made, **more)
    return made


def test_the_published_defaults() -> None:
    assert vars(parser().parse_args([])) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["--kd-teacher", "resnet56"], "kd_teacher", "resnet56"),
        (["--kd-pretrained"], "kd_pretrained", True),
        (["--kd-resume", "best.pt"], "kd_resume", "best.pt"),
        (["--kd-temperature", "4"], "kd_temp", 4.0),
        (["--kd-temp", "0.5"], "kd_temp", 0.5),
        (["--kd-distill-wt", "0.7"], "kd_distill_wt", 0.7),
        (["--kd-dw", "0.7"], "kd_distill_wt", 0.7),
        (["--kd-student-wt", "0"], "kd_student_wt", 0.0),
        (["--kd-sw", "0.3"], "kd_student_wt", 0.3),
        (["--kd-teacher-wt", "1e-1"], "kd_teacher_wt", 0.1),
        (["--kd-tw", "0.1"], "kd_teacher_wt", 0.1),
        (["--kd-start-epoch", "7"], "kd_start_epoch", 7),
    ],
)
def test_every_flag(given: list[str], name: str, value: Any) -> None:
    assert vars(parser().parse_args(given)) == {**DEFAULTS, name: value}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kd-temp", "0"], "argument --kd-temperature/--kd-temp: must be a number > 0, got '0'"),
        (["--kd-temp", "hot"], "argument --kd-temperature/--kd-temp: must be a number > 0, got 'hot'"),
        (["--kd-temp", "inf"], "argument --kd-temperature/--kd-temp: must be a number > 0, got 'inf'"),
        (["--kd-dw", "-1"], "argument --kd-distill-wt/--kd-dw: must be a number >= 0, got '-1'"),
        (["--kd-sw", "nan"], "argument --kd-student-wt/--kd-sw: must be a number >= 0, got 'nan'"),
        (["--kd-start-epoch", "1.5"], "argument --kd-start-epoch: must be a whole number >= 0, got '1.5'"),
        (["--kd-start-epoch", "-2"], "argument --kd-start-epoch: must be a whole number >= 0, got '-2'"),
    ],
)
def test_values_of_another_kind(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(given)
    assert capsys.readouterr().err.splitlines()[-1] == f"train: error: {message}"


def test_teachers_can_be_restricted(capsys: pytest.CaptureFixture[str]) -> None:
    restricted = parser(arch_choices=["resnet20", "resnet56"])
    assert restricted.parse_args(["--kd-teacher", "resnet56"]).kd_teacher == "resnet56"
    with pytest.raises(SystemExit):
        restricted.parse_args(["--kd-teacher", "resnet57"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train: error: argument --kd-teacher: invalid choice: 'resnet57'")
    assert "resnet20" in error


def test_without_pretrained_models_there_is_no_flag_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    without = parser(enable_pretrained=False)
    assert vars(without.parse_args([])) == DEFAULTS
    with pytest.raises(SystemExit):
        without.parse_args(["--kd-pretrained"])
    assert "unrecognized arguments: --kd-pretrained" in capsys.readouterr().err
