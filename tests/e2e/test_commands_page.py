"""The commands of docs/commands.md in an empty folder: each works, and what predicts or trains saves something."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tune_cac.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
BLOCK = next(b for b in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "tune_cac report mine" in b)
COMMANDS = [
    line.partition("#")[0].strip() for line in BLOCK.splitlines() if "python -m tune_cac" in line.partition("#")[0]
]
#: Searches and what retrains are tested where they are built; these two make what the others read.
SEARCHES = {
    "--name mine --trials 12": [],
    "--space auto_thresholds --workload digits": ["--trials", "6", "--concurrency", "1"],  # the same each time
    "--schedule prune.yaml --name pruned": ["--trials", "3"],
}
#: What is tested elsewhere: a resumption, retraining, a long dry run.
ELSEWHERE = ("confirm", "doctor", "--resume", "shim")
#: What a command must print, beside ending well.
SAVES = {
    "trial --set": r"compute saved (?:[1-9]|\d\d)\.\d %",
    "trial --schedule": r"inference compute saved where zeros are skipped (?:[1-9]|\d\d)\.\d %",
    "replay": r"iteration \d+: stops through 0 \(conv1.weight\)",
    "report mine": r": saves (?:[1-9]|\d\d)\.\d % of the training compute",
    "schedule check": r"conv6\.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Path:
    """Where the page's two first searches have run, with fewer trials."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "prune.yaml").write_text(re.findall(r"```yaml\n(# prune.yaml\n.*?)```", PAGE, re.DOTALL)[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for command in COMMANDS:
            more = next((more for part, more in SEARCHES.items() if part in command), [])
            if more:
                assert main([*shlex.split(command)[3:], *more, "--no-controls"]) == 0, command
    return folder


def read(command: str) -> list[str]:
    words = shlex.split(command)
    return words[words.index("tune_cac") + 1 :]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if read(c)[0] != "search" and not any(part in c for part in ELSEWHERE)]
)
def test_a_command_of_the_page(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    if command.startswith(". results/mine/best.env"):
        for name, value in re.findall(r"export (CAC_\w+)=(\S+)", (folder / "results/mine/best.env").read_text()):
            monkeypatch.setenv(name, value)
    words = ["5" if word == "17" else word for word in read(command)]  # a trial of the shorter study
    assert main(words) == 0
    said = capsys.readouterr().out
    for part, expected in SAVES.items():
        if part in command:
            assert re.search(expected, said), said[-2000:]
    if command.startswith("."):
        assert re.search(SAVES["trial --set"], said), said[-2000:]


def test_every_command_is_run_here_or_elsewhere() -> None:
    assert len(COMMANDS) > 20
    for part in SEARCHES:
        assert any(part in command for command in COMMANDS), part
