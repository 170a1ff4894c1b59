"""Searches whose results are in object storage: a real S3 server, two nodes without a common study folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands_run import Run
from runs import assert_equals_alone

import analysis
from trainables.storage import files_of, joined

pytestmark = pytest.mark.slow

SEARCH = ("search", "--trials", "4", "--epochs", "8", "--no-controls", "--name", "s", "--checkpoint-every", "0")


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
    assert any(name.startswith("tree/objects/") for name in there)
    assert any(name.startswith("ray/run-000/trial-00001/result.json") for name in there)
    assert not any(name.endswith(".lock") for name in there)
    # From another machine: everything comes back by the URI, and the search goes on where it was.
    shutil.rmtree(tmp_path / "results")
    ranked = tune_cac_command("rank", study)
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
    command = [*SEARCH, "--results", s3, "--concurrency", "1", "--no-sharing", "--epochs", "25", "--trials", "3"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    files = files_of(study)
    try:
        while not any("checkpoint_" in file.name for file in files.scan("ray")):
            assert process.poll() is None
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
    done = tune_cac_command("rank", f"{s3}/none")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no study at s3://" in done.stderr
    files_of(f"{s3}/s").write("study.json", [b"{}"])
    files_of(f"{s3}/s").write("../../escaped", [b"x"])
    done = tune_cac_command("rank", f"{s3}/s")
    assert done.returncode == 2
    assert not list(tmp_path.glob("**/escaped"))
