"""Canaries for the private names of Optuna and Ray, and a search for others."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import LOCK_FILE_SUFFIX as OPTUNAS_SUFFIX
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import TrialState
from ray.tune.logger import TBXLoggerCallback
from ray.tune.search import Searcher

from analysis.io import journal
from tune_cac.ray_backend.tensorboard import RowEvents
from tune_cac.study.folder import LOCK_FILE_SUFFIX
from tune_cac.tuning.searcher import StudySearch
from tune_cac.tuning.trials import live_trial, queued_parameters

ROOT = Path(__file__).parents[2]
PACKAGES = ("tune_cac", "search_spaces", "trainables", "analysis")
#: All that is used, by file.
ALLOWED = {
    ("tune_cac/tuning/trials.py", "_trial_id"),
    ("tune_cac/ray_backend/session.py", "_private"),
    ("tune_cac/ray_backend/session.py", "_exit"),  # of Python's os
}


def private_names(path: Path) -> set[str]:
    """Private attributes of others than ``self``, and private names imported from Optuna or Ray; none without them."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = [(node.module or "", node) for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    if not {name.split(".")[0] for name in (*plain, *(module for module, _ in imported))} & {"optuna", "ray"}:
        return set()
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    own |= {node.attr for node in attributes if _is_self(node.value)}
    found = {node.attr for node in attributes if not _is_self(node.value) and not node.attr.startswith("__")} - own
    for module, node in imported:
        if module.split(".")[0] in ("optuna", "ray"):
            parts = [*module.split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@pytest.mark.slow
def test_no_other_private_name_is_used() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert {(str(path.relative_to(ROOT)), name) for path in files for name in private_names(path)} == ALLOWED


def test_the_search_sees_private_names(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("from optuna.storages._base import X\nstudy._storage\nself._mine\n")
    assert private_names(path) == {"_base", "_storage"}


def test_a_trial_of_another_process_is_live_by_its_id(tmp_path: Path) -> None:
    def opened() -> optuna.Study:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "j")))
        return optuna.create_study(storage=storage, study_name="s", load_if_exists=True)

    opened().ask()
    study = opened()
    (frozen,) = study.get_trials(states=(TrialState.RUNNING,))
    trial = live_trial(study, frozen)
    trial.set_user_attr("a", 1)
    study.tell(trial, trial.suggest_float("x", 0, 1))
    (done,) = opened().get_trials()
    assert (done.user_attrs, done.state) == ({"a": 1}, TrialState.COMPLETE)


def test_a_queued_trial_keeps_its_parameters() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25})
    study.ask()
    assert queued_parameters(study.get_trials()[0]) == {"x": 0.25}


def test_the_journals_operations_have_these_codes_and_its_lock_this_name() -> None:
    codes = {operation.name: operation.value for operation in JournalOperation}
    assert codes["CREATE_STUDY"] == journal._CREATE_STUDY
    assert codes["DELETE_STUDY"] == journal._DELETE_STUDY
    assert codes["CREATE_TRIAL"] == journal._CREATE_TRIAL
    assert codes["SET_TRIAL_PARAM"] == journal._TRIAL_PARAM
    assert codes["SET_TRIAL_STATE_VALUES"] == journal._TRIAL_STATE
    assert codes["SET_TRIAL_USER_ATTR"] == journal._TRIAL_USER_ATTR
    assert tuple(state.name for state in sorted(TrialState, key=lambda state: state.value)) == journal._STATES
    assert LOCK_FILE_SUFFIX == OPTUNAS_SUFFIX


def test_rays_logger_keeps_writers_and_results_under_these_names() -> None:
    assert vars(RowEvents()).keys() == vars(TBXLoggerCallback()).keys()
    assert "self._summary_writer_cls(" in inspect.getsource(TBXLoggerCallback.log_trial_start)
    for name in ("_trial_writer", "_trial_result"):
        assert f"self.{name}" in inspect.getsource(TBXLoggerCallback.log_trial_end)


def test_the_searcher_stands_on_rays_public_one() -> None:
    assert StudySearch.__mro__[1] is Searcher
    for name in ("suggest", "on_trial_complete", "on_trial_result", "save"):
        assert name in vars(StudySearch)
        assert callable(getattr(Searcher, name))
