"""Our reader of Optuna's journal against Optuna itself, on whole and on damaged journals."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from analysis.io.journal import read_study, torn_end
from analysis.io.study_files import STUDY_NAME
from trainables.errors import UserError

optuna.logging.set_verbosity(optuna.logging.ERROR)
Facts = list[tuple[int, str, dict[str, Any], Any]]


def storage(path: Path) -> optuna.storages.JournalStorage:
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


def as_optuna_reads(path: Path) -> Facts:
    """Number, state, attributes and values of each trial."""
    study = optuna.load_study(study_name=STUDY_NAME, storage=storage(path))
    return [(t.number, t.state.name, dict(t.user_attrs), t.values) for t in study.get_trials(deepcopy=False)]


def facts(path: Path) -> Facts:
    return [(t.number, t.state, t.user_attrs, t.values) for t in read_study(path)]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


steps = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["ask", "queue", "add", "attr", "complete", "fail", "prune"])),
    max_size=14,
)


@settings(max_examples=25)
@given(steps, st.booleans())
def test_a_study_reads_as_optuna_reads_it(actions: list[tuple[int, str]], delete: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optuna.journal"
        opened = storage(path)
        studies = [
            optuna.create_study(study_name=STUDY_NAME, storage=opened, directions=["maximize"] * 2),
            optuna.create_study(study_name="other", storage=opened),
        ]
        running: list[list[optuna.Trial]] = [[], []]
        for position, (which, action) in enumerate(actions):
            study, values = studies[which], [position / 7, float("inf")][: 2 - which]
            if action == "ask":
                running[which].append(study.ask())
                running[which][-1].suggest_float("x", 0, 1)
            elif action == "queue":
                study.enqueue_trial({"x": 0.5}, user_attrs={"role": "baseline"})
            elif action == "add":
                study.add_trial(optuna.trial.create_trial(values=values, user_attrs={"position": position}))
            elif running[which]:
                trial = running[which][0]
                if action == "attr":
                    trial.set_user_attr("note", {"text": 'a "{\\"op_code\\":4,"\n', "position": position})
                    continue
                running[which].pop(0)
                if action == "complete":
                    study.tell(trial, values)
                else:
                    study.tell(trial, state=TrialState.FAIL if action == "fail" else TrialState.PRUNED)
        if delete:
            optuna.delete_study(study_name="other", storage=opened)
        with no_warning():
            assert facts(path) == as_optuna_reads(path)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a journal with five trials, one after the other."""
    path = tmp_path_factory.mktemp("journal") / "optuna.journal"
    study = optuna.create_study(study_name=STUDY_NAME, storage=storage(path), directions=["maximize"] * 2)
    for number in range(5):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        trial.set_user_attr("row", {"accuracy": number / 5, "stop_events": "[]"})
        study.tell(trial, [number / 5, 0.5])
    return path.read_bytes().splitlines(keepends=True)


def damaged(path: Path, content: bytes, *numbers: int) -> Facts:
    """What is read of a damaged journal; lines of these numbers are said to be."""
    path.write_bytes(content)
    said = f"line{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
    with pytest.warns(UserWarning, match=rf"^{path}: damaged and left out: {said}$") as caught:
        found = facts(path)
    assert len(caught) == 1
    return found


def test_a_journal_cut_anywhere_reads_as_far_as_optuna_reads_it(tmp_path: Path, lines: list[bytes]) -> None:
    whole = 0
    for number, line in enumerate(lines, start=1):
        for kept in (0, 1, len(line) // 2, len(line) - 2):
            path = tmp_path / "cut.journal"
            content = b"".join(lines)[: whole + kept]
            path.write_bytes(content)
            assert torn_end(path) == (whole if kept else None)
            if number > 1:  # else there is no study yet
                with no_warning():
                    assert facts(path) == as_optuna_reads(path)
        whole += len(line)


def test_damage_in_the_middle_costs_what_that_line_said(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "optuna.journal"
    path.write_bytes(b"".join(lines))
    whole = as_optuna_reads(path)
    for number, line in enumerate(lines, start=1):
        rest = line[:40] + b"\x00\xff" * 5 + b"\n"
        found = damaged(path, b"".join([*lines[: number - 1], rest, *lines[number:]]), number)
        with pytest.raises(ValueError, match=r".+"):  # Optuna gives up
            as_optuna_reads(path)
        operation = json.loads(line)
        trial = operation.get("trial_id")
        assert [number for number, *_ in found] == [0, 1, 2, 3, 4]
        for expected, got in zip(whole, found, strict=True):
            if expected[0] != trial:
                assert got == expected
        if trial is not None:
            assert (found[trial] == whole[trial]) == (operation["op_code"] == 5)  # parameters are not read
        # A line that does not even tell whether it created a trial might change the numbers of others.
        path.write_bytes(b"".join([*lines[: number - 1], b"\x00\xff" * 5 + b"\n", *lines[number:]]))
        with pytest.raises(UserError, match=rf"is damaged: nothing tells what its line {number} was; restore it from"):
            read_study(path)


def test_what_is_said_of_a_trial_after_its_end_is_void(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    opened = storage(path)
    study = optuna.create_study(study_name=STUDY_NAME, storage=opened)
    trial = study.ask()
    study.tell(trial, 0.5)
    size = path.stat().st_size
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        opened.set_trial_user_attr(trial._trial_id, "late", True)
    assert path.stat().st_size > size  # written, and then refused
    assert facts(path) == as_optuna_reads(path) == [(0, "COMPLETE", {}, [0.5])]


def test_a_line_appended_to_a_torn_one_is_read(tmp_path: Path, lines: list[bytes]) -> None:
    # Optuna 5 leaves this after a crash in the middle of a line, and cannot read it any more.
    trial = [i for i, line in enumerate(lines) if b'"trial_id":4' in line]
    joined = [*lines[: trial[0]], lines[trial[0]][:50] + lines[trial[1]], *lines[trial[1] + 1 :]]
    found = damaged(tmp_path / "optuna.journal", b"".join(joined), trial[0] + 1)
    assert found[4] == (4, "COMPLETE", {"row": {"accuracy": 0.8, "stop_events": "[]"}}, [0.8, 0.5])


def test_after_a_cut_at_the_torn_end_optuna_goes_on(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "optuna.journal"
    path.write_bytes(b"".join(lines) + b'{"op_code":4,"worker')
    with pytest.raises(AttributeError):  # should this fail, Optuna reads on by itself and `torn_end` may go
        optuna.load_study(study_name=STUDY_NAME, storage=storage(path)).ask()
    path.write_bytes(b"".join(lines) + b'{"op_code":4,"worker')
    end = torn_end(path)
    assert end is not None
    os.truncate(path, end)
    assert optuna.load_study(study_name=STUDY_NAME, storage=storage(path)).ask().number == 5


def test_a_journal_without_a_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    path.touch()
    with pytest.raises(UserError, match="holds no study of a search of tune_cac"):
        read_study(path)
    optuna.create_study(study_name="mine", storage=storage(path))
    with pytest.raises(UserError, match="or it is of another program, for optuna"):
        read_study(path)
    with pytest.raises(UserError, match=r"^the journal .* cannot be read: Is a directory$"):
        read_study(tmp_path)
