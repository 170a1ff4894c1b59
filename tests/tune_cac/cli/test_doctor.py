"""The command doctor: what it prints, line by line."""

from __future__ import annotations

import re
from functools import partial

import pytest
import tiny_workload
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture
from torch import nn

from trainables.registry import WORKLOADS, Entry
from trainables.training.doctor import checks, dry_run
from tune_cac.cli.main import main


class DeepLinear(tiny_workload.Tiny):
    """Ten linear layers and no convolution."""

    name = "deep_linear"

    def make_model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(36, 4)]
        for _ in range(8):
            layers += [nn.Linear(4, 4), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(4, 3))


class EarlierNorm(tiny_workload.Tiny):
    """A norm with the statistics of an earlier training, whose data had another mean and deviation."""

    MEAN, VARIANCE = -7.0, 4.0

    def make_model(self) -> nn.Module:
        norm = nn.BatchNorm2d(1)
        norm.running_mean.fill_(self.MEAN)  # type: ignore[union-attr]
        norm.running_var.fill_(self.VARIANCE)  # type: ignore[union-attr]
        return nn.Sequential(norm, nn.Flatten(), nn.Linear(36, 3))


@pytest.fixture
def deep_linear(monkeypatch: pytest.MonkeyPatch) -> str:
    entry = Entry(home=f"{__name__}:DeepLinear", default_epochs=4, description="a test's")
    monkeypatch.setitem(WORKLOADS, DeepLinear.name, entry)
    monkeypatch.setattr(dry_run, "dry_run", partial(dry_run.dry_run, most_units=3))
    return DeepLinear.name


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The printed lines; the first argument is the workload."""
    assert main(["doctor", "--workload", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("tiny")
def test_says_that_training_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_doctor(capsys, "tiny")
    assert "training tiny repeats bit for bit: a trial forked from another equals the trial alone" in lines
    assert lines[0].startswith("versions: torch 2")
    assert lines[1].startswith("device: cpu")


@pytest.mark.usefixtures("tiny")
def test_says_what_makes_the_training_slower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "time_ratios", lambda *_: [0.5, 0.6])
    monkeypatch.setattr(checks, "WAITING", 1.0)  # a busy machine's loader may hold a step of 1 ms back
    lines = run_doctor(capsys, "tiny")
    begin = next(number for number, line in enumerate(lines) if line.startswith("recipe: "))
    assert lines[begin] == "recipe: 1 to mend (docs/recipe.md)"  # our own loop waits for nothing
    assert lines[begin + 1].startswith("optimizer-on-the-slow-path: SGD updates ")
    assert lines[begin + 2] == "    cost: 45.0 % of an optimizer step (40.0 % to 50.0 %, 2 pairs)"


def test_says_how_far_the_norms_of_an_earlier_training_move(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against mean and variance of the whole training set, which the batches of a few steps are near."""
    entry = Entry(home=f"{__name__}:EarlierNorm", default_epochs=4, description="a test's")
    monkeypatch.setitem(WORKLOADS, "earlier_norm", entry)
    (line,) = (line for line in run_doctor(capsys, "earlier_norm") if line.startswith("norms: "))
    said = re.fullmatch(
        r"norms: 1 have statistics .* lie ([\d.]+) deviations away .* are ([\d.]+) to \2 of .*hold_all keeps.*", line
    )
    assert said
    images = torch.cat([images for images, _ in EarlierNorm().train_batches(0, 0)])
    distance = (images.mean() - EarlierNorm.MEAN) / EarlierNorm.VARIANCE**0.5
    expected = (float(distance), float(images.var()) / EarlierNorm.VARIANCE)
    assert tuple(map(float, said.groups())) == pytest.approx(expected, rel=0.15)


@pytest.mark.usefixtures("tiny")
def test_says_that_it_does_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def counting(self: tiny_workload.Tiny, model: object, batch: object) -> object:
        seen.append(None)
        return real(self, model, batch) * (1.0 + len(seen))  # type: ignore[arg-type]

    real = tiny_workload.Tiny.loss
    monkeypatch.setattr(tiny_workload.Tiny, "loss", counting)
    assert main(["doctor", "--workload", "tiny"]) == 0
    assert "training tiny does not repeat bit for bit here: 0.weight and " in capsys.readouterr().out


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of the table of layers that are not empty, without its header; columns are two spaces apart."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("number "))
    rows = []
    for line in lines[begin + 1 :]:
        if not line[:1].isdigit():
            return rows
        rows.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return rows


@pytest.mark.usefixtures("tiny")
def test_what_a_run_is_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_doctor(capsys, "tiny", "--epochs", "3")
    starts = {line.partition(": ")[0]: line for line in lines}
    assert "run: 8 steps an epoch, 3 epochs, 24 steps in all; a batch is (8, 1, 6, 6) float32, (8,) int64" in lines
    assert "layers: 14 parameters in the model's order, 781 elements" in lines
    rows = rows_of(lines)
    assert [row[0] for row in rows] == ["2", "5", "8", "11", "13"]  # four convolutions with norms, and a linear layer
    pixels = 8 * 36 * 9
    convolutions = [2 * pixels * a * b for a, b in ((1, 4), (4, 4), (4, 6), (6, 6))]
    assert rows[0][:-1] == ["2", "0.weight", "3", "44", "yes"]
    assert rows[0][-1].endswith(" %")
    assert not any(line.startswith("the rule watches nothing") for line in lines)
    forward = sum(convolutions) + 2 * 8 * 6 * 3
    backward = 2 * forward - convolutions[0]
    assert starts["compute"] == (
        f"compute: a step {forward / 1000:.4g} kFLOP forward, {backward / 1000:.4g} kFLOP backward; "
        f"a run at most {24 * (forward + backward) / 10**6:.4g} MFLOP"
    )
    assert starts["memory"].startswith(
        "memory: parameters 3.124 kB, gradients 3.124 kB, optimizer 3.124 kB; peak of the process "
    )
    assert "(median of 5, " in starts["time"]
    assert " waiting for the batch; an evaluation " in starts["time"]


def test_of_many_units_some_are_counted(capsys: pytest.CaptureFixture[str], deep_linear: str) -> None:
    lines = run_doctor(capsys, deep_linear)
    rows = rows_of(lines)
    assert [row[0] for row in rows] == [str(end) for end in range(1, 20, 2)]
    assert rows[0][:4] == ["1", "1.weight", "2", str(36 * 4 + 4)]
    assert [row[0] for row in rows if row[-1].endswith(" %")] == ["5", "11", "17"]  # a third of the nine units
    assert rows[-1][1] == "18.weight"
    assert any("set CAC_WATCH=linear" in line for line in lines)
