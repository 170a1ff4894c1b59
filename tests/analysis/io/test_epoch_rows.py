"""Rows of every epoch, from Ray's files beside a real journal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from ray_files import write_trial
from studies import result_row, write_study

from analysis.io.studies import history
from analysis.io.study_files import Layout
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.metrics import row_metrics

NAMES = list(row_metrics())
DENSE = TrialConfig(method="none", epochs=4).to_dict()
SKIPS = TrialConfig(method="gradskip", epochs=4).to_dict()


def row(epoch: int, accuracy: float, **columns: Any) -> dict[str, Any]:
    return result_row(accuracy, epoch=epoch, **columns)


def epochs(frame: pd.DataFrame, trial: int) -> dict[int, float]:
    """Accuracy by epoch."""
    of_trial = frame[frame["trial"] == trial]
    assert of_trial["epoch"].is_unique
    assert of_trial["epoch"].is_monotonic_increasing
    return dict(zip(of_trial["epoch"], of_trial["accuracy"], strict=True))


def folder(layout: Layout, run: int, trial: int) -> Path:
    return layout.ray / f"run-{run:03d}" / f"trial-{trial:05d}"


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """Trial 1 is interrupted after epoch 2, goes on as 2 from its checkpoint, as 4 from the next; 3 has no rows yet."""
    layout = write_study(
        tmp_path / "s",
        [
            {"row": result_row()},
            {"continued_by": "a later trial"},
            {"continued_by": "a later trial"},
            {"role": "published"},
            {"row": result_row()},
        ],
    )

    def write(run: int, trial: int, accuracies: dict[int, float], source: Path | None = None) -> Path:
        # Absolute, as the search writes it, from before the study moved.
        resume = None if source is None else f"/elsewhere/{source.parent.name}/{source.name}/checkpoint_000001"
        config = {"config": SKIPS if trial else DENSE, "trial": trial, "resume_from": resume}
        return write_trial(folder(layout, run, trial), config, [row(e, a) for e, a in accuracies.items()])

    write(0, 0, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    first = write(0, 1, {1: 0.11, 2: 0.12})
    second = write(1, 2, {2: 0.22, 3: 0.23}, first)  # the checkpoint was of epoch 1
    write(1, 3, {})
    write(2, 4, {4: 0.44}, second)
    return layout


def test_one_row_an_epoch_and_trial(study: Layout) -> None:
    frame = history(study.root)
    assert list(frame.columns) == ["trial", "role", *NAMES]
    assert frame[["trial", "epoch"]].to_records(index=False).tolist() == sorted(
        [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3), (4, 4)]
    )
    assert frame.groupby("trial")["role"].first().tolist() == ["baseline", "search", "search", "search"]
    for metric in row_metrics().values():
        assert str(frame[metric.name].dtype) == metric.dtype
    assert set(frame.attrs["columns"]) == set(NAMES)
    assert epochs(frame, 0) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}


def test_a_continued_trial_has_the_epochs_before_its_checkpoint(study: Layout) -> None:
    frame = history(study.root)
    assert epochs(frame, 1) == {1: 0.11, 2: 0.12}
    assert epochs(frame, 2) == {1: 0.11, 2: 0.22, 3: 0.23}
    assert epochs(frame, 4) == {1: 0.11, 2: 0.22, 3: 0.23, 4: 0.44}


def test_a_torn_last_line_is_left_out(study: Layout) -> None:
    path = folder(study, 0, 0) / "result.json"
    content = path.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n")
    for cut in (last + 2, (last + len(content)) // 2, len(content) - 2):
        path.write_bytes(content[:cut])
        assert list(epochs(history(study.root), 0)) == [1, 2, 3]
    path.write_bytes(content[: last // 2])
    assert list(epochs(history(study.root), 0)) == [1]
    path.write_bytes(b"7\n\xff\xfe\n{}\n" + content)
    assert list(epochs(history(study.root), 0)) == [1, 2, 3, 4]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "t", [{"row": result_row()}])
    rows = [
        row(1, math.nan, train_loss=math.inf, learning_rate=-math.inf, test_accuracy=None),
        row(2, 0.5, train_loss=np.float64("nan"), gradient_bytes=None, wall_time_s=np.float32("nan")),
        row(3, 0.5, step=np.int64(7), train_time_s=np.float32(0.5)),
    ]
    path = write_trial(folder(layout, 0, 0), {"config": DENSE, "trial": 0}, rows)
    raw = (path / "result.json").read_text()
    assert "NaN" in raw  # what Ray writes is no JSON by the letter
    assert "-Infinity" in raw
    assert '"null"' in raw
    frame = history(layout.root)
    assert frame["train_loss"].tolist()[:1] == [math.inf]
    assert frame["learning_rate"].tolist()[:1] == [-math.inf]
    missing = frame[["accuracy", "test_accuracy", "train_loss", "gradient_bytes", "wall_time_s"]].isna()
    assert missing.to_numpy().tolist() == [
        [True, True, False, False, False],
        [False, False, True, True, True],
        [False] * 5,
    ]
    assert (frame["step"].iloc[2], frame["train_time_s"].iloc[2]) == (7, 0.5)
    assert str(frame["gradient_bytes"].dtype) == "Int64"


def test_what_has_no_epochs_is_said(study: Layout, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no study in "):
        history(tmp_path / "nowhere")
    study.journal.unlink()
    with pytest.raises(UserError, match=r"^the study has no journal"):
        history(study.root)
