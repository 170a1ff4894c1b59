"""Folders in which the user has modules of the same names as our packages."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
import search_spaces
from trainables import compression, gradskip
from trainables.workloads.user_code import OWN_PACKAGES
from tune_cac.own_packages import NAMES

ROOT = Path(__file__).parents[2]
#: setuptools' finder for editable installs finds what a user's package lacks; an installed wheel has no such finder.
NO_EDITABLE = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 8, 8, generator=generator)
    data = TensorDataset(images, torch.randint(0, 2, (32,), generator=generator))
    return {
        "model": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)),
        "train": DataLoader(data, 16), "validation": DataLoader(data, 16), "epochs": 1,
    }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's own analysis.py, trainables/ and search_spaces/."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("tune_cac", *NAMES):
        (site / name).symlink_to(ROOT / name)
    (site / "sitecustomize.py").write_text(NO_EDITABLE)
    work = tmp_path / "work"
    for package in ("trainables", "search_spaces"):
        (work / package).mkdir(parents=True)
        (work / package / "__init__.py").write_text("mine = True\n")
    (work / "analysis.py").write_text("mine = True\n")
    return work


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder.parent / "site"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_commands_work_there(folder: Path) -> None:
    done = python(folder, "-m", "tune_cac", "spaces", "auto_thresholds")
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("what", ["--epochs 2", "--workload train:make", f"--script '{sys.executable} script.py'"])
def test_a_search_works_there_with_its_workers(folder: Path, what: str) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "script.py").write_text(
        "import analysis\nimport tune_cac as cac\nassert analysis.mine\n"
        "cac.report(accuracy=0.5, step=1, compute_saved=0.0)\n"
    )
    command = f"-m tune_cac search --trials 2 --name s --no-controls --concurrency 1 {what}"
    done = python(folder, *shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert set(analysis.load(folder / "results" / "s")["status"]) == {"completed"}
    assert python(folder, "-m", "tune_cac", "report", "s").returncode == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_script_keeps_its_own_module(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import analysis, tune_cac as cac, trainables.gradskip\nfrom torch import nn\nassert analysis.mine\n"
        "cac.gradskip.SGD(nn.Conv2d(1, 1, 3).parameters(), lr=0.1, weight_decay=0.1)\n"
        "cac.report(accuracy=0.5, step=1)\n"
    )
    (folder / "trainables" / "__init__.py").unlink()
    (folder / "trainables").rmdir()
    done = python(folder, "train.py")
    assert done.returncode == 0, done.stderr
    assert '"accuracy": 0.5' in done.stdout


def test_code_elsewhere_in_the_project_has_its_own_module(folder: Path) -> None:
    """In a subfolder, as ``python -m``, as ``-c``, and imported on its behalf by a library."""
    (folder / "models").mkdir()
    text = "import tune_cac\nimport importlib, analysis\nassert analysis.mine\nassert importlib.reload(analysis).mine\n"
    (folder / "models" / "net.py").write_text(text)
    (folder / "train.py").write_text("import tune_cac\nimport models.net\n")
    library = folder.parent / "site" / "library.py"
    library.write_text("import importlib\ndef load(name):\n    return importlib.import_module(name)\n")
    on_behalf = "import tune_cac, library; assert library.load('analysis').mine"
    for arguments in (["train.py"], ["-m", "models.net"], ["-c", text], ["-c", on_behalf]):
        done = python(folder, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.thorough
def test_what_needs_our_package_under_a_name_that_is_taken_says_so(folder: Path) -> None:
    (folder / "train.py").write_text("import analysis\nimport tune_cac\ntune_cac.search()\n")
    done = python(folder, "train.py")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: tune_cac has a package named analysis, but {folder / 'analysis.py'} was imported under that "
        "name: rename it, or move it into a package of yours and import it from there"
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_training_that_imports_such_a_module_is_told_what_to_do(folder: Path) -> None:
    (folder / "train.py").write_text(f"import analysis\n{TRAIN}")
    (folder / "helper.py").write_text("from train import make\n")
    done = python(folder, "-m", "tune_cac", "trial", "--workload", "helper:make")
    assert done.returncode == 2
    assert done.stderr == (
        "tune_cac: error: workload helper:make: analysis.py has the name of a package of tune_cac, analysis, so "
        "train.py cannot import it: rename it, or move it into a package of yours\n"
    )


def test_both_lists_of_the_names_agree() -> None:
    assert OWN_PACKAGES == NAMES


def test_one_import_is_enough() -> None:
    import tune_cac.analysis.io.study_files
    from tune_cac.analysis import rank
    from tune_cac.gradskip import Settings

    for name, package in (("analysis", analysis), ("search_spaces", search_spaces), ("gradskip", gradskip)):
        assert getattr(tune_cac, name) is package
    assert all(getattr(tune_cac.compression, name) is not None for name in compression.__all__)
    assert set(tune_cac.__all__) <= set(dir(tune_cac))
    assert rank is analysis.rank
    assert Settings is gradskip.Settings
    assert tune_cac.analysis.io.study_files is sys.modules["analysis.io.study_files"]
    assert analysis.__spec__.name == analysis.__name__ == "analysis"
