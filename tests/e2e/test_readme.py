"""The README's examples, run as they stand, and its links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: Variables under which the first example is said to be run.
VARIABLES = {"CAC_VAR_START_ITR": "60", "CAC_VAR_START_THR": "0.99", "CAC_VAR_SAMPLES": "5"}


def example(name: str) -> str:
    """The Python block that begins with the file's name."""
    blocks = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if b.startswith(f"# {name}\n")]
    assert len(blocks) == 1, name
    return str(blocks[0])


def run(name: str, folder: Path, *launcher: str) -> str:
    (folder / name).write_text(example(name))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAC_")} | VARIABLES
    command = [sys.executable, *launcher, name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_ordinary_loop_stops_layers(tmp_path: Path) -> None:
    said = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    assert f"`{said} python loop.py`" in README
    lines = run("loop.py", tmp_path).splitlines()
    assert re.fullmatch(r"step \d+: stopped through 0\.weight \(start, ratio 0\.9\d\d\)", lines[0])
    assert len(lines) >= 2


@pytest.mark.slow
def test_two_processes_stop_layers(tmp_path: Path) -> None:
    assert "`torchrun --standalone --nproc-per-node 2 parallel.py`" in README
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = run("parallel.py", tmp_path, *launcher).splitlines()
    assert re.fullmatch(r"step \d+: stopped through 0\.weight", lines[0])


@pytest.mark.slow
def test_the_scaled_loop_stops_layers(tmp_path: Path) -> None:
    lines = run("scaler.py", tmp_path).splitlines()
    assert re.fullmatch(r"iterations: \d+", lines[0])
    assert re.fullmatch(r"step \d+: stopped through 0\.weight", lines[1])


def anchors(markdown: str) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = ("README.md", "docs/gradient-skip.md", "docs/stage-tree.md", "docs/analysis.md", "docs/findings.md")


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
