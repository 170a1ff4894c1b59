"""What a line of a script's output reports, and the way back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.errors import UserError
from trainables.script.report_lines import NUMBERS, ReportError, format_report, read_report

FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize(
    "line",
    [
        "", "accuracy: 0.91", '["accuracy"]', '{"loss": 0.3}', '{"Accuracy": 0.3}', '{"accuracy": 0.3',
        '{"accuracy": 0.3} done', '{"accuracy": 0.3}{"accuracy": 0.4}', "{'accuracy': 0.3}", "\ufffd\x00{\udcff}",
        "{" * 100_000 + "}" * 100_000, '{"accuracy":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)  # fmt: skip
def test_anything_else_is_no_report(line: str) -> None:
    assert read_report(line) is None


def test_known_keys_stand_at_the_top_and_others_under_extra() -> None:
    line = '  {"lr": 0.1, "step": 20, "accuracy": 0.5, "gradskip": {"events": []}, "note": "a", "extra": 1}\r\n'
    assert read_report(line) == {
        "accuracy": 0.5,
        "step": 20,
        "gradskip": {"events": []},
        "extra": {"lr": 0.1, "note": "a", "extra": 1},
    }
    assert read_report('{"tune_cac": 1, "loss": 2.5}') == {"loss": 2.5}
    assert read_report('{"tune_cac": null}') == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"accuracy": "high"}', "accuracy must be a number, got 'high'"),
        ('{"accuracy": true}', "accuracy must be a number, got True"),
        ('{"accuracy": 1, "loss": [1]}', "loss must be a number, got [1]"),
        ('{"tune_cac": 1, "step": "3"}', "step must be a number, got '3'"),
        ('{"accuracy": 1, "step": NaN}', "step must be a finite number, got nan"),
        ('{"accuracy": 1, "dense_flops": 1e999}', "dense_flops must be a finite number, got inf"),
        ('{"accuracy": 1, "compute_saved": NaN}', "compute_saved must be a finite number, got nan"),
        ('{"accuracy": 1, "gradskip": 3}', "gradskip must be an object, got 3"),
    ],
)
def test_a_value_of_the_wrong_kind(line: str, message: str) -> None:
    with pytest.raises(ReportError) as caught:
        read_report(line)
    assert str(caught.value) == message
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.fixed_dictionaries({"accuracy": st.floats(allow_nan=False)}, optional=dict.fromkeys(NUMBERS[1:], FINITE)),
    st.dictionaries(st.sampled_from(["lr", "note", "more"]), JSON.filter(lambda value: value == value), max_size=3),
)
def test_what_is_written_is_read(known: dict[str, Any], others: dict[str, Any]) -> None:
    line = format_report(**others, **known)
    assert "\n" not in line
    assert line.isascii()
    assert repr(read_report(line)) == repr(
        {key: known[key] for key in NUMBERS if key in known} | ({"extra": others} if others else {})
    )


@pytest.mark.parametrize(
    "scalar", [np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor([0.25])]
)
def test_scalars_of_numpy_and_torch(scalar: Any) -> None:
    assert format_report(accuracy=scalar, losses=[scalar, {"b": scalar}]) == (
        '{"accuracy": 0.25, "losses": [0.25, {"b": 0.25}]}'
    )
    assert format_report(accuracy=1, step=np.int64(7)) == '{"accuracy": 1, "step": 7}'


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accuracy": "0.9"}, "accuracy must be a number, got '0.9'"),
        ({"accuracy": np.bool_(True)}, "accuracy must be a number, got True"),
        ({"accuracy": torch.tensor([0.5, 0.25])}, "accuracy must be a number, got tensor([0.5000, 0.2500])"),
        ({"accuracy": 1, "step": math.inf}, "step must be a finite number, got inf"),
        ({"accuracy": 1, "gradskip": [1]}, "gradskip must be an object, got [1]"),
        ({"accuracy": 1, "model": {1, 2}}, "model must be a value that JSON can hold, got {1, 2}"),
        ({"accuracy": 1, "kernel": np.arange(2)}, "kernel must be a value that JSON can hold, got array([0, 1])"),
    ],
)
def test_what_cannot_be_reported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError) as caught:
        format_report(**values)
    assert str(caught.value) == message
