"""The command ``compare`` on studies written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from studies import result_row, write_study

from trainables.config import TrialConfig
from tune_cac.cli.main import main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two studies of one training, ``a`` and ``b``, and an empty one."""
    config = TrialConfig(CAC_VAR_START_THR=0.97, CAC_VAR_SAMPLES=5).to_dict()
    write_study(
        tmp_path / "a",
        [{"row": result_row()}, {"row": result_row(saved=0.25), "config": config}, {"row": result_row(0.968, 0.4)}],
    )
    other = write_study(tmp_path / "b", [{"row": result_row()}, {"row": result_row(0.96, 0.5)}])
    other.write_info(replace(other.read_info(), space="manual_layers"))
    write_study(tmp_path / "empty", [])
    return tmp_path


def run(results: Path, *arguments: str) -> int:
    return main(["compare", "--results", str(results), *arguments])


def rows_of(lines: list[str]) -> list[list[str]]:
    """The rows of the tables, split into words."""
    return [line.split() for line in lines if line.startswith(("a ", "b ")) and "saves" not in line]


def test_it_prints_the_studies_and_their_joint_front(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(results, "a", "b") == 0
    lines = capsys.readouterr().out.splitlines()
    table = rows_of(lines)
    assert lines[0] == "digits, 30 epochs"
    assert table[:2] == [
        ["a", "auto_thresholds", "3", "0", "2", "0.01970", "2", "40.0", "%", "+0.0020", "2.4", "67", "%"],
        ["b", "manual_layers", "2", "0", "1", "0.02000", "-", "-", "-", "1.5", "33", "%"],
    ]
    assert "Joint front, 3 trials:" in lines
    assert [row[:4] for row in table[2:]] == [
        ["b", "1", "50.0", "%"], ["a", "2", "40.0", "%"], ["a", "1", "25.0", "%"]
    ]  # fmt: skip
    assert table[-1][6:] == ["START_THR=0.97", "SAMPLES=5"]
    assert "a saves most within the allowed accuracy loss of 0.50 points: 40.0 % of the training compute." in lines
    assert lines[-1].startswith("Hypervolume: above nothing saved at an accuracy loss of 5 points. One seed a trial: ")


def test_the_front_can_be_cut_and_the_drop_changed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(results, "a", str(results / "b"), "--top", "1", "--allowed-drop", "0.02") == 0
    out = capsys.readouterr().out
    assert "Joint front, 3 trials, 1 of them:" in out
    assert len(rows_of(out.splitlines())) == 3
    assert (
        "b saves most within the allowed accuracy loss of 2.00 points: 50.0 % of the training compute; 40.0 % (a).\n"
        in out
    )


@pytest.mark.slow
def test_it_writes_a_picture(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = results / "c.html"
    assert run(results, "a", "b", "--html", str(page)) == 0
    assert 'data-figure="fronts"' in page.read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"Picture: {page}"


def test_nothing_to_compare(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(results / "nothing", [])
    assert run(results, "empty", "nothing") == 1
    out = capsys.readouterr().out
    assert "Joint front" not in out
    assert (
        "Note: empty has no completed baseline, so no accuracy loss can be stated and none of its trials is compared."
        in out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a", "a comparison needs two or more studies, got 1"),
        ("a c", "no study 'c' in "),
        ("a b --top 0", "--top must be an integer >= 1, got 0"),
        ("a b --allowed-drop 2.0", "the allowed accuracy loss must be a fraction in "),
        ("a b --budgets 1,x", "--budgets must be numbers separated by commas, such as 0.5,1,4, got '1,x'"),
        ("a b --html /no/c.html", "cannot write --html /no/c.html: No such file or directory; choose"),
        ("a b --html /", "cannot write --html /: Is a directory; choose another file"),
    ],
)
def test_what_is_wrong_is_said(arguments: str, message: str, results: Path, refused: Callable[..., str]) -> None:
    assert refused("compare", "--results", str(results), *arguments.split()).startswith(message)
