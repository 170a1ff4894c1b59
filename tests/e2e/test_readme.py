"""The links of all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def anchors(markdown: str) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_scripts_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", text):
        if not target.startswith("http"):
            file = (ROOT / page).parent.joinpath(target)
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), anchor
    for script in re.findall(r"`(benchmarks/\w+\.py)`", text):
        assert (ROOT / script).is_file(), script
