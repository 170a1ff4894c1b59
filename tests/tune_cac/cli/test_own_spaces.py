"""Spaces of the user's own on the command line: what is refused before anything trains, and what is explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tune_cac.cli.main import main

FACTORY = '''
import torch

def make(lr: float, width: int = 4, nesterov: bool = False):
    data = [(torch.zeros(2, 3), torch.tensor([0, 1]))]
    return {"model": lambda: torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2)),
            "train": data, "validation": data, "epochs": 2}

def any_options(**options):
    return make(0.1)

def rates(trial, context):
    """Learning rates."""
    return {"lr": trial.suggest_float("lr", 0.1, 0.3, step=0.1)}
'''
FILES = {
    "lr.yaml": "lr: {choices: [0.1, 0.5]}",
    "widths.yaml": "width: {choices: [4, 8]}\nlr: 0.1",
    "lrr.yaml": "lrr: {choices: [0.1, 0.5]}",
    "cache.yaml": "cache: {choices: [a, b]}",
}
OWN = "--workload own_spaces_project:make"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_spaces_project.py").write_text(FACTORY)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            f"search --space lr.yaml {OWN}",
            "space lr.yaml searches nothing that saves compute (lr): join it with a space of a method, such as --space "
            "auto_thresholds+lr.yaml",
        ),
        (f"search --space agp+lr.yaml {OWN} --option lr=0.3", "lr is searched by space agp+lr.yaml, so it can't be "),
        (
            f"search --space auto_thresholds+lr.yaml+widths.yaml {OWN}",
            "spaces lr.yaml and widths.yaml both search lr: join others",
        ),
        (
            f"search --space auto_thresholds+lrr.yaml {OWN} --option lr=0.1",
            "unknown key of space auto_thresholds+lrr.yaml 'lrr': did you mean 'lr'? Valid: CAC_BRAKING_DISTANCE, ",
        ),
        (
            "search --space auto_thresholds+cache.yaml --workload images --data .",
            "space auto_thresholds+cache.yaml can't search cache, which says where something is stored",
        ),
        ("spaces own_spaces_project:ratess", "space own_spaces_project:ratess: unknown name in own_spaces_project "),
        ("search --space no.yaml", "cannot read space no.yaml: No such file or directory"),
    ],
)
def test_what_cannot_be_searched_is_one_line(arguments: str, message: str, refused: Callable[..., str]) -> None:
    assert refused(*arguments.split()).startswith(message)
    assert not Path("results").exists()


@pytest.mark.usefixtures("project")
def test_it_is_explained_on_the_run_of_its_starting_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"spaces braking_distance+own_spaces_project:rates {OWN} --option width=8".split()) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "braking_distance+own_spaces_project:rates: Gradient-Skip in auto mode: the braking distance alone, thresholds "
        "fixed; Learning rates.\n"
    )
    assert "on own_spaces_project:make for 2 epochs, 2 steps" in out  # the factory needs lr, which the start has
    assert (
        "options of the workload: lr; each combination of their values is also trained once without the method" in out
    )
    line = next(line.split() for line in out.splitlines() if line.startswith("lr "))
    assert line == ["lr", "0.1", "..", "0.3", "in", "steps", "of", "0.1", "0.2", "option", "of", "the", "workload"]
    assert main(["spaces", "lrr.yaml", "--workload", "own_spaces_project:any_options"]) == 0  # it takes any option
