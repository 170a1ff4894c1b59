"""Spaces of the user's own on a real Ray: the example of docs/commands.md, and options of a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_run import run_here
from studies import study_of

import analysis
import tune_cac
from analysis.io.study_files import Layout
from analysis.presentation.summary_text import config_of
from tune_cac.ray_backend.session import ray_session

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "commands.md").read_text().partition("## Spaces of your own")[2].partition("\n## ")[0]
FACTORY = "my_project.training:make_workload"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the page in a folder, the factory, the function and the YAML file, and a Ray that has them."""
    folder = tmp_path_factory.mktemp("own_spaces")
    (folder / "my_project").mkdir()
    (folder / "my_project" / "training.py").write_text(block(r"python\n# my_project/training.py", "own-training.md"))
    (folder / "my_project" / "spaces.py").write_text(block(r"python\n# my_project/spaces.py"))
    (folder / "my_space.yaml").write_text(block("yaml"))
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        patched.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # of Ray's workers
        with ray_session(cpus=2):
            yield folder


def block(begin: str, page: str = "") -> str:
    """The first block of a page of the documentation that begins so."""
    text = (DOCS / page).read_text() if page else PAGE
    return str(re.findall(rf"```{begin}\n(.*?)```", text, re.DOTALL)[0])


@pytest.mark.thorough
def test_the_example_of_the_page(project: Path) -> None:
    explain, *searches = re.findall(r"^python -m tune_cac (.*)$", PAGE, re.MULTILINE)
    shown = run_here(project, *explain.split()).stdout
    assert shown.startswith("my_space.yaml: Rule and braking, and the width of the network\nmethod gradskip: ")
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "0.02 .. 0.8 (log)" in lines["CAC_RULE_TOLERANCE"]
    assert "CAC_RULE=plasticity" in lines["CAC_RULE_TOLERANCE"]
    assert "channels of each convolution" in lines["width"]

    study = project / "results" / "s"
    how = ("--trials", "7", "--epochs", "2", "--name", "s", "--concurrency", "2", "--allowed-drop", "0.9")
    done = run_here(project, *searches[1].split(), *how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no controls: cut dense runs would belong to one combination of lr, width alone\n" in (done.stderr)
    text = (project / "my_space.yaml").read_text()
    assert Layout(study).read_info().space_files == {"my_space.yaml": text}

    # Ended searches take more trials only with the same text; the file may be lost for a resumed one.
    (project / "my_space.yaml").write_text(text.replace("[8, 16]", "[8, 32]"))
    refused = run_here(project, *searches[1].split(), *how)
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "results/s holds a study with another text of my_space.yaml, which study.json keeps in space_files: choose "
        "another --name, or the same settings to add trials to it\n"
    )
    (project / "my_space.yaml").unlink()
    info = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**info, "trials": 9}))
    resumed = run_here(project, "search", "--resume", "s", "--concurrency", "2")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed"}
    baselines = trials[trials["role"] == "baseline"].set_index("options")
    assert baselines.index.is_unique  # once for each combination
    assert set(baselines.index) == set(trials["options"])
    assert set(trials["options"]) <= {f"lr={lr} width={width}" for lr in (0.1, 0.05) for width in (8, 16)}
    assert len(baselines) > 1
    assert len(trials) == 9 + len(baselines) - 1  # further baselines do not count
    assert trials.loc[0, "options"] == trials.loc[1, "options"] == "lr=0.1 width=8"  # the starting point's
    ranking = analysis.rank(trials, allowed_drop=0.9)
    for _, row in ranking.iterrows():
        own = baselines.loc[row["options"]]
        assert config_of(row).options == tuple(row["options"].split())
        assert row["baseline"] == own["trial"]
        assert row["accuracy_drop"] == own["accuracy"] - row["accuracy"]
        assert row["dense_flops"] == own["dense_flops"]
    # Of the root with the most recorded steps.
    replayed = run_here(project, "replay", "s", "--set", "CAC_VAR_START_THR=0.9")
    assert re.match(rf"{FACTORY} lr=0\.(1|05) width=(8|16), 2 epochs \(32 steps\), seed 0\n", replayed.stdout)

    # Another combination is another root of the stage tree: widths differ in FLOPs, learning rates in the first loss.
    assert baselines["train_loss"].is_unique
    told = {trial.number: trial for trial in study_of(study).trials}
    for _, row in trials[trials["role"] != "baseline"].iterrows():
        excess = baselines.loc[row["options"], "accuracy"] - row["accuracy"] - 0.9
        assert told[row["trial"]].constraints["accuracy_drop"] == pytest.approx(excess, abs=1e-9)


@pytest.mark.thorough
def test_placeholders_of_a_script(project: Path) -> None:
    (project / "train.sh").write_text(
        'awk -v t="$1" -v l="$2" \'BEGIN { s = t < 0 ? 0 : 1 - t; '
        'printf "{\\"accuracy\\": %g, \\"step\\": 90, \\"executed_flops\\": %d}\\n", l - s, 1000 * (1 - s) }\'\n'
    )
    (project / "two.yaml").write_text(
        "level: {choices: [0.9, 0.5]}\nCAC_VAR_START_THR: {low: 0.8, high: 0.98, step: 0.02}"
    )
    script = ("--script", "sh train.sh {CAC_VAR_START_THR} {level}")
    how = ("--trials", "7", "--name", "script", "--allowed-drop", "0.3")
    done = run_here(project, "search", "--space", "two.yaml", *script, *how)
    assert done.returncode == 0, done.stderr
    trials = analysis.load(project / "results" / "script")
    assert set(trials["options"]) == {"level=0.9", "level=0.5"}
    assert len(trials) == 8
    # Each loses what it saves against the level of its own options.
    found = trials[trials["role"] != "baseline"]
    assert found["accuracy_drop"].tolist() == pytest.approx((1 - found["CAC_VAR_START_THR"]).tolist())
    # On fresh seeds, too, each candidate is compared with the baseline of its options.
    with contextlib.chdir(project):
        confirmed = tune_cac.confirm("script", top=6, seeds=3)
        retrained = analysis.load(confirmed.folder / "confirmation")
    runs = retrained[retrained["role"] == "baseline"].groupby(["options", "seed"]).size()
    assert runs.tolist() == [1] * 6
    table = confirmed.confirmation
    assert table is not None
    lost = found.set_index("trial")["accuracy_drop"]
    assert table["accuracy_drop"].tolist() == pytest.approx(lost[table["candidate"]].tolist())
    picked = found.set_index("trial").loc[table["candidate"], "options"]
    assert set(picked) == {"level=0.9", "level=0.5"}
    missing = run_here(project, "search", "--space", "two.yaml", "--script", "sh train.sh 1 2", "--name", "t")
    assert missing.returncode == 2
    assert missing.stderr.endswith(
        "error: key level of space two.yaml is no variable, so the command must have the placeholder {level}, got sh "
        "train.sh 1 2\n"
    )
