"""The documentation's tables are those that `docs/generate.py` writes from the declarations."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_up_to_date(generate: ModuleType) -> None:
    pages = {page.name: page.read_text("utf-8") for page in DOCS.glob("*.md")}
    outdated = [name for name, text in pages.items() if generate.generated(text) != text]
    assert not outdated, "run python docs/generate.py"
    assert {part for part in generate.PARTS for text in pages.values() if f"<!-- generated: {part} -->" in text} == set(
        generate.PARTS
    )


@pytest.mark.slow
def test_a_changed_cell_is_written_anew(generate: ModuleType) -> None:
    text = (DOCS / "gradient-skip.md").read_text("utf-8")
    assert "| 5000 |" in text
    changed = text.replace("| 5000 |", "| 4000 |")
    assert generate.generated(changed) == text
