"""The walls of the design, each in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tune_cac", "search_spaces", "trainables", "analysis")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after a statement."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "banned"),
    [
        ("import analysis", {"torch", "ray", "tune_cac"}),
        (
            "import search_spaces; [search_spaces.load(name) for name in search_spaces.SPACES]",
            {"torch", "ray", "optuna", "tune_cac", "analysis"},
        ),
        ("import tune_cac.study.fixed_params, tune_cac.study.search_options", {"torch", "ray", "optuna"}),
        ("import trainables.config, trainables.metrics", {"torch", "ray", "pandas", "tune_cac", "analysis"}),
        ("from trainables.gradskip import Settings; import trainables.gradskip.rules.state_machine", {"torch", "ray"}),
        (
            "import trainables.training.run; import trainables.gradskip.optimizers",
            {"ray", "pandas", "tune_cac", "analysis"},
        ),
        ("import trainables.stage_tree.checkpoints, trainables.stage_tree.leases", {"torch", "ray", "numpy"}),
        ("import analysis.presentation.html", {"torch", "ray", "matplotlib", "scipy", "sklearn", "optuna"}),
        ("import tune_cac.ray_backend.worker_classes", {"torch"}),  # a worker that only starts scripts
        ("import tune_cac; dir(tune_cac)", {"torch", "ray", "pandas", "optuna"}),
        ("import tune_cac as cac; cac.gradskip.SGD", {"ray", "pandas", "optuna"}),
        (
            "import tune_cac.integrations.trainer_skip, tune_cac.cli.main",
            {"transformers", "lightning", "accelerate", "peft"},
        ),
        (
            "import tune_cac.cli.main; tune_cac.cli.main.build_parser().format_help()",
            {"torch", "ray", "pandas", "optuna", "numpy"},
        ),
    ],
)
def test_import_loads_nothing_heavier(statement: str, banned: set[str]) -> None:
    assert loaded_by(statement) & banned == set()


def imports_of(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.slow
def test_ray_is_imported_in_two_places_alone() -> None:
    allowed = {ROOT / "trainables/trial.py", ROOT / "trainables/stage_tree/coordinator.py"}
    users = {path for package in PACKAGES for path in files(package) if "ray" in imports_of(path)}
    assert {path for path in users if path.relative_to(ROOT).parts[0] != "tune_cac"} <= allowed
    assert ROOT / "trainables/trial.py" in users  # the test sees what it looks for


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("search_spaces", {"tune_cac", "analysis", "torch", "ray", "pandas", "optuna"}),
        ("trainables", {"tune_cac", "analysis", "search_spaces", "pandas"}),
        ("analysis", {"tune_cac", "search_spaces", "torch", "ray"}),
    ],
)
def test_packages_import_in_one_direction(package: str, banned: set[str]) -> None:
    for path in files(package):
        assert imports_of(path) & banned == set(), path


def test_no_file_of_leftovers() -> None:
    assert not [path for package in PACKAGES for path in files(package) if path.stem in ("utils", "helpers", "common")]


@pytest.mark.parametrize(
    "package",
    ["tune_cac", "trainables.gradskip", "trainables.gradients", "trainables.compression", "analysis", "search_spaces"],
)
def test_no_module_can_take_the_place_of_a_public_name(package: str) -> None:
    """Importing a submodule sets its name on the package, whatever stood there."""
    import importlib

    module = importlib.import_module(package)
    submodules = {path.stem for path in Path(str(module.__file__)).parent.glob("*.py")}
    names = set(module.__all__)
    assert names
    assert names & submodules == set()
