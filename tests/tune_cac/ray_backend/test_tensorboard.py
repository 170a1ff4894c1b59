"""Files of events as TensorBoard reads them: framing and checksums read here by a reader of our own."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event

from tune_cac.ray_backend.tensorboard import RowEvents


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit (RFC 3720, B.4)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events_in(folder: Path) -> list[Event]:
    [file] = folder.glob("events.out.tfevents.*")
    data, found = file.read_bytes(), []
    while data:
        header, (check,) = data[:8], struct.unpack("<I", data[8:12])
        assert check == masked(crc32c(header))
        (length,) = struct.unpack("<Q", header)
        record = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(crc32c(record)),)
        found.append(Event.FromString(record))
        data = data[16 + length :]
    return found


class FakeTrial(SimpleNamespace):
    __hash__ = object.__hash__

    def init_local_path(self) -> None:
        Path(self.local_path).mkdir(exist_ok=True)


@pytest.mark.slow
def test_a_row_is_one_event_and_hyperparameters_come_last(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the published check value
    trial = FakeTrial(local_path=str(tmp_path / "trial"), evaluated_params={"config/epochs": 2, "config/x": None})
    logger = RowEvents()
    for number in (1, 2):
        logger.log_trial_result(
            number,
            trial,
            {"quality": number / 4, "step": 10 * number, "stop_events": "[]", "learning_rate": float("nan"),
             "test_quality": None, "training_iteration": number},
        )  # fmt: skip
    version, *rows = events_in(tmp_path / "trial")  # readable while the trial runs
    assert version.file_version == "brain.Event:2"
    assert [row.step for row in rows] == [1, 2]
    values = [{value.tag: value.simple_value for value in row.summary.value} for row in rows]
    assert values[1] == {"ray/tune/accuracy": pytest.approx(0.5), "ray/tune/step": 20}
    logger.log_trial_end(trial)
    tags = [value.tag for event in events_in(tmp_path / "trial")[3:] for value in event.summary.value]
    assert "_hparams_/session_start_info" in tags
