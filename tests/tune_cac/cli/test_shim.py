"""The command ``shim``: scripts of the published package train with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainables.config import TrialConfig
from trainables.script.run import ScriptFailed, ScriptRun
from tune_cac.cli.main import main

#: The ways in which such scripts import it.
SCRIPT = """
import cac, cac.gradskip, torch
from cac.gradskip import SGD
import tune_cac
assert cac.gradskip.SGD is SGD is cac.SGD is tune_cac.gradskip.SGD
weight = torch.nn.Parameter(torch.ones(2, 2, 3, 3))
print(type(cac.gradskip.SGD([weight], lr=0.1)).__module__)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_script_of_the_published_package_runs_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    assert "the package cac must not be installed, got " in refused("shim", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "shim takes a folder that is there" in refused("shim", str(tmp_path / "none"))
    for _ in range(2):  # again is the same
        assert main(["shim", str(tmp_path)]) == 0
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "CAC_VAR_START_THR": "-1"},
    )  # fmt: skip
    assert done.stdout == "trainables.gradskip.optimizers\n"
    (tmp_path / "cac" / "mine.py").touch()
    (tmp_path / "cac" / "__init__.py").write_text("mine = 1")
    assert "must not be there, or be of shim" in refused("shim", str(tmp_path))


def test_a_script_that_lacks_the_package_is_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("raise ModuleNotFoundError(\"No module named 'cac'\")\n")
    options = (f"command={sys.executable} bare.py", f"cwd={tmp_path}")
    run = ScriptRun(TrialConfig(workload="script", workload_options=options, epochs=1, method="none"), tmp_path)
    with pytest.raises(ScriptFailed, match=r"tune_cac shim DIR lets it import ours$"):
        run.train_epoch()
