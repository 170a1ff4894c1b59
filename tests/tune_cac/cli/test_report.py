"""The command report: words on standard output, a page in the study, pictures on request."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compressed import pruned, write_compressed
from studies import result_row, write_study
from thorough import rest_thorough

from trainables.config import TrialConfig
from tune_cac.cli.main import main


def trial(number: int, saved: float, **attrs: Any) -> dict[str, Any]:
    config = TrialConfig(CAC_VAR_START_THR=0.9 + number / 1000).to_dict()
    return {"row": result_row(0.97, saved), "config": config, **attrs}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "s", [{"row": result_row()}, *(trial(n, n / 10) for n in range(1, 4))]).root


@pytest.mark.slow
def test_words_and_page(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in study.iterdir())
    assert main(["report", str(study)]) == 0
    said = capsys.readouterr()
    assert "Take the settings of trial 3: saves 30.0 % of the training compute" in said.out
    assert said.err.splitlines()[-1] == f"Page: {study / 'report.html'}"
    assert sorted(path.name for path in study.iterdir()) == sorted([*before, "report.html"])
    page = (study / "report.html").read_text()
    assert "saves 30.0 % of the training compute" in page
    assert "export CAC_VAR_START_THR=0.903" in page
    assert main(["report", str(study), "--output", str(study.parent / "pages" / "page.html")]) == 0
    assert (study.parent / "pages" / "page.html").read_text() == page
    capsys.readouterr()
    assert main(["report", str(study), "--output", str(study.parent)]) == 2
    assert "Take the settings of trial 3" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_a_terminal_gets_lines_of_its_width_and_no_cut_number(study: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tune_cac", "report", str(study)]
    size = {"COLUMNS": "60", "LINES": "40"}
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, **size}, check=True)
    lines = os.read(ours, 10_000).decode().splitlines()
    plain = subprocess.run(command, capture_output=True, env={**os.environ, **size}, check=True, text=True).stdout
    assert done.returncode == 0
    assert max(map(len, lines)) <= 60 < max(map(len, plain.splitlines()))
    assert " ".join(" ".join(lines).split()) == " ".join(plain.split())


@pytest.mark.parametrize("width", rest_thorough([40, 80]))
def test_a_terminal_gets_every_trial_in_lines_of_its_width(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markdown, whose cells it would break, goes into pipes and files."""
    root = write_study(tmp_path / "s", [{"row": result_row()}, *(trial(n, n / 100) for n in range(1, 20))]).root
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["report", str(root), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sorted(int(line.split()[0].rstrip("*")) for line in lines[1:21]) == list(range(20))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_running_study_has_a_page(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(study / "optuna.journal")))
    optuna.load_study(study_name="tune_cac", storage=storage).ask().set_user_attr("config", TrialConfig().to_dict())
    assert main(["report", str(study)]) == 0
    assert "1 running" in capsys.readouterr().out
    assert "running" in (study / "report.html").read_text()


@pytest.mark.parametrize("trials", [[], [{}, {}]])
def test_a_study_without_a_result_says_so(
    trials: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "s", trials).root
    assert main(["report", str(folder)]) == 1
    assert "No trial has completed, so there is nothing to rank." in capsys.readouterr().out
    assert "No trial has completed" in (folder / "report.html").read_text()


def test_words_and_page_of_a_study_of_inference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_compressed(tmp_path / "c", [pruned(0.968, 0.5, 0.1), pruned(0.95, 0.9)]).root
    assert main(["report", str(study), "--all"]) == 0
    out = capsys.readouterr().out
    assert "saves 50.0 % of the inference compute; validation" in out
    assert "| conv1.weight | 40.0 % |" in out
    assert "saves 50.0 % of the inference compute" in (study / "report.html").read_text()
    assert re.search(
        r"^\| rank \| trial \| accuracy \| [^|]+ \|( [^|]+ \|)? saved \| sparsity \| MACs \|", out, re.MULTILINE
    )
    assert re.search(r"^\| 1 \| 1 \|.*\| 50.0 % \| 30.0 % \| 50.0 % \|", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.thorough
def test_damaged_statistics_and_clusters_leave_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = result_row(0.97, 0.1, gradient_statistics='[{"step": 1', gradient_clusters='[{"size": ')
    whole = result_row(0.97, 0.2, gradient_clusters='[{"size": 2, "spread": 1.5, "examples": [4, 99999999]}, 3]')
    rows = [{"row": result_row()}, {"row": damaged}, {"row": whole}]
    folder = write_study(tmp_path / "s", rows).root
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "1 cluster of trial 2" in page
    assert "4, 99999999" in page
    assert "Noise of the gradients" not in page
    folder = write_study(tmp_path / "t", rows[:2]).root
    assert main(["report", str(folder)]) == 0
    assert "Samples with similar gradients" not in (folder / "report.html").read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trade_off_as_a_picture(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begins = {"a.svg": b"<?xml", "a.png": b"\x89PNG", "A.PDF": b"%PDF"}
    for name, magic in begins.items():
        assert main(["report", str(study), "--picture", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    drawn = (tmp_path / "a.svg").read_text()
    texts = set(re.findall(r"<text [^>]*>([^<]+)</text>", drawn))
    assert {"compute saved (%)", "validation accuracy (%)", "trials", "Pareto front", "baseline", "chosen"} <= texts
    groups = {group.partition('"')[0]: group.count("clip-path=") for group in drawn.split('<g id="')}
    assert [groups[f"pareto-{place}"] for place in range(4)] == [3, 1, 1, 1]
    main(["report", str(study), "--picture", str(tmp_path / "b.svg")])
    assert (tmp_path / "b.svg").read_text() == drawn
    assert main(["report", str(study), "--picture", "a.jpg"]) == 2
    assert "must end in one of .svg, .png, .pdf, got .jpg" in capsys.readouterr().err
