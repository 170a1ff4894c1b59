"""The page on clusters and its files: their commands are commands of this package, with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tune_cac.cli.main import build_parser
from tune_cac.cli.search import options_given

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def commands_in(text: str) -> list[list[str]]:
    text = re.sub(r"\$[A-Z_]+", "x", text)
    lines = re.findall(r"python -m tune_cac ([^\n`]+)", text.replace("\\\n", " "))
    return [[word for word in shlex.split(line.removesuffix("&"), comments=True) if word != "$@"] for line in lines]


@pytest.mark.parametrize("name", ["docs/cluster.md", "examples/cluster/rayjob.yaml", "examples/cluster/slurm.sbatch"])
def test_commands_can_be_parsed(name: str) -> None:
    text = (ROOT / name).read_text()
    found = [yaml.safe_load(text)["spec"]["entrypoint"]] if name.endswith("yaml") else [text]
    commands = [command for part in found for command in commands_in(part)]
    assert commands
    for command in commands:
        arguments = build_parser().parse_args(command)
        if arguments.command == "submit":
            given = [word for word in arguments.job_command if word != "--"]
            arguments = build_parser().parse_args(given)
        if arguments.command == "search":
            options_given(arguments)


def test_the_page_links_every_file() -> None:
    assert set(re.findall(r"blob/main/examples/cluster/([a-z.]+)", PAGE)) == {file.name for file in FILES.iterdir()}
