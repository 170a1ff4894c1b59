"""The command ``schedule check``: what it prints, its exit codes, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainables.errors import UserError
from tune_cac.cli.main import main

SCHEDULES = Path(__file__).parents[3] / "docs" / "schedules"

GOOD = """\
version: 1
pruners:
  conv_agp:
    class: AutomatedGradualPruner
    initial_sparsity: 0.0
    final_sparsity: 0.75
    weights: ['conv[1-6].weight', classifier.weight]
extensions:
  thinner: {class: FilterRemover, arch: resnet20_cifar}
policies:
  - pruner: {instance_name: conv_agp}
    starting_epoch: 2
    ending_epoch: 7
    frequency: 4
  - extension: {instance_name: thinner}
    epochs: [8, 9]
"""


def check(*arguments: str) -> int:
    return main(["schedule", "check", *arguments])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("s.yaml")
    path.write_text(GOOD)
    return path


def test_it_prints_what_acts_on_what_and_when(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("s.yaml", "--workload", "digits") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "s.yaml: 1 pruner, 1 extension, 2 policies; on digits",
        "",
        "pruner conv_agp, AutomatedGradualPruner: epochs 2-6 every 4",
        "  conv1.weight (8, 1, 3, 3), conv2.weight (8, 8, 3, 3), conv3.weight (16, 8, 3, 3), "
        "conv4.weight (16, 16, 3, 3), conv5.weight (32, 16, 3, 3), conv6.weight (32, 32, 3, 3), "
        "classifier.weight (10, 32)",
        "",
        "extension thinner, FilterRemover: epochs 8, 9",
        "",
        "30 epochs; shares are planned ones, of elements or of structures",
        "epochs  acts",
        "2       conv_agp 0",
        "6       conv_agp 0.75",
        "8-9     thinner",
    ]


def test_all_errors_are_printed_with_lines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("classifier.weight", "clasifier.weight").replace("FilterRemover", "FilterRemove")
    file.write_text(text.replace("version: 1\n", "version: 1\npruner: {}\n"))
    assert check("s.yaml", "--workload", "digits", "--epochs", "2") == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(": ")[:2] for error in errors] == [
        ["s.yaml:2", "pruner"],
        ["s.yaml:8", "pruners.conv_agp.weights.1"],
        ["s.yaml:10", "extensions.thinner.class"],
        ["s.yaml:12", "policies.0"],
        ["4 errors"],
    ]
    assert errors[3] == (
        "s.yaml:12: policies.0: never acts: it begins in epoch 2, and the training's last is 1; begin earlier, or give "
        "--epochs"
    )


def test_where_nothing_acts_there_is_no_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("s.yaml", "--workload", "digits", "--epochs", "1") == 2
    out, err = capsys.readouterr()
    assert "epochs  acts" not in out
    assert err.count("never acts") == 2


def test_compatible_warns(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("version: 1\n", "").replace("classifier.weight", "nothing"))
    assert check("s.yaml", "--workload", "digits", "--compatible") == 0
    out, err = capsys.readouterr()
    assert [line.split(": ")[:3] for line in err.splitlines()] == [
        ["warning", "s.yaml:1", "version is missing"],
        ["warning", "s.yaml:6", "pruners.conv_agp.weights.1"],
    ]
    assert "conv6.weight (32, 32, 3, 3)\n" in out


def test_ranges_stand_at_their_middle(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("0.75", "!search {low: 0.5, high: 0.9}")
    file.write_text(text.replace("FilterRemover", "!search {choices: [ChannelRemover, x]}"))
    assert check("s.yaml") == 0
    out = capsys.readouterr().out
    assert "6       conv_agp 0.7\n" in out
    assert out.endswith(
        "note: pruners.conv_agp.final_sparsity is searched (0.5 to 0.9); shown with 0.7\n"
        "note: extensions.thinner.class is searched (ChannelRemover, x); shown with ChannelRemover\n"
    )
    file.write_text("a: !search {low: 1}\nb: !search 3\n")
    assert check("s.yaml") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "2 errors"


def test_long_lists_are_cut_and_overrides_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(str(SCHEDULES / "resnet20_splicing.yaml"), "--workload", "images", "--model", "resnet20") == 0
    out = capsys.readouterr().out
    assert "; on resnet20 with 10 classes (without data)\n" in out
    assert ", ... 31 more\n" in out  # 6 of 37 are named
    assert "  milestones [15, 23], gamma 0.1\n" in out
    assert check(str(SCHEDULES / "digits_dorefa_pruned.yaml"), "--workload", "digits") == 0
    assert "  overrides of conv1, relu1, classifier\n" in capsys.readouterr().out


def test_arguments_of_learning_rate_schedules_are_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        "version: 1\nlr_schedulers:\n  lr: {class: StepLR, step_siz: 3}\npolicies:\n"
        "  - lr_scheduler: {instance_name: lr}\n    epochs: [0]\n"
    )
    assert check("s.yaml") == 2
    assert capsys.readouterr().err.startswith("s.yaml:3: lr_schedulers.lr: ")


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model resnet20", "model=resnet20 needs --workload, whose option it is"),
        ("--workload images --model a:b", "model a:b is tried on images of the data: give --data PATH, too"),
        ("--workload digit", "unknown workload 'digit': did you mean 'digits'? Valid: binary_mlp, digits, "),
    ],
)
def test_what_is_wrong_is_said(arguments: str, message: str, refused: Callable[..., str]) -> None:
    assert refused("schedule", "check", "s.yaml", *arguments.split()).startswith(message)


def test_classes_count_without_data() -> None:
    from tune_cac.cli.schedule import facts_of_workload

    assert facts_of_workload("images", ["classes=7"])[1] == "resnet20 with 7 classes (without data)"
    with pytest.raises(UserError, match="classes of workload images must be an integer, got 'x'"):
        facts_of_workload("images", ["classes=x"])


def test_own_classes_and_their_names_are_looked_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_pruners.py").write_text("class Every: pass\n")
    file.write_text(
        "version: 1\npruners:\n  p: {class: 'own_pruners:Evry', weights: [conv9.weight]}\n"
        "policies:\n  - {pruner: {instance_name: p}, epochs: [0]}\n"
    )
    assert check("s.yaml", "--workload", "digits") == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("s.yaml:3: pruners.p.weights.0: unknown parameter 'conv9.weight'")
    assert err[1].startswith(
        "s.yaml:3: pruners.p.class: pruner own_pruners:Evry: unknown name in own_pruners 'Evry': did"
    )
