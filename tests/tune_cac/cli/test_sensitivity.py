"""The command ``sensitivity`` on a workload that trains in milliseconds."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tiny_workload import Tiny, tiny

from trainables.compression.schedule.configs import PRUNERS
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main

__all__ = ["tiny"]  # a fixture

pytestmark = pytest.mark.usefixtures("tiny")
LAYERS = ["0.weight", "3.weight", "6.weight", "9.weight", "15.weight"]


def run(*arguments: str) -> int:
    return main(["sensitivity", "--workload", "tiny", *arguments])


def trained(tmp_path: Path) -> Path:
    """A checkpoint of two epochs, in a folder as trials have it."""
    with TrainingRun(TrialConfig(workload="tiny", method="none", epochs=2, seed=5)) as training:
        training.train_epoch()
        training.train_epoch()
        training.save(tmp_path)
    return tmp_path / "run.pt"


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sensitivity.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_it_trains_analyses_and_proposes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "out"
    given = ["--epochs", "2", "--seed", "5", "--levels", "0.5,0.25", "--allowed-drop", "0.99"]
    assert run(*given, "--output", str(folder)) == 0
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "epoch 1 of 2", "epoch 2 of 2", *(f"pruning {name}" for name in LAYERS)
    ]  # fmt: skip
    rows = read_rows(folder)
    assert [(row["parameter"], float(row["sparsity"])) for row in rows] == [
        (name, level) for name in LAYERS for level in (0, 0.25, 0.5)
    ]
    table = [line.split() for line in out.splitlines() if line.startswith(tuple(LAYERS))]
    assert [cells[0] for cells in table] == LAYERS
    assert [cells[1:4] for cells in table[:2]] == [["36", "50", "%"], ["144", "50", "%"]]  # any drop is allowed
    section = yaml.safe_load((folder / "sensitivities.yaml").read_text())
    (pruner,) = section["pruners"].values()
    assert pruner.pop("class") == "SensitivityPruner"
    proposed = PRUNERS["SensitivityPruner"](**pruner)
    assert list(proposed.model_dump()["sensitivities"]) == LAYERS
    assert 'id="plot-sensitivity"' in (folder / "sensitivity.html").read_text()
    assert out.splitlines()[-3:] == [
        f"Accuracies: {folder / 'sensitivity.csv'}",
        f"Pruners for a schedule: {folder / 'sensitivities.yaml'}",
        f"Picture: {folder / 'sensitivity.html'}",
    ]


@pytest.mark.parametrize("form", ["trial's file", "trial's folder", "state_dict", "in a parallel wrapper"])
def test_a_checkpoint_is_analysed_as_it_is(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trained(tmp_path)
    state = torch.load(file, weights_only=True)["model"]
    workload, weight = Tiny(), state["15.weight"].clone()
    model = workload.make_model()
    model.load_state_dict(state)
    with torch.no_grad():
        model[15].weight.view(-1)[weight.abs().flatten().argsort()[: weight.numel() // 2]] = 0
        expected = workload.evaluate(model.eval(), "validation", "cpu")
    if form == "trial's folder":
        file = tmp_path
    elif form == "state_dict":
        torch.save(state, file)
    elif form == "in a parallel wrapper":
        torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, file)
    out = tmp_path / "out"
    assert run("--checkpoint", str(file), "--levels", "0.5", "--layers", "15.*ght", "--output", str(out)) == 0
    rows = read_rows(out)
    assert [row["parameter"] for row in rows] == ["15.weight", "15.weight"]
    assert float(rows[1]["top1"]) == pytest.approx(expected)
    assert "epoch" not in capsys.readouterr().err


def test_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = trained(tmp_path), tmp_path / "out"
    given = ["--checkpoint", str(file), "--kind", "filter", "--levels", "0.5", "--allowed-drop", "0.99"]
    assert run(*given, "--output", str(out)) == 0
    section = yaml.safe_load((out / "sensitivities.yaml").read_text())["pruners"]
    assert section == {
        "proposed_50": {
            "class": "L1RankedStructureParameterPruner",
            "group_type": "Filters",
            "desired_sparsity": 0.5,
            "weights": LAYERS[:4],
        }
    }
    assert "sensitivity" not in capsys.readouterr().out.split("Accuracies")[0]


def test_a_layer_that_is_not_there_is_said_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--layers", "16.*", "--output", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert said.startswith("tune_cac: error: '16.*' matches no parameter; there are 0.weight, 3.weight")
    assert said.count("\n") == 1


def test_nothing_to_propose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = trained(tmp_path), tmp_path / "out"
    given = ["--checkpoint", str(file), "--levels", "1", "--layers", "0.weight", "--allowed-drop", "0"]
    assert run(*given, "--output", str(out)) == 0
    assert yaml.safe_load((out / "sensitivities.yaml").read_text()) == {"pruners": {}}
    assert "so no pruner is proposed" in capsys.readouterr().out


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--levels 0,x", "--levels must be numbers in [0, 1] separated by commas, such as 0,0.5,0.9, got '0,x'"),
        ("--checkpoint f --epochs 1", "--checkpoint is analysed as it is, so it takes no --epochs: "),
        ("--checkpoint no.pt", "--checkpoint no.pt: there is no such file"),
        ("--checkpoint text.pt", "--checkpoint text.pt must hold tensors by name, as torch.save(model.state_dict(), "),
        ("--checkpoint list.pt", "--checkpoint list.pt must hold tensors by name, as torch.save(model.state_dict(), "),
        ("--checkpoint other.pt", "--checkpoint other.pt does not fit the model of tiny: Missing key"),
        ("--output text.pt", "cannot make --output text.pt: File exists; choose another folder"),
        ("--checkpoint good.pt --layers conv", "unknown parameter 'conv': "),
    ],
)
def test_what_is_wrong_is_said(arguments: str, message: str, refused: Callable[..., str]) -> None:
    Path("text.pt").write_text("no checkpoint")
    torch.save([1, 2], "list.pt")
    torch.save({"weight": torch.zeros(2)}, "other.pt")
    torch.save(Tiny().make_model().state_dict(), "good.pt")
    assert refused("sensitivity", "--workload", "tiny", *arguments.split()).startswith(message)
