"""The commands that list spaces and workloads, and single trials with and without a schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands_run import Run

import search_spaces
from search_spaces import SPACES
from trainables.gradskip.variables import BY_NAME
from tune_cac.cli.main import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_spaces_lists_and_shows_ranges_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spaces"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[: len(SPACES)]] == list(SPACES)
    assert listed[0].endswith(SPACES["auto_thresholds"])
    assert main(["spaces", "auto_thresholds", "--epochs", "10"]) == 0
    out = capsys.readouterr().out
    assert "10 epochs, 100 steps" in out
    line = next(line for line in out.splitlines() if line.startswith("CAC_VAR_START_ITR"))
    assert "0 .. 50" in line
    assert "first iteration of an examination" in line


@pytest.mark.parametrize(
    ("command", "width"),
    [(name, width) for name in ("spaces", "workloads") for width in (40, 80, 140)]
    + [("spaces auto_thresholds", 80), ("spaces auto_thresholds", 140)],
)
def test_a_terminal_gets_lists_and_tables_in_lines_of_its_width(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(command.split())
    piped = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert out.split() == piped.split()


def test_spaces_shows_conditions_and_meanings_of_branches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spaces", "stop_rules"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "CAC_RULE=linear" in lines["linear.CAC_RULE_DEPTH"]
    assert "0.1 .. 1.0" in lines["linear.CAC_RULE_DEPTH"]
    assert BY_NAME["CAC_RULE_DEPTH"].meaning in lines["linear.CAC_RULE_DEPTH"]
    assert " 0.5 " in lines["linear.CAC_RULE_DEPTH"]  # the default
    assert "always" in lines["CAC_RULE"]
    assert list(lines).index("freezeout.CAC_RULE_CUBIC") < list(lines).index("plasticity.CAC_RULE_WINDOW")


def test_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digits ")
    assert "real handwritten digits" in out
    for name in ("images", "text", "module:function", "--script 'COMMAND'"):
        assert f"\n{name} " in out


@pytest.mark.slow
def test_trial_trains_here_without_ray(tune_cac_command: Run) -> None:
    done = tune_cac_command(
        "trial", "--epochs", "2", "--set", "CAC_STOP_LAYER_NUM=5", CAC_STOP_LAYER_ITR="9", CAC_BRAKING_DISTANCE="3",
        PYTHONPROFILEIMPORTTIME="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CAC_STOP_LAYER_NUM=5  CAC_STOP_LAYER_ITR=9  CAC_BRAKING_DISTANCE=3" in done.stdout
    assert "iteration 9: stopped through 5 (norm2.bias), manual" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch" in loaded
    assert "ray" not in loaded


def test_a_trial_does_not_call_another_rules_number_a_variance(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("CAC_RULE=gradient_norm", "CAC_RULE_INTERVAL=5", "CAC_RULE_PERCENTILE=100")
    assert main(["trial", "--epochs", "2", *(part for setting in settings for part in ("--set", setting))]) == 0
    said = r"^iteration 5: stopped through \d+ \(.*\), gradient_norm at ratio \d\.\d{4}$"
    assert re.search(said, capsys.readouterr().out, re.M)


def test_trial_warns_of_a_start_past_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trial", "--epochs", "1"]) == 0
    captured = capsys.readouterr()
    reason = (
        "the first stop can come at iteration 5200 at the earliest (CAC_VAR_START_ITR=5000, decided every 200), the "
        "run has 10 steps: set both lower, such as CAC_VAR_START_ITR=2 and CAC_VAR_SAMPLES=1"
    )
    assert f"warning: nothing will stop: {reason}\n" in captured.err
    assert f"nothing stopped: {reason}\n" in captured.out


def test_a_trial_that_diverges_exits_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainables.workloads.digits import Digits

    real = Digits.loss
    monkeypatch.setattr(Digits, "loss", lambda self, model, batch: real(self, model, batch) * float("nan"))
    assert main(["trial", "--epochs", "1", "--method", "none"]) == 1
    assert capsys.readouterr().err == "tune_cac: the trial failed: the training loss is nan in epoch 1\n"


SCHEDULE = """version: 1
pruners:
  fine: {class: SensitivityPruner, sensitivities: {"conv*.weight": 0.5}}
policies:
- {pruner: {instance_name: fine}, starting_epoch: 4, ending_epoch: 6}
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "trial --schedule s.yaml --epochs 3",
            "policies[0] of the schedule never acts: the last epoch of the run is 2; begin earlier, or give more "
            "--epochs",
        ),
        (
            "trial --method gradskip --schedule s.yaml",
            "--schedule needs --method compression or gradskip+compression, got --method gradskip",
        ),
        (
            "search --space schedule --schedule s.yaml",
            "space schedule searches marked values, and the schedule has none: mark some, such as "
            "!search {low: 0.1, high: 0.9}, or search another space",
        ),
    ],
)
def test_schedules_that_would_do_nothing(arguments: str, message: str, refused: Callable[..., str]) -> None:
    Path("s.yaml").write_text(SCHEDULE)
    assert refused(*arguments.split()) == message


def test_a_name_that_matches_nothing_is_told_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(SCHEDULE.replace("conv*", "cov*"))
    assert main(["trial", "--schedule", "s.yaml", "--epochs", "6"]) == 2
    assert "s.yaml:3: pruners.fine.sensitivities.cov*.weight: 'cov*.weight' matches no" in capsys.readouterr().err


PUBLISHED = (
    "lr_scheduler: none\npruners:\n  fine:\n    class: AutomatedGradualPruner\n    initial_sparsity: 0.05\n"
    "    final_sparsity: 0.5\n    weights: [conv2.weight, module.fc.weight]\n  spare: {class: SensitivityPruner, "
    "sensitivities: {conv1.weight: 0.1}}\npolicies:\n"
    "  - {pruner: {instance_name: fine}, starting_epoch: 0, ending_epoch: 2, frequency: 1}\n"
)


def test_a_trial_takes_what_distiller_took_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    """A section and a pruner that nobody uses, a name that matches nothing, no version."""
    Path("s.yaml").write_text(PUBLISHED)
    assert main(["trial", "--schedule", "s.yaml", "--epochs", "2"]) == 2
    assert "s.yaml:1: lr_scheduler: unknown section, did you mean 'lr_schedulers'?" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="s.yaml") as said:
        assert main(["trial", "--schedule", "s.yaml", "--epochs", "2", "--compatible"]) == 0
    texts = [str(warning.message) for warning in said]
    for part in ("version is missing", "unknown section", "is used by no policy", "module.fc.weight"):
        assert any(part in text for text in texts), part
    assert "sparsity" in capsys.readouterr().out


def test_a_trial_says_where_marked_values_stand(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(
        SCHEDULE.replace("0.5", "!search {low: 0.2, high: 0.6}").replace("_epoch: 4", "_epoch: 0")
    )
    assert main(["trial", "--schedule", "s.yaml", "--epochs", "1"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("marked values take the middle of their ranges: pruners.fine.sensitivities.conv*.weight 0.4")
    assert "sparsity" in out


def test_files_of_teachers_are_named_from_the_root(tmp_path: Path) -> None:
    from tune_cac.study.fixed_params import check_hold, with_schedule

    Path("teacher.pt").touch()
    Path("s.yaml").write_text(
        "version: 1\ndistillers:\n  t: {class: KnowledgeDistillation, checkpoint: teacher.pt}  # mine\n"
        "policies:\n- {distiller: {instance_name: t}, starting_epoch: 0, ending_epoch: 2}\n"
    )
    assert f'checkpoint: "{tmp_path / "teacher.pt"}"}}  # mine' in with_schedule({}, "s.yaml")["schedule"]
    held = check_hold(search_spaces.load("distillation"), {"distill_checkpoint": "teacher.pt"})
    assert held["distill_checkpoint"] == str(tmp_path / "teacher.pt")
