"""docs/compression.md: its tables name what there is, its schedules are read, its commands parse.

The schedule and commands of docs/commands.md, too.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import search_spaces
from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.schedule import (
    PrunerPolicyConfig,
    RegularizerPolicyConfig,
    read_marks,
    read_schedule,
)
from trainables.compression.schedule.configs import DISTILLERS, EXTENSIONS, PRUNERS, QUANTIZERS, REGULARIZERS
from trainables.compression.schedule.parts import KINDS
from trainables.compression.schedule.reading import KEYS, SECTIONS
from trainables.metrics import MODEL_DEFAULTS
from tune_cac.cli.main import build_parser

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "compression.md"
PAGE = FILE.read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
CLASSES = {**PRUNERS, **REGULARIZERS, **QUANTIZERS, **EXTENSIONS, **DISTILLERS}


def blocks(language: str, page: str = PAGE) -> list[str]:
    """A page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def rows(first: str) -> Iterator[list[str]]:
    """Cells of the tables whose first column has this header; a bar within a cell is written ``\\|``."""
    inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif not inside:
            inside = cells[0] == first and "header"
        elif not set(cells[0]) <= {"-"}:
            yield cells
        if inside == "header":
            inside = True


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def arguments_of(model: type[BaseModel]) -> dict[str, Any]:
    """Defaults by argument; the type `Ellipsis` stands for one that is required."""
    return {name: ... if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in model.model_fields.items()}  # fmt: skip


def documented(cell: str) -> dict[str, Any]:
    """The same from a cell: names in backticks, with a colon and the default where there is one, as YAML."""
    found = {}
    for text in quoted(cell):
        name, colon, default = text.partition(": ")
        found[name] = yaml.safe_load(default) if colon else ...
    return found


TABLE = {name: cells for cells in rows("class") for name in quoted(cells[0])}


def test_the_table_has_every_class_and_no_other() -> None:
    learning_rates = {"PolynomialLR", "MultiStepMultiGammaLR"}
    assert set(TABLE) == set(CLASSES) | learning_rates
    named = [name for cells in rows("class") for name in quoted(cells[0])]
    assert len(named) == len(set(named))
    assert all(cell for name in CLASSES for cell in TABLE[name][:4])  # formula and source, too


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_has_the_arguments_and_defaults_of_each_class(name: str) -> None:
    assert documented(TABLE[name][1]) == arguments_of(CLASSES[name])


def test_sections_policy_arguments_marks_and_columns_are_all_there() -> None:
    sections = {quoted(cells[0])[0]: quoted(cells[1]) for cells in rows("section")}
    assert list(sections) == list(SECTIONS)
    assert {kind[0]: section for section, kind in sections.items() if kind} == KINDS
    arguments = [quoted(cells[0])[0] for cells in rows("argument")]
    assert arguments == [*PrunerPolicyConfig.model_fields, *RegularizerPolicyConfig.model_fields]
    assert all(
        default in (None, False, 0) for default in arguments_of(PrunerPolicyConfig).values()
    )  # "all off by default"
    assert {name for cells in rows("key") for name in quoted(cells[0])} == set(KEYS)
    assert {name for cells in rows("column") for name in quoted(cells[0])} == {
        name for name in MODEL_DEFAULTS if name not in ("effective_samples", "gradient_clusters", "gradient_statistics")
    }


def test_schedules_can_be_read() -> None:
    texts = blocks("yaml")
    assert len(texts) >= 6
    (short,) = [text for text in blocks("yaml", COMMANDS) if text.startswith("# prune.yaml")]
    for text in (short, *texts):
        marked = read_marks(text)
        read_schedule(marked.fill(marked.middles()), check_lr=check_lr_scheduler)
    assert sum("!search" in text for text in texts) == 1
    assert {name for text in texts for name in read_marks(text).marks} >= {"end"}


def test_the_check_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tune_cac.cli.schedule import run as schedule_check

    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text(next(text for text in blocks("yaml") if text.startswith("# first.yaml")))
    (line,) = [line for line in commands() if " check first.yaml" in line]
    assert schedule_check.function(parsed(line)) == 0
    assert capsys.readouterr().out == next(text for text in blocks("text") if text.startswith("first.yaml:"))


def commands() -> list[str]:
    lines = [line for block in (*blocks("sh"), *blocks("sh", COMMANDS)) for line in block.splitlines()]
    return [line for line in lines if line.startswith("python -m tune_cac ")]


def parsed(line: str) -> argparse.Namespace:
    return build_parser().parse_args(shlex.split(line, comments=True)[3:])


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_commands_parse(line: str) -> None:
    arguments = parsed(line)
    space = getattr(arguments, "space", None)
    for part in () if space is None else search_spaces.parts_of(space):
        if part.endswith(".yaml"):  # a space of the user's own: integration/test_own_spaces.py runs it; or on a page
            assert part == "my_space.yaml" or f"# {part}" in PAGE + COMMANDS
        elif not part.startswith("my_"):
            search_spaces.load(part)
    schedule = getattr(arguments, "schedule", None)
    if schedule is not None and not schedule.startswith("results/"):
        assert f"# {schedule}" in PAGE + COMMANDS
