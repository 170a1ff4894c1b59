"""The trial's vocabulary: config, and metrics, also those that a user names."""

from __future__ import annotations

import math

import pytest

from trainables.config import TrialConfig, field_kinds, field_names
from trainables.errors import UserError
from trainables.gradskip import VARIABLES
from trainables.metrics import METRICS, RELATIVE, ROW, check_metric, metrics_of, named_row
from trainables.quality import ACCURACY, Quality, quality_named, read_drop


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


LOSS = Quality(name="val_loss", direction="min", unit="nats")


@pytest.mark.parametrize(
    ("name", "direction"),
    [("val_loss", "min"), ("perplexity", "min"), ("test_rmse", "min"), ("f1", "max"), ("val_r2", "max")],
)
def test_the_direction_follows_from_well_known_names(name: str, direction: str) -> None:
    assert quality_named(name, None) == Quality(name=name, direction=direction, unit="")
    other = "max" if direction == "min" else "min"
    assert quality_named(name, other).direction == other  # the user knows better


@pytest.mark.parametrize(
    ("metric", "direction", "message"),
    [
        ("quux", None, "--direction must be given for the metric quux: min where smaller is better, max where larger"),
        ("quux", "up", "the direction of a metric must be min or max, got 'up'"),
        ("accuracy", "min", "--direction must be max for the metric accuracy, got min"),
        ("2fast", "min", "the metric must have a name of letters, .* got '2fast'"),
        ("a b", "min", "the metric must have a name of letters, .* got 'a b'"),
    ],
)
def test_what_is_no_metric_is_one_line(metric: str, direction: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        quality_named(metric, direction)


@pytest.mark.parametrize("name", ["train_loss", "epoch", "saved", "quality", "CAC_RULE", "seed", "rank", "status"])
def test_a_metric_does_not_take_another_columns_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is a column of results already, got {name}: rename it"):
        TrialConfig(metric=name, direction="min")
    check_metric(LOSS)


def test_the_workloads_own_metric_counts_unless_another_is_named() -> None:
    assert quality_named(None, None, own=LOSS) == LOSS
    assert quality_named("val_loss", None, own=LOSS) == LOSS  # with its unit
    assert quality_named("f1", None, own=LOSS).name == "f1"
    assert quality_named("accuracy", None, own=LOSS) == ACCURACY
    with pytest.raises(UserError, match="--metric-unit must be nats for the metric val_loss, got bits"):
        quality_named(None, None, "bits", own=LOSS)
    with pytest.raises(UserError, match="--direction must be min for the metric val_loss, got max"):
        quality_named(None, "max", own=LOSS)


@pytest.mark.parametrize(
    ("given", "quality", "expected"),
    [(0.01, ACCURACY, 0.01), ("0.5", LOSS, 0.5), (3, LOSS, 3.0), (" 2 % ", LOSS, "2%"), ("0.5%", ACCURACY, "0.5%")],
)
def test_an_allowed_drop_is_in_the_metrics_unit_or_relative(
    given: float | str, quality: Quality, expected: float | str
) -> None:
    assert read_drop(given, quality) == expected


@pytest.mark.parametrize(
    ("given", "quality", "message"),
    [
        (1.5, ACCURACY, r"the allowed accuracy loss must be a fraction in \[0, 1\), .* got 1.5"),
        (-0.1, LOSS, "the allowed drop in val_loss must be a number >= 0 in its unit, or such as 2% .* got -0.1"),
        (math.inf, LOSS, "the allowed drop in val_loss .* got inf"),
        ("two", LOSS, "the allowed drop in val_loss .* got two"),
        ("100%", LOSS, "the allowed drop in val_loss .* got 100%"),
        (True, LOSS, "the allowed drop in val_loss .* got True"),
    ],
)
def test_an_allowed_drop_out_of_range_is_one_line(given: float | str, quality: Quality, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_drop(given, quality)


def test_columns_are_named_like_the_metric() -> None:
    names = list(metrics_of(LOSS))
    assert len(names) == len(METRICS)
    assert {"val_loss", "test_val_loss", "val_loss_drop", "test_val_loss_drop"} <= set(names)
    assert not any("accuracy" in name for name in names)
    assert metrics_of(LOSS)["val_loss"].direction == "min" == metrics_of(LOSS)["val_loss_drop"].direction
    assert metrics_of() == METRICS


def test_a_row_gets_the_metrics_names_and_no_further_metric_hides_a_column() -> None:
    row = {
        "epoch": 2,
        "quality": 1.5,
        "test_quality": None,
        "further_metrics": '{"f1": 0.5, "epoch": 9, "val_loss": 7}',
    }
    assert named_row(row, LOSS) == {"epoch": 2, "val_loss": 1.5, "test_val_loss": None, "f1": 0.5}
    taken = '{"rank": 0, "status": 1, "trial": 9, "f1": 0.5}'  # names that tables of trials have
    assert named_row({"accuracy": 0.5, "further_metrics": taken}) == {"accuracy": 0.5, "f1": 0.5}
    accuracy = '{"accuracy": 0.9}'
    assert named_row({"quality": 1.5, "further_metrics": accuracy}, LOSS) == {"val_loss": 1.5, "accuracy": 0.9}
    assert named_row({"accuracy": 0.5, "further_metrics": "{damaged"}) == {"accuracy": 0.5}


def test_a_config_of_the_accuracy_is_as_before() -> None:
    assert not {"metric", "direction", "metric_unit"} & set(TrialConfig().to_dict())
    assert TrialConfig(**LOSS.fields()).quality == LOSS  # type: ignore[arg-type]
    assert ACCURACY.fields() == {}
