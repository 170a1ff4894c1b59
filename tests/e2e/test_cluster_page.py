"""The page on clusters and its files: their commands are commands of this package, with options that exist."""

from __future__ import annotations

import re
import shlex
from functools import reduce
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
    lines = re.findall(r"python -m tune_cac ((?:(?! \|\|)[^\n`])+)", text.replace("\\\n", " "))
    return [[word for word in shlex.split(line.removesuffix("&"), comments=True) if word != "$@"] for line in lines]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("docs/cluster.md", None),
        ("examples/cluster/rayjob.yaml", ("spec", "entrypoint")),
        ("examples/cluster/sky.yaml", ("run",)),
        ("examples/cluster/slurm.sbatch", None),
    ],
)
def test_commands_can_be_parsed(name: str, place: tuple[str, ...] | None) -> None:
    text = (ROOT / name).read_text()
    if place is not None:
        text = reduce(lambda part, key: part[key], place, yaml.safe_load(text))
    commands = commands_in(text)
    assert commands
    for command in commands:
        arguments = build_parser().parse_args(command)
        if arguments.command == "submit":
            given = [word for word in arguments.job_command if word != "--"]
            arguments = build_parser().parse_args(given)
        if arguments.command == "search":
            options_given(arguments)


def test_the_page_links_every_file() -> None:
    assert set(re.findall(r"blob/main/examples/cluster/([a-z.-]+)", PAGE)) == {file.name for file in FILES.iterdir()}


def test_nodes_reached_by_ssh_start_with_the_token_and_the_environment() -> None:
    config = yaml.safe_load((FILES / "ray-up.yaml").read_text())
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert any(".bashrc" in command for command in config["setup_commands"])  # `ray down` runs `ray stop` without more
    for role in ("head", "worker"):
        *_, start = config[f"{role}_start_ray_commands"]
        assert start.startswith(". ~/tune_cac_env/bin/activate; export RAY_AUTH_MODE=token")
        assert "; ray start --" in start
