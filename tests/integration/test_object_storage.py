"""Searches whose results are in object storage: a real S3 server, two nodes without a common study folder."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from commands_run import Run, run_here
from runs import assert_equals_alone
from studies import write_study

import analysis
from trainables.errors import DiskError, UserError
from trainables.storage import ObjectFiles, files_of, joined
from tune_cac.ray_backend.session import check_seen_by_all, ray_session, seen_from
from tune_cac.study import object_storage
from tune_cac.study.object_storage import copied_to_storage, fetch_study
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning.run import trials_at_a_time

pytestmark = pytest.mark.slow

SEARCH = ("search", "--trials", "4", "--epochs", "20", "--no-controls", "--name", "s", "--checkpoint-every", "0")


@pytest.mark.thorough
def test_trials_on_two_nodes_share_training_and_the_study_comes_back(
    two_nodes: str, s3: str, tune_cac_command: Run, tmp_path: Path
) -> None:
    study, here = str(joined(s3, "s")), tmp_path / "results" / "s"
    done = tune_cac_command(*SEARCH, "--address", two_nodes, "--results", s3, "--concurrency", "2")
    assert done.returncode == 0, done.stderr
    trials = analysis.load(here)
    assert trials["status"].tolist() == ["completed"] * 4
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    assert trials["search_flops"].sum() < trials["executed_flops"].sum()
    assert not (here / "tree").exists()
    there = {file.name: file.bytes for file in files_of(study).scan("")}
    for name in ("study.json", "optuna.journal", "best.env", "trials.parquet"):
        assert there[name] == (here / name).stat().st_size
    assert any(name.startswith("tree/checkpoints/") for name in there)
    assert any(name.startswith("ray/run-000/trial-00001/result.json") for name in there)
    assert not any(name.endswith(".lock") for name in there)
    # From another machine: everything comes back by the URI, and the search goes on where it was.
    shutil.rmtree(tmp_path / "results")
    ranked = tune_cac_command("report", study)
    assert ranked.returncode == 0, ranked.stderr
    assert "baseline" in ranked.stdout
    replayed = tune_cac_command("replay", "s", "--set", "CAC_VAR_START_THR=0.9")
    assert replayed.returncode == 0, replayed.stderr
    more = tune_cac_command(*SEARCH, "--results", s3, "--concurrency", "1")
    assert more.returncode == 0, more.stderr
    trials = analysis.load(here)
    assert trials["status"].tolist() == ["completed"] * 8
    assert_equals_alone(trials.iloc[-1])
    assert files_of(study).size("optuna.journal") == (here / "optuna.journal").stat().st_size


@pytest.mark.thorough
def test_a_search_that_was_killed_goes_on_from_storage(s3: str, tune_cac_command: Run, tmp_path: Path) -> None:
    """Without sharing, so that the trial itself keeps checkpoints in storage."""
    study, here = str(joined(s3, "s")), tmp_path / "results" / "s"
    code = """
import sys
import tune_cac.study.object_storage as object_storage
from tune_cac.cli.main import main
object_storage.COPY_S = 0.5
sys.exit(main(sys.argv[1:]))
"""
    command = [*SEARCH, *f"--results {s3} --concurrency 1 --no-sharing --epochs 12 --trials 3 --seeds 1".split()]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    files = files_of(study)
    try:
        deadline = time.monotonic() + 240  # only ends a hanging test
        while not any("checkpoint_" in file.name for file in files.scan("ray")):
            assert process.poll() is None
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    before = analysis_rows(here)
    shutil.rmtree(tmp_path / "results")
    done = tune_cac_command("search", "--resume", study, "--concurrency", "2")
    assert done.returncode == 0, done.stderr
    trials = analysis.load(here)
    assert (trials["status"] == "completed").sum() == 3
    finished = {row["trial"]: row["accuracy"] for row in before}
    assert finished.items() <= dict(zip(trials["trial"], trials["accuracy"], strict=True)).items()
    for _, row in trials[trials["status"] == "completed"].iterrows():
        assert_equals_alone(row)


def analysis_rows(study: Path) -> list[dict[str, Any]]:
    trials = analysis.load(study)
    return trials[trials["status"] == "completed"].to_dict("records")


@pytest.mark.thorough
def test_storage_that_cannot_be_used_is_one_line(s3: str, tune_cac_command: Run, tmp_path: Path) -> None:
    for place, message in (
        ("s3://no-such-bucket/x", "--results must be storage that can be written, got s3://no-such-bucket/x/s ("),
        ("s3://key:secret@bucket/x", "--results must have no credentials in it, got s3://...@bucket/x"),
        ("foo://bucket/x", "storage must be a URI that pyarrow can open"),
    ):
        done = tune_cac_command(*SEARCH, "--results", place)
        assert done.returncode == 2
        assert message in done.stderr
        assert "secret@" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = tune_cac_command("report", f"{s3}/none")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no study at s3://" in done.stderr
    files_of(f"{s3}/s").write("study.json", [b"{}"])
    files_of(f"{s3}/s").write("../../escaped", [b"x"])
    done = tune_cac_command("report", f"{s3}/s")
    assert done.returncode == 2
    assert not list(tmp_path.glob("**/escaped"))


SCRIPT = """
import json, os, pathlib
trained = float(os.environ["CAC_VAR_START_THR"])
pathlib.Path(os.environ["TUNE_CAC_TRIAL_DIR"], "weights.txt").write_text(str(trained))
print("training")
print(json.dumps({"accuracy": 0.9, "step": 40, "compute_saved": 0.0 if trained < 0 else 0.25}))
"""


@pytest.fixture(scope="module")
def ray_here(s3_environment: dict[str, str]) -> Iterator[None]:
    """One cluster for the searches of this process, whose workers can reach the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        with ray_session(cpus=2):
            yield


@pytest.mark.thorough
def test_scripts_and_confirmations(ray_here: None, s3: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script = f"{sys.executable} train.py {{CAC_VAR_START_THR}}"
    done = run_here(
        tmp_path, "search", "--script", script, "--trials", "3", "--name", "s", "--results", s3, "--concurrency", "1"
    )
    assert done.returncode == 0, done.stderr
    files = files_of(joined(s3, "s"))
    assert files.read("ray/run-000/trial-00000/weights.txt") == b"-1.0"
    assert b"training" in files.read("ray/run-000/trial-00001/output.log")
    shutil.rmtree(tmp_path / "results")
    done = run_here(tmp_path, "confirm", "s", "--results", s3, "--top", "1", "--seeds", "3")
    assert done.returncode == 0, done.stderr
    assert "s/confirmation" in done.stderr
    assert (analysis.load(tmp_path / "results" / "s" / "confirmation")["status"] == "completed").sum() == 6
    assert files.size("confirmation/optuna.journal")
    assert files.read("confirmation/ray/run-000/trial-00000/weights.txt") == b"-1.0"


@pytest.mark.thorough
def test_nodes_that_do_not_see_the_results_are_named_before_training(ray_here: None, s3: str, tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [])
    check_seen_by_all(layout)
    layout.write_info(replace(layout.read_info(), storage=s3))
    check_seen_by_all(layout)
    layout.write_info(replace(layout.read_info(), storage="s3://no-such-bucket/x"))
    with pytest.raises(UserError, match=r"every node can write, got s3://no-such-bucket/x, which [0-9.]+ cannot \("):
        check_seen_by_all(layout)
    assert [why for _, why in seen_from(ray.nodes(), str(tmp_path / "missing"))] == ["no such file"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, 2), ({"cpus_per_trial": 2}, 1), ({"concurrency": 5}, 5), ({"address": None}, 7)],
    ids=["processors", "two each", "given", "here"],
)
def test_a_cluster_takes_as_many_trials_as_its_nodes_have_room_for(
    given: dict[str, Any], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tune_cac.study.search_options.processors", lambda: 7)  # of the machine that searches
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    assert trials_at_a_time(SearchOptions(**{"address": "10.0.0.1:6379", **given})) == wanted
    assert trials_at_a_time(SearchOptions(address="10.0.0.1:6379", gpus_per_trial=0.5)) == 2
    assert trials_at_a_time(SearchOptions(address="10.0.0.1:6379", gpus_per_trial=1.0)) == 1


def test_a_study_that_is_searched_elsewhere_is_left_alone(s3: str, tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [])
    layout.write_info(replace(layout.read_info(), storage=s3))
    with copied_to_storage(layout):
        files = files_of(s3)
        holder = json.loads(files.read("search.lock"))
        assert holder["process"] == os.getpid()
        assert files.size("study.json")
    assert files.size("search.lock") is None
    files.write("search.lock", [json.dumps({"host": "other", "process": 7, "at": time.time()}).encode()])
    with pytest.raises(UserError, match=r"is being searched on other, process 7: wait for it, or [89][0-9] s if it"):
        copied_to_storage(layout).__enter__()
    files.write("search.lock", [json.dumps({"host": "other", "process": 7, "at": time.time() - 91}).encode()])
    with copied_to_storage(layout):
        layout.journal.write_text("further here")
    # What was searched on in two places is not mixed.
    files.write("optuna.journal", [b"further there"])
    with pytest.raises(UserError, match="were both searched on: move"):
        fetch_study(s3, layout)
    files.write("optuna.journal", [b"further here, and there"])
    assert fetch_study(s3, layout)
    assert layout.journal.read_text() == "further here, and there"
    other = write_study(tmp_path / "other", [])
    with pytest.raises(UserError, match="holds another study than"):
        fetch_study(s3, other)


def test_storage_that_fails_for_a_while_only_delays_the_copy(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = write_study(tmp_path / "s", [])
    layout.write_info(replace(layout.read_info(), storage=s3))
    monkeypatch.setattr(object_storage, "COPY_S", 0.05)
    real, fails = ObjectFiles.write, threading.Event()

    def write(self: ObjectFiles, name: str, parts: Any) -> None:
        if fails.is_set():
            raise OSError("AWS Error SLOW_DOWN")
        real(self, name, parts)

    monkeypatch.setattr(ObjectFiles, "write", write)
    said: queue.Queue[str] = queue.Queue()  # capsys loses what another thread writes while it is read
    monkeypatch.setattr(object_storage, "say", said.put)
    with copied_to_storage(layout):
        fails.set()
        layout.report.write_text("a report")
        assert "cannot be written (AWS Error SLOW_DOWN): the search tries again" in said.get(timeout=60)
        fails.clear()
        assert "can be written again" in said.get(timeout=60)
    assert files_of(s3).read("report.md") == b"a report"
    copying = copied_to_storage(layout)
    copying.__enter__()
    fails.set()
    layout.report.write_text("another report")
    with pytest.raises(DiskError, match=r"the study is whole in .*; once it can, python -m tune_cac search --resume"):
        copying.__exit__(None, None, None)
