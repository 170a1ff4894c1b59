"""Killed processes, full disks, bad files, two at once: nothing wrong is served, nothing finished is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tree_worker
from runs import Row, facts, finish, rows_alone
from tiny_workload import STEPS_PER_EPOCH, tiny  # noqa: F401 - a fixture

from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny")]

#: Before the installed package: both processes train with the code of this checkout.
ROOT = Path(__file__).parents[3]
EPOCHS = 4
TOTAL = EPOCHS * STEPS_PER_EPOCH
Spec = dict[str, Any]
DENSE: Spec = {"workload": "tiny", "epochs": EPOCHS, "method": "none"}
STOPS: list[Spec] = [
    {
        **DENSE,
        "method": "gradskip",
        "CAC_STOP_LAYER_NUM": [2, 5],
        "CAC_STOP_LAYER_ITR": stops,
        "CAC_BRAKING_DISTANCE": braking,
    }
    for stops, braking in (([6, 20], 0), ([6, 25], 0), ([6, 20], 3), ([13, 22], 2))
]


def as_told(rows: list[Row]) -> list[Row]:
    """As the worker's rows come."""
    return json.loads(json.dumps(facts(rows)))


def alone(config: Spec) -> list[dict[str, Any]]:
    return as_told(rows_alone(TrialConfig(**config)))


def over(tree: Path, config: Spec, **sharing: Any) -> int:
    """Train over the tree; the rows must be those of the run alone. Steps executed."""
    with SharedRun(TrialConfig(**config), Sharing(tree=tree, **{"trials": 10**6, **sharing})) as trial:
        assert as_told(finish(trial)) == alone(config)
        return trial.trained_steps


def start(tree: Path, accident: str, *configs: Spec) -> subprocess.Popen[str]:
    texts = [json.dumps(config) for config in configs]
    return subprocess.Popen(
        [sys.executable, tree_worker.__file__, str(tree), accident, *texts],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(tree_worker.__file__).parent)))},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


KINDS = ["checkpoints/*/*", "*/stages/*/*.chunk", "*/stages/*/stage.json", "*/*.json"]
DAMAGES = {"flipped": flip, "cut": cut, "empty": empty, "gone": Path.unlink}


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        pytest.param(what, damage, id=f"{what}-{name}", marks=() if n == m == 0 else pytest.mark.thorough)
        for n, what in enumerate(KINDS)
        for m, (name, damage) in enumerate(DAMAGES.items())
    ],
)
def test_damaged_files_are_never_served(damage: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    over(tree, DENSE)
    for config in STOPS[:2]:
        over(tree, config)
    damaged = sorted(path for path in tree.glob(what) if path.is_file())
    assert damaged
    for path in random.Random(0).sample(damaged, (len(damaged) + 1) // 2):
        damage(path)
    for config in (*STOPS, DENSE):
        over(tree, config)
    # What was lost has been trained and written anew.
    assert [over(tree, config) for config in (DENSE, *STOPS)] == [0] * 5


@pytest.mark.thorough
@pytest.mark.parametrize("accident", ["kill-before:9", "kill-before:3", "kill-before:13"])
def test_a_process_killed_while_it_writes_a_checkpoint(accident: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    process = start(tree, accident, DENSE, *STOPS)
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, err
    for config in (DENSE, *STOPS):
        over(tree, config)


def test_a_killed_process_loses_no_more_than_an_epoch(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    process = start(tree, "kill-step:20", DENSE)  # in its third epoch; two epochs of eight steps are known
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert over(tree, DENSE) == 2 * STEPS_PER_EPOCH


@pytest.mark.thorough
@pytest.mark.parametrize("limit_bytes", [0, 2500])
def test_a_full_disk_costs_sharing_but_no_result(limit_bytes: int, tmp_path: Path) -> None:
    """The kernel refuses to write on: nothing at all, or no checkpoint and no long chunk."""
    tree = tmp_path / "tree"
    process = start(tree, f"full:{limit_bytes}", DENSE, *STOPS[:2])
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [facts(line["rows"]) for line in found] == [alone(config) for config in (DENSE, *STOPS[:2])]
    assert "File too large" in err
    assert err.count("Warning: ") <= 3  # one of the tree, one of checkpoints; not one a step
    for config in (DENSE, *STOPS):
        over(tree, config)


@pytest.mark.thorough
@pytest.mark.parametrize("budget_bytes", [30_000, 0, 1, 100_000])
def test_a_small_budget_costs_training_but_no_result(budget_bytes: int, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    trained = [over(tree, config, budget_bytes=budget_bytes) for config in (DENSE, *STOPS)]
    kept = sum(path.stat().st_size for path in tree.glob("checkpoints/*/*"))
    assert kept <= budget_bytes
    if budget_bytes <= 1:
        assert trained == [TOTAL] * 5  # every fork begins at the start
    assert [over(tree, config, budget_bytes=budget_bytes) for config in (DENSE, *STOPS)] == [0] * 5


@pytest.mark.thorough
def test_two_processes_without_a_word_between_them(tmp_path: Path) -> None:
    """No coordinator, the same trials in another order: both may train the same, nothing wrong comes of it."""
    tree = tmp_path / "tree"
    configs = [DENSE, *STOPS]
    first, second = start(tree, "none", *configs), start(tree, "none", *configs[::-1])
    expected = [alone(config) for config in configs]
    assert [facts(line["rows"]) for line in lines(first)] == expected
    assert [facts(line["rows"]) for line in lines(second)] == expected[::-1]
    assert [over(tree, config) for config in configs] == [0] * 5
