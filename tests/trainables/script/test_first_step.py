"""A script is run until its first step before a search begins: real processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.script.first_step import check_starts

LOOP = """
import torch, os, time, sys
from pathlib import Path
from tune_cac import gradskip
Path("pid").write_text(str(os.getpid()))
model = torch.nn.Linear(3, 2)
optimizer = gradskip.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    Path("steps").write_text(str(step + 1))
    time.sleep(0.2)
Path("end").touch()
"""


def config(command: str, cwd: Path) -> TrialConfig:
    return TrialConfig(
        workload="script", workload_options=(f"command={command}", f"cwd={cwd}"), epochs=1, method="none"
    )


def test_a_script_that_steps_is_ended_after_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    check_starts(config(f"{sys.executable} train.py", tmp_path))
    assert not (tmp_path / "end").exists()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert sorted(os.listdir(tmp_path)) == ["pid", "train.py"]  # nothing ran after the first step


@pytest.mark.parametrize("command", ["""echo '{"accuracy": 0.5, "compute_saved": 0}'; sleep 60""", "sleep 60"])
def test_a_script_that_reports_or_takes_long_is_taken_to_run(tmp_path: Path, command: str) -> None:
    begun = time.monotonic()
    check_starts(config(command, tmp_path), longest_s=1)
    assert time.monotonic() - begun < 30  # far from its end


def test_what_a_script_without_our_optimizer_left_until_its_first_report_is_told(tmp_path: Path) -> None:
    command = """echo 1 > checkpoint.pt; echo '{"accuracy": 0.5, "compute_saved": 0}'; sleep 60"""
    with pytest.warns(UserWarning, match=r"left checkpoint\.pt in .*put \{trial_dir\} into the command"):
        check_starts(config(command, tmp_path))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{sys.executable} missing.py", r"ended with exit code 2; its last lines:\n  .*can't open file .*missing.py"),
        (f"{sys.executable} -c 'import no_such_module'", r"ended with exit code 1.*No module named 'no_such_module'"),
        ("no-such-program", r"ended with exit code 127; its last lines:\n  .*no-such-program"),
        ("echo hello", r"ended without an optimizer step or a report; its last lines:\n  hello$"),
        (
            "for i in $(seq 20); do echo line $i; done; exit 3",
            r"ended with exit code 3; its last lines:\n  line 11\n(.|\n)*  line 20$",
        ),
    ],
)
def test_a_script_that_cannot_run_is_told_with_its_last_lines(tmp_path: Path, command: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)^--script must train, it {message}"):
        check_starts(config(command, tmp_path))
