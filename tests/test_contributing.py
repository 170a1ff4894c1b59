"""What contributors meet: paths that exist, examples of changes that work, settings of tools that fit together."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from thorough import rest_thorough

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.DOTALL | re.MULTILINE)
PACKAGES = ("tune_cac", "search_spaces", "trainables", "analysis")
#: Each example of a change by its heading.
DIFFS = {
    heading: "".join(re.findall(r"^```diff\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    for heading, section in re.findall(r"^## (Add an? .+?)\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
}


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_map_answers_ten_questions_with_one_file_each() -> None:
    (table,) = re.findall(r"^## Where is \.\.\.\n\n(.*?)\n\n", GUIDE, re.DOTALL | re.MULTILINE)
    answers = [line.strip("|").split("|")[-1].strip() for line in table.splitlines()[2:]]
    assert len(answers) == 10
    for answer in answers:
        (shown, target) = re.fullmatch(r"\[(.+)\]\((.+)\)", answer).groups()
        assert shown == target
        assert (ROOT / target).is_file(), target


def test_paths_and_commands_in_the_prose_exist() -> None:
    for path in re.findall(r"`((?:docs|benchmarks|tests|examples)/[\w./]*)`", PROSE):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)  ", GUIDE)) == {"check", "test"} <= targets
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f"Python {oldest} or newer" in GUIDE


def test_a_stop_rule_is_one_file_and_nearly_all_else_two() -> None:
    assert {heading.partition(" a")[2].lstrip("n "): diff.count("diff --git ") for heading, diff in DIFFS.items()} == {
        "search space": 2, "stop rule": 1, "optimizer": 2, "column": 2, "option of a search": 2, "pruner": 2,
        "workload": 2,
    }  # fmt: skip


SCHEDULE = """
version: 1
pruners: {small: {class: RelativeParameterPruner, shares: {'conv[2-6].weight': 0.2}}}
policies: [{pruner: {instance_name: small}, epochs: [1]}]
"""
#: What is run after each change, and what it must print.
TRIED = {
    "Add a search space": ("-m tune_cac spaces late_start", r"CAC_VAR_START_ITR +0 \.\. \d+"),
    "Add a stop rule": (
        "-m tune_cac trial --epochs 5 --set CAC_RULE=staircase --set CAC_RULE_START_ITR=20 --set CAC_RULE_DEPTH=0.5",
        r"iteration 20: stopped through 0 .*\n.*iteration 30: stopped through 3 .*\n.*iteration 40: stopped through 6 ",
    ),
    "Add an optimizer": (
        "-c 'import torch, tune_cac; w = torch.nn.Parameter(torch.ones(2, 2, 3, 3)); "
        "s = tune_cac.gradskip.Settings(stop_layer_num=(0,), stop_layer_itr=(0,)); w.grad = torch.ones_like(w); "
        "o = tune_cac.gradskip.NAdam([w], lr=0.1, settings=s); o.step(); print(o.gradskip.events)'",
        "StopEvent",
    ),
    "Add a column": (
        "-c 'from trainables.config import TrialConfig; from trainables.training.run import TrainingRun\n"
        'with TrainingRun(TrialConfig(method="none", epochs=1)) as run: print(run.train_epoch()["cpu_time_s"])\'',
        r"\d\.\d",
    ),
    "Add an option of a search": ("-m tune_cac search --help", r"--width WIDTH +characters of the ranked"),
    "Add a pruner": ("-m tune_cac trial --epochs 2 --schedule small.yaml", r"sparsity [1-9]\d\.\d %"),
    "Add a workload": ("-m tune_cac trial --workload stripes", r"validation accuracy (0\.9\d+|1\.0000)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("heading", rest_thorough(TRIED))
def test_each_example_can_be_applied_and_works(heading: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "small.yaml").write_text(SCHEDULE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, env=environment, input=DIFFS[heading], text=True, check=True)
    command, expected = TRIED[heading]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout
    changed = [str(tmp_path / name) for name in re.findall(r"^\+\+\+ b/(.+)$", DIFFS[heading], re.MULTILINE)]
    config = str(ROOT / "pyproject.toml")
    for check in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *check, "-q", "--config", config, *changed], check=True)


def test_hooks_run_the_tools_of_make_and_download_nothing() -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        command = " ".join(hook["entry"].removesuffix(" --fix").split()[:2])
        assert f"\t{command}" in lint, hook["id"]
    assert {hook["entry"].split()[0] for hook in repository["hooks"]} == {".venv/bin/ruff", ".venv/bin/mypy"}


def test_the_workflow_checks_every_python_and_runs_everything_once() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    versions = jobs["check"]["strategy"]["matrix"]["python"]
    assert versions[0] == oldest
    assert len(versions) == 3
    assert all(isinstance(version, str) for version in versions)  # 3.10 as a number is 3.1
    commands = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert "make check" in commands["check"]
    assert "lint all-tests" in commands["test"]
    assert "mkdocs build --strict" in commands["docs"]
    # A test that is left out for want of a browser fails the run.
    assert [step.get("env", {}).get("TUNE_CAC_NOTHING_LACKS") for step in jobs["test"]["steps"]][-1] == "1"


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_ask_for_something(name: str) -> None:
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["type"] in ("textarea", "input", "dropdown") for field in form["body"])
    assert all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_a_bug_report_asks_with_commands_that_exist() -> None:
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert "python -m tune_cac --version" in text
    assert "tune_cac doctor" in text
    assert (ROOT / "tune_cac" / "cli" / "doctor.py").is_file()


def test_the_citation_names_every_work_that_docs_name_by_its_number() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert "version" not in citation  # it stands in tune_cac/__init__.py
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Repository"]
    for reference in citation["references"]:
        assert reference["title"]
        assert all(author.get("family-names") or author.get("name") for author in reference["authors"])
        assert reference.get("year") or reference["type"] == "software"
    titles = [reference["title"] for reference in citation["references"]]
    assert len(titles) == len(set(titles))
    cited = {number["value"] for reference in citation["references"] for number in reference.get("identifiers", ())}
    pages = [*(ROOT / "docs").glob("*.md"), *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
    named = {number for page in pages for number in re.findall(r"arXiv:\d{4}\.\d{5}", page.read_text())}
    assert len(named) > 10
    assert named - cited == set()


def test_every_page_is_in_the_documentation_and_its_index() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    settings = yaml.safe_load(text)
    shown = [page for entry in settings["nav"] for page in entry.values()]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(shown) == sorted(pages)
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert linked == pages - {"index.md"}
    for hook in settings["hooks"]:
        assert ast.parse((ROOT / hook).read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert settings["repo_url"] == project["urls"]["Repository"]
    assert any(requirement.startswith("mkdocs") for requirement in project["optional-dependencies"]["docs"])


def test_links_out_of_the_documentation_become_addresses() -> None:
    absolute_links = runpy.run_path(str(ROOT / "docs" / "repository_links.py"))["absolute_links"]
    for link, expected in {
        "../README.md": "https://host/me/it/blob/main/README.md",
        "../README.md#commands": "https://host/me/it/blob/main/README.md#commands",
        "../examples": "https://host/me/it/tree/main/examples",
        "schedules": "https://host/me/it/tree/main/docs/schedules",
        "gradient-skip.md#other-rules": "gradient-skip.md#other-rules",
        "analysis.ipynb": "analysis.ipynb",
        "#here": "#here",
        "https://optuna.org/a/../b": "https://optuna.org/a/../b",
    }.items():
        assert absolute_links(f"[a]({link}) b", "page.md", "https://host/me/it/") == f"[a]({expected}) b"
