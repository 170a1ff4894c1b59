"""The order of the house: no import circle, none against the order, one stem a file in a package."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tune_cac", "search_spaces", "trainables", "analysis")
#: Rooms from the bottom up; a module may import its own room and those below. Modules are in the longest that fits.
ORDER = (
    ("trainables.storage", "trainables.errors", "trainables.lazy_names"),
    ("trainables.quality",),
    ("trainables.workload_options", "trainables.metrics", "trainables.savings", "trainables.interventions"),
    ("trainables.registry",),
    # A method's settings belong to the vocabulary, as the configuration's fields are the variables themselves; the
    # rules say which they read.
    ("trainables.gradskip.rules",),
    ("trainables.gradskip.variables", "trainables.gradskip.settings"),
    ("trainables.gradients.fields",),
    ("trainables.training.recipe.fields",),
    ("trainables.config",),
    ("trainables.attachment",),
    ("trainables", "trainables.runtime"),
    # Workloads are built of binary layers, and of the optimizer of the published experiment; they check their groups.
    ("trainables.gradients.straight_through", "trainables.gradients.normalised_sgd"),
    ("trainables.workloads",),
    ("trainables.gradskip",),
    ("trainables.gradients",),
    ("trainables.compression",),
    ("trainables.deployment",),
    ("trainables.training",),
    ("trainables.stage_tree", "trainables.script"),
    ("trainables.trial",),
    ("search_spaces", "analysis"),
    ("tune_cac.own_packages",),
    ("tune_cac.messages", "tune_cac.interrupts"),
    ("tune_cac.study", "tune_cac.ray_backend"),
    ("tune_cac.tuning",),
    ("tune_cac.cli", "tune_cac"),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def module_files(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the four packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules that a source imports, wherever: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


@functools.cache
def import_graph() -> dict[str, set[str]]:
    known = module_files()
    return {name: set(imports_of(path.read_text(), known)) - {name} for name, path in known.items()}


def level(module: str) -> int:
    while module not in LEVEL:
        module = module.rpartition(".")[0]
    return LEVEL[module]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph, empty where it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.slow
def test_no_import_circle() -> None:
    assert circle(import_graph()) == []


def test_circles_are_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    source = "def f():\n    from trainables import config\nif TYPE_CHECKING:\n    import analysis.io.study_files\n"
    assert set(imports_of(source, module_files())) == {"trainables.config", "analysis.io.study_files"}


def test_no_import_against_the_order() -> None:
    upward = {
        f"{name} -> {other}"
        for name, others in import_graph().items()
        for other in others
        if level(other) > level(name) and name not in PACKAGES
    }
    # Gradient-Skip's code reads its own settings; the front doors of packages load theirs when they are asked for.
    lazily = {
        edge
        for edge in upward
        if edge.split(" -> ")[0]
        in ("trainables.gradskip", "trainables.gradients", "trainables.compression", "analysis")
    }
    assert upward == lazily
    assert level("trainables.gradskip.stops") > level("trainables.gradskip.settings")


def packages() -> dict[str, list[Path]]:
    """Files by the second-level package that they are in."""
    found = defaultdict(list)
    for name, path in module_files().items():
        parts = name.split(".")
        folder = path.relative_to(ROOT).parts
        if len(folder) > 2 and path.name != "__init__.py":
            found[".".join(parts[:2])].append(path)
    return found


@pytest.mark.parametrize("package", sorted(packages()))
def test_no_two_files_of_one_stem_in_a_package(package: str) -> None:
    stems = Counter(path.stem for path in packages()[package])
    assert [stem for stem, count in stems.items() if count > 1] == []


@pytest.mark.slow
def test_no_name_is_both_arguments_and_implementation() -> None:
    """A class that checks arguments ends in Config; what it configures has another name."""
    configs, others = set(), set()
    for path in (ROOT / "trainables" / "compression").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                (configs if "Config" in node.name else others).add(node.name)
    assert configs
    assert not {name.removesuffix("Config") for name in configs} & configs
    defined_twice = Counter(
        node.name
        for path in (ROOT / "trainables" / "compression").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in defined_twice.items() if count > 1] == []


def test_every_command_is_a_file() -> None:
    import importlib

    from tune_cac.cli.command import Command
    from tune_cac.cli.main import COMMANDS

    shared = {"main", "console", "command", "arguments", "__init__"}
    files = {path.stem for path in (ROOT / "tune_cac" / "cli").glob("*.py")} - shared
    assert {command.__name__.rpartition(".")[2] for command in COMMANDS} == files
    for stem in files:
        run = importlib.import_module(f"tune_cac.cli.{stem}").run
        assert isinstance(run, Command)
        assert run.name.replace("-", "_") == stem


def test_files_are_small() -> None:
    """A file is a concept that is read from top to bottom: 800 lines are many."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in module_files().values()
        if (count := len(path.read_text().splitlines())) > 800
    }
    assert long == {}
