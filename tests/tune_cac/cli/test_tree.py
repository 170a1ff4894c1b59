"""The command ``tree``: on studies written by hand, without Ray."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from studies import HandTree, result_row, write_study

from analysis.io.study_files import Layout
from trainables.interventions import Intervention
from tune_cac.cli.main import main
from tune_cac.study.study_result import answer, write_answer

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """A baseline, one trial that stops a layer, and one that does the same and was answered from the tree."""
    tree = HandTree(tmp_path / "results" / "s" / "tree", layer_names=["conv.weight", "fc.weight"])
    dense, stopped = result_row(), result_row(saved=0.25)
    acts = [Intervention(iteration=205, action='{"braking":6,"stop":[0]}')]
    dense["stage"] = tree.train([], dense)
    stopped["stage"] = tree.train(acts, stopped)
    known = stopped | {"search_flops": 0}
    return write_study(tmp_path / "results" / "s", [{"row": dense}, {"row": stopped}, {"row": known}])


def test_it_prints_the_tree(study: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(study.root.rglob("*"))
    assert main(["tree", "s"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Search cost: 1.8 full trainings for 3 trials (2 distinct outcomes); trained alone, each from its start, they "
        "would have cost 2.5, the outcomes 1.8.",
        "2 stages, 0 checkpoints (0.0 MB)",
        "",
        "dense run, 0..300, 3 trials, accuracy 0.9700 (trial 0)",
        "└─ 205: stop through conv.weight, braking 6, ..300, 2 trials, accuracy 0.9700, saved 25.0 % (trials 1, 2)",
    ]
    assert sorted(study.root.rglob("*")) == before  # looking changes nothing


@pytest.mark.usefixtures("study")
def test_a_terminal_without_box_characters_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["tree", "s", "--depth", "0"]) == 0
    terminal.flush()
    assert written.getvalue().splitlines()[-1] == b"`- ... 1 more stage, 2 trials"


def test_studies_without_a_tree(study: Layout, refused: Callable[..., str]) -> None:
    write_study(study.root.with_name("old"), [{"row": result_row()}])
    assert refused("tree", "old").startswith("results/old has no stage tree: it is of an earlier version")
    alone = study.root.with_name("alone")
    HandTree(alone / "tree", layer_names=["conv.weight"]).train([], result_row())
    write_study(alone, [{"row": result_row()}])
    assert refused("tree", "alone").startswith("results/alone has no stage tree: its trials were trained alone (--no-s")
    study.write_info(replace(study.read_info(), workload="script"))
    assert refused("tree", "s") == "results/s has no stage tree: trials of a script share no training"


@pytest.mark.parametrize("recorded", [False, True])
def test_without_sharing_nothing_is_drawn_nor_said(recorded: bool, tmp_path: Path) -> None:
    """Also where the baseline's signals were recorded: no trial went through the tree then."""
    if recorded:
        HandTree(tmp_path / "s" / "tree", layer_names=["conv.weight"]).train([], result_row())
    layout = write_study(tmp_path / "s", [{"row": result_row()}, {"row": result_row(saved=0.5)}])
    write_answer(layout, answer(layout, allowed_drop=0.005))
    assert "stage tree" not in layout.report.read_text().lower()
    assert "Search cost: 1.5 full trainings for 2 trials." in layout.report.read_text()
