"""The examples in docstrings, run as they stand; and that the public functions of `analysis` have one."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest

import analysis

ROOT = Path(__file__).parent.parent
PACKAGES = ("tune_cac", "search_spaces", "trainables", "analysis")
#: Public functions of `analysis` that read a study's files, and those that draw its tree: docs/analysis.ipynb and
#: docs/stage-tree.md show these.
NEED_A_STUDY = {
    "load", "history", "export_trial", "replay", "load_trace", "stage_frame", "tree_text",
}  # fmt: skip


#: What a docstring of a function does not begin with: it says what the function does, in the imperative.
NO_VERBS = {
    "A", "All", "An", "And", "Any", "As", "At", "Both", "By", "Each", "Either", "Every", "False", "For", "From",
    "Half", "How", "If", "In", "Into", "It", "Its", "Like", "Most", "No", "None", "Nothing", "Of", "On", "One",
    "Only", "Or", "Other", "Some", "Such", "That", "The", "Their", "Them", "These", "They", "This", "Those", "Three",
    "To", "True", "Two", "Under", "Until", "What", "Whatever", "When", "Where", "Whether", "Which", "While", "Who",
    "Whoever", "Whole", "Whose", "Why", "With", "Without",
}  # fmt: skip


def modules_with_examples() -> list[str]:
    """Names of the modules of the four packages in which an example stands."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files if ">>> " in f.read_text()]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
    assert os.listdir(tmp_path) == []  # an example leaves no files


def test_public_functions_have_an_example() -> None:
    functions = {name for name in analysis.__all__ if inspect.isfunction(getattr(analysis, name))}
    shown = {name for name in functions if ">>> " in (inspect.getdoc(getattr(analysis, name)) or "")}
    assert functions - shown == NEED_A_STUDY


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_functions_say_in_the_imperative_what_they_do(package: str) -> None:
    """Ruff's D401 refuses verbs in another form; this refuses what is no verb at all."""
    others = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or "Return"
                first = text.split()[0].strip("`.,:;")
                if first in NO_VERBS or not first[:1].isupper():
                    others.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}")
    assert others == []


def test_chance_is_called_chance_and_confidence_confidence() -> None:
    """Words that promise more than an interval over seeds, or less, in what a user or a developer reads."""
    gone = re.compile(r"\b(luck|lucky|surely|how sure)\b|\bholds? together\b|settings hold\b", re.IGNORECASE)
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.ipynb"), ROOT / "README.md"]
    files += [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert [(file.name, found[0]) for file in files if (found := gone.search(file.read_text("utf-8")))] == []
