"""The command doctor."""

from __future__ import annotations

import pytest
import tiny_workload
from tiny_workload import tiny  # noqa: F401 - a fixture

from tune_cac.cli import main


@pytest.mark.usefixtures("tiny")
def test_says_that_training_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--workload", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "training tiny repeats bit for bit: a trial that is forked from another equals the trial alone" in out
    assert "torch 2" in out
    assert "device: cpu" in out


@pytest.mark.usefixtures("tiny")
def test_says_that_it_does_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def counting(self: tiny_workload.Tiny, model: object, batch: object) -> object:
        seen.append(None)
        return real(self, model, batch) * (1.0 + len(seen))  # type: ignore[arg-type]

    real = tiny_workload.Tiny.loss
    monkeypatch.setattr(tiny_workload.Tiny, "loss", counting)
    assert main(["doctor", "--workload", "tiny"]) == 0
    assert "a trial that is forked from another is as valid as the trial alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "digit"], "unknown workload 'digit'"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--threads", "0"], "threads must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
