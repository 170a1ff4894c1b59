"""The variance trace as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conv_models import conv_model
from loops import equal, train, weights

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings, record, variance_recorder, wrap

SETTINGS = Settings(start_itr=4, samples=2, start_thr=1.0, slope_thr=1.0, mt_thr=1.0)


def test_holds_every_watched_layers_variance_at_the_interval(tmp_path: Path) -> None:
    model = conv_model()
    optimizer = SGD(model.named_parameters(), lr=0.02, weight_decay=2.0, settings=SETTINGS)
    # A step begins with the weights that the step before left.
    variances: list[list[float]] = []

    def measure(_: int) -> None:
        variances.append([float(p.detach().double().var()) for p in model.parameters() if p.dim() == 4])

    measure(-1)
    with record(optimizer, tmp_path / "deep" / "variances.parquet", every=3) as recorder:
        train(model, optimizer, 10, each=measure)
    frame = pd.read_parquet(recorder.path)
    assert list(frame.columns) == ["iteration", "layer", "name", "variance"]
    assert str(frame.dtypes["iteration"]) == str(frame.dtypes["layer"]) == "int64"
    assert frame["iteration"].tolist() == [i for i in (0, 3, 6, 9) for _ in range(3)]
    assert frame["layer"].tolist() == [0, 4, 7] * 4
    assert frame["name"].tolist() == ["0.weight", "3.weight", "6.weight"] * 4
    expected = [variances[i][k] for i in (0, 3, 6, 9) for k in range(3)]
    assert frame["variance"].tolist() == pytest.approx(expected, rel=1e-5)
    assert list(recorder.path.parent.iterdir()) == [recorder.path]  # no temporary file is left


def test_does_not_touch_training_and_stops_at_close(tmp_path: Path) -> None:
    recorded, plain = conv_model(), conv_model()
    ours = SGD(recorded.parameters(), lr=0.02, weight_decay=2.0, settings=SETTINGS)
    recorder = record(ours, tmp_path / "v.parquet", every=1)
    train(recorded, ours, 6)
    recorder.close()
    train(recorded, ours, 4, start=6)
    theirs = SGD(plain.parameters(), lr=0.02, weight_decay=2.0, settings=SETTINGS)
    train(plain, theirs, 10)
    assert equal(weights(recorded), weights(plain))
    assert ours.gradskip.events == theirs.gradskip.events
    assert pd.read_parquet(recorder.path)["iteration"].max() == 5


def test_a_record_begun_before_the_state_is_loaded_goes_on_with_the_file(tmp_path: Path) -> None:
    model = conv_model()
    path = tmp_path / "v.parquet"
    optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(start_itr=10**6))
    with record(optimizer, path, every=2):
        train(model, optimizer, 6)
    resumed = SGD(model.parameters(), lr=0.1, settings=Settings(start_itr=10**6))
    with record(resumed, path, every=2):
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, 4, start=6)
    assert sorted(set(pd.read_parquet(path)["iteration"])) == [0, 2, 4, 6, 8]


def test_long_traces_are_written_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variance_recorder, "ROWS_BETWEEN_WRITES", 6)
    model = conv_model()
    optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(start_itr=10**6))
    recorder = record(optimizer, tmp_path / "v.parquet", every=1)
    train(model, optimizer, 5)
    assert pd.read_parquet(recorder.path)["iteration"].tolist() == [i for i in range(4) for _ in range(3)]
    recorder.close()
    assert len(pd.read_parquet(recorder.path)) == 15


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_none(every: Any, tmp_path: Path) -> None:
    optimizer = wrap(torch.optim.Adam(conv_model().parameters()), Settings(start_thr=-1))
    with pytest.raises(UserError, match=f"every must be an integer >= 1, got {every}"):
        record(optimizer, tmp_path / "v.parquet", every=every)


def test_an_optimizer_without_gradient_skip(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="record follows an optimizer with Gradient-Skip, got Adam without"):
        record(torch.optim.Adam(conv_model().parameters()), tmp_path / "v.parquet")
