"""Searches that a budget ends, and a package that a launcher trains in several processes: end, and go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from commands_run import run_here

import analysis
import tune_cac
from analysis.io.study_files import Layout
from analysis.metrics.accounting import search_cost
from trainables.errors import UserError
from tune_cac.cli.main import main
from tune_cac.tuning.run import resume

pytestmark = pytest.mark.slow

#: Every process of it reports; it tells no FLOPs, and trains for ever while there is a file of that name.
TRAIN = """
import json, os, pathlib, sys, time
from . import nets
rank, threshold = int(os.environ["RANK"]), float(sys.argv[1])
pathlib.Path(f"{os.getpid()}.pid").touch()
while pathlib.Path("slow").exists():
    time.sleep(0.05)
saved = 0 if threshold < 0 else 0.25
print(json.dumps({"accuracy": nets.ACCURACY + rank / 10, "step": 40, "compute_saved": saved}), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_cost_budget_lets_the_running_trial_finish_and_begins_no_other(tmp_path: Path) -> None:
    """Without shared training every trial costs nearly a full training, and the third one uses the budget up."""
    search = (
        "search", "--trials", "5", "--epochs", "2", "--name", "s", "--concurrency", "1", "--no-sharing",
        "--sampler", "tpe",
    )  # fmt: skip
    done = run_here(tmp_path, *search, "--no-controls", "--cost-budget", "2.1")
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 3
    spent = search_cost(trials).dense_equivalents
    assert search_cost(trials.iloc[:2]).dense_equivalents < 2.1 <= spent
    assert done.stderr.splitlines()[-1] == (
        f"The cost budget of 2.1 full trainings is used up ({spent:.1f} executed): 3 of 5 trials ended. Go on with: "
        "python -m tune_cac search --resume results/s"
    )
    layout = Layout(tmp_path / "results" / "s")
    assert layout.best.exists()
    assert layout.report.exists()
    done = run_here(tmp_path, "search", "--resume", "s")
    assert "budget" not in done.stderr
    assert analysis.load(tmp_path / "results" / "s")["status"].tolist() == ["completed"] * 5


def trains(pid: int) -> bool:
    """Whether this process is there and trains the package."""
    try:
        return "project.train" in " ".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_budgets_of_a_package_that_torchrun_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "project"
    package.mkdir()
    for name, text in (("__init__", ""), ("train", TRAIN), ("nets", "ACCURACY = 0.5\n")):
        (package / f"{name}.py").write_text(text)
    (tmp_path / "slow").touch()
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 -m project.train"
    script = torchrun + " {CAC_VAR_START_THR}"
    found = tune_cac.search(script=script, trials=3, name="s", concurrency=1, controls=False, time_budget="8s")
    assert not found.interrupted
    assert found.used_up == (
        "The time budget of 8 s is used up: 0 of 3 trials ended. Go on with: python -m tune_cac search --resume "
        "results/s"
    )
    assert set(found.trials["status"]) <= {"running"}  # as after Ctrl-C: a resumed search goes on with it
    # On a busy machine the training may not have begun; a process takes a moment to go, and then its number is free.
    deadline = time.monotonic() + 30
    for file in tmp_path.glob("*.pid"):
        while trains(int(file.stem)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not trains(int(file.stem))

    # What the script saved stands for the FLOPs that it does not tell: 1 of the baseline, 0.75 of the next.
    (tmp_path / "slow").unlink()
    found = resume("s", cost_budget=1.5, concurrency=1)
    assert "(1.8 executed): 2 of 3" in found.used_up
    completed = found.trials[found.trials["status"] == "completed"]
    assert completed["accuracy"].tolist() == [0.5, 0.5]  # the first process's
    assert completed["epoch"].tolist() == [1, 1]

    (package / "nets.py").write_text("ACCURACY = 0.6\n")
    with pytest.raises(UserError, match=r"project\.train or what it imports has changed"):
        resume("s")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--time-budget", "soon"), "--time-budget must be a positive number of seconds, or a duration such as 90m"),
        (("--cost-budget", "0"), "--cost-budget must be a positive number of full trainings, such as 12.5, got 0"),
    ],
)
def test_no_budget(flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *flags, "--name", "s"]) == 2
    assert message in capsys.readouterr().err
