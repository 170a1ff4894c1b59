"""A study folder from somebody else: its journal and its links name places outside, which are left alone."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from searchers import searcher
from studies import result_row, write_study

from analysis.io.study_files import Layout, StudyInfo
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.training.run import TrainingRun
from trainables.trial import continued
from tune_cac.cli.main import main
from tune_cac.study.folder import find_study, is_trial_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "results" / "s")
    layout.ray.mkdir(parents=True)
    layout.tree.mkdir()
    layout.write_info(StudyInfo(space="auto_thresholds", workload="digits", epochs=1, seed=0, versions={}))
    return layout


@pytest.mark.parametrize(
    "name",
    ["best.env", "search.lock", "optuna.journal", "report.html", "ray/run-000", "ray/run-000/trial-00000", "tree/x"],
)
def test_a_link_out_of_a_study_is_refused(study: Layout, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = study.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} is a link out of its study, which would be written to: replace it"):
        find_study(study.root.parent, "s")
    assert outside.read_text() == "mine"


def test_links_inside_a_study_and_optunas_lock_are_no_harm(study: Layout, tmp_path: Path) -> None:
    study.journal.touch()
    (study.root / "optuna.journal.lock").symlink_to(tmp_path / "elsewhere" / "optuna.journal")  # of a study moved here
    (study.root / "latest").symlink_to(study.ray)
    assert find_study(study.root.parent, "s").root == study.root


@pytest.mark.parametrize("name", ["../outside", "/etc", "ray/run-000/../../..", "ray/run-000/trial-1/..", "", None, 3])
def test_names_that_are_no_trial_folders(name: Any) -> None:
    assert not is_trial_folder(name)
    assert is_trial_folder("ray/run-000/trial-00012")


def test_a_checkpoint_outside_is_not_continued_from(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "outside").mkdir()
    made = searcher(tmp_path / "s")
    (tmp_path / "s" / "link").symlink_to(tmp_path / "outside")
    own = tmp_path / "s" / "ray" / "run-000" / "trial-00001" / "checkpoint_000001"
    for place in (str(tmp_path / "outside"), "../outside", str(tmp_path / "s" / "link"), "s3://bucket/x"):
        assert made.restarts.own_checkpoint(place) is None
    assert made.restarts.own_checkpoint(str(own)) == str(own)
    made.study.enqueue_trial({}, user_attrs={"resume_from": str(tmp_path / "outside"), "role": "search"})
    found = [made.suggest(str(number)) for number in range(2)]  # the starting point, then the queued one
    assert [suggested["resume_from"] for suggested in found if isinstance(suggested, dict)] == [None, None]


class Poison:
    """Whoever unpickles it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.slow
def test_no_pickle_of_a_study_is_loaded(tmp_path: Path) -> None:
    root = tmp_path / "s"
    write_study(root, [{"row": result_row()}, {"row": result_row(0.96, 0.2)}])
    marker = tmp_path / "marker"
    trial = root / "ray/run-000/trial-00000"
    checkpoint = trial / "checkpoint_000001"
    checkpoint.mkdir(parents=True)
    poisoned = [trial / "error.pkl", root / "ray/run-000/tuner.pkl", checkpoint / CHECKPOINT_FILE]
    for path in poisoned:
        path.write_bytes(pickle.dumps(Poison(marker)))
    assert main(["report", str(root)]) == 0
    with pytest.warns(UserWarning, match="cannot be read"):
        continued(TrainingRun, TrialConfig(method="none", epochs=1), str(checkpoint)).close()
    assert not marker.exists()
    pickle.loads(poisoned[0].read_bytes())
    assert marker.exists()  # it is poison


@pytest.mark.slow
def test_what_loads_pickles_is_known() -> None:
    """One place unpickles, Ray's error of this very run in the session's own temporary folder."""
    found, unsafe = set(), []
    for package in ("tune_cac", "trainables", "analysis", "search_spaces"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if re.search(r"pickle\.(loads?|Unpickler)$|read_pickle$|joblib\.load$", call):
                    found.add(str(path.relative_to(ROOT)))
                if call == "torch.load" and "weights_only=True" not in ast.unparse(node):
                    unsafe.append(f"{path}:{node.lineno}")
                if "allow_pickle=True" in (ast.unparse(node) if isinstance(node, ast.Call) else ""):
                    unsafe.append(f"{path}:{node.lineno}")
    assert found <= {"tune_cac/ray_backend/workers.py"}
    assert unsafe == []
