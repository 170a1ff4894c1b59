"""Files of events as TensorBoard reads them."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event

from tune_cac.ray_backend.tensorboard import RowEvents


def events_in(folder: Path) -> list[Event]:
    """Length, its checksum, the event, its checksum: as TensorFlow frames records."""
    [file] = folder.glob("events.out.tfevents.*")
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


class FakeTrial(SimpleNamespace):
    __hash__ = object.__hash__

    def init_local_path(self) -> None:
        Path(self.local_path).mkdir(exist_ok=True)


def test_a_row_is_one_event_and_hyperparameters_come_last(tmp_path: Path) -> None:
    given = {"config/epochs": 2, "config/x": None}
    trial = FakeTrial(local_path=str(tmp_path / "trial"), evaluated_params=given, config={"config": {}})
    logger = RowEvents()
    for number in (1, 2):
        logger.log_trial_result(
            number,
            trial,
            {"quality": number / 4, "step": 10 * number, "stop_events": "[]", "learning_rate": float("nan"),
             "test_quality": None, "training_iteration": number},
        )  # fmt: skip
    logger.log_trial_end(trial)
    _, *rows, first, second, third = events_in(tmp_path / "trial")
    assert [row.step for row in rows] == [1, 2]
    values = [{value.tag: value.simple_value for value in row.summary.value} for row in rows]
    assert values[1] == {"ray/tune/accuracy": pytest.approx(0.5), "ray/tune/step": 20}
    tags = [value.tag for event in (first, second, third) for value in event.summary.value]
    assert "_hparams_/session_start_info" in tags
