"""What pyproject.toml promises: one version number, and lower bounds that exist together on the oldest Python."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def lower_bounds() -> dict[str, Version]:
    """The least version of each dependency, those of all extras included."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    found: dict[str, Version] = {}
    for text in [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        (bound,) = requirement.specifier
        assert bound.operator == ">=", f"{text}: a lower bound, and no upper one, so that users can update"
        found[requirement.name.lower()] = Version(bound.version)
    return found


def test_the_tools_check_for_the_oldest_python() -> None:
    tools = PROJECT["tool"]
    assert tools["ruff"]["target-version"] == "py" + OLDEST.replace(".", "")
    assert tools["mypy"]["python_version"] == OLDEST


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tune_cac.__version__"}
    number = re.findall(r'^__version__ = "(.+)"$', (ROOT / "tune_cac" / "__init__.py").read_text(), re.MULTILINE)
    assert len(number) == 1  # setuptools reads the literal without an import


@pytest.mark.thorough
@pytest.mark.slow
def test_the_least_versions_can_be_installed_together(tmp_path: Path) -> None:
    """Resolve every direct dependency at its lower bound, from metadata alone: nothing is installed."""
    least = lower_bounds()
    assert len(least) > 20
    constraints = tmp_path / "least.txt"
    constraints.write_text("".join(f"{name}=={bound}.*\n" for name, bound in least.items()))  # 3.6 may be 3.6.1
    command = ["pip", "compile", "pyproject.toml", "--all-extras", "--resolution", "lowest-direct"]
    # Wheels alone: what has to be compiled on the oldest Python can't be installed by most.
    options = ["--python-version", OLDEST, "--only-binary", ":all:", "--constraints", str(constraints)]
    done = subprocess.run(
        [sys.executable, "-m", "uv", *command, *options, "--cache-dir", str(tmp_path / "cache")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # names what contradicts what
    resolved = {name.lower() for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", done.stdout, re.MULTILINE)}
    assert set(least) <= resolved
