"""The trial's vocabulary: config and metrics."""

from __future__ import annotations

import pytest

from trainables.config import TrialConfig, field_kinds, field_names
from trainables.errors import UserError
from trainables.gradskip import VARIABLES
from trainables.metrics import METRICS, RELATIVE, ROW


def test_gradient_skip_fields_are_the_variables_themselves() -> None:
    kinds = field_kinds()
    assert [name for name in field_names() if name.startswith("CAC_")] == [v.name for v in VARIABLES]
    assert {v.name: kinds[v.name] for v in VARIABLES} == {v.name: v.kind for v in VARIABLES}


def test_survives_plain_types() -> None:
    config = TrialConfig(CAC_STOP_LAYER_NUM=(1, 2), CAC_STOP_LAYER_ITR=(3, 4), seed=5)
    plain = config.to_dict()
    assert plain["CAC_STOP_LAYER_NUM"] == [1, 2]
    assert TrialConfig.from_mapping(plain) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": "digit"}, "unknown workload 'digit': did you mean 'digits'? Valid: binary_mlp, digits"),
        ({"method": "gradskp"}, "unknown method 'gradskp': did you mean 'gradskip'? Valid: "),
        ({"epochs": 0}, "epochs must be an integer >= 1, got 0"),
        ({"epochs": 2.0}, "epochs must be an integer >= 1, got 2.0"),
        ({"seed": -1}, "seed must be an integer in [0, 4294967295], got -1"),
        ({"threads": 0}, "threads must be an integer >= 1, got 0"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"CAC_VAR_START_THR": 1.5}, "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 1.5"),
        ({"CAC_VAR_STRT_THR": 0.9}, "unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'? Valid: "),
        ({"epoch": 2}, "unknown setting 'epoch': did you mean 'epochs'? Valid: "),
    ],
)  # fmt: skip
def test_errors_state_rule_value_and_way_out(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TrialConfig.from_mapping(values)
    assert str(caught.value).startswith(message)


def test_every_column_has_meaning_type_and_direction() -> None:
    assert len(METRICS) == len(ROW) - 1 + len(RELATIVE)  # further metrics have columns of their own names
    for metric in METRICS.values():
        assert metric.meaning
        assert metric.dtype in ("int64", "float64", "string", "Int64")
        assert metric.dtype != "Int64" or metric.may_lack
        assert metric.direction in ("", "min", "max")
        for ending, unit in (("_s", "seconds"), ("_bytes", "bytes"), ("_flops", "FLOPs"), ("_saved", "fraction")):
            if metric.name.endswith(ending):
                assert metric.unit == unit
    assert METRICS["accuracy"].direction == METRICS["compute_saved"].direction == "max"
