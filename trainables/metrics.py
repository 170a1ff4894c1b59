"""All result columns: meaning, unit, direction and type. Loads neither torch nor ray.

A trial reports one row per epoch with exactly the columns of `ROW`; analysis adds those of `RELATIVE`, relative to the
baseline of the same seed. Accuracies, accuracy losses and savings are fractions: 0.005 is half a percentage point.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainables.errors import UserError
from trainables.quality import ACCURACY, Quality


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One result column."""

    name: str
    dtype: str
    """pandas dtype."""
    unit: str
    """Unit in words; empty for counts and text."""
    direction: str
    """``max`` or ``min`` where larger or smaller is better, else empty."""
    meaning: str
    may_lack: bool = False
    """True if rows may have None, where it is not measured."""


def _m(name: str, dtype: str, unit: str, direction: str, meaning: str, *, may_lack: bool = False) -> Metric:
    return Metric(name=name, dtype=dtype, unit=unit, direction=direction, meaning=meaning, may_lack=may_lack)


#: Columns that a trial reports at the end of each epoch; counts are totals since the run's start.
ROW: tuple[Metric, ...] = (
    _m("epoch", "int64", "", "", "epochs trained"),
    _m("step", "int64", "", "", "optimizer steps executed"),
    _m("train_loss", "float64", "", "min", "mean loss over the epoch's samples"),
    _m("quality", "float64", "", "", "the study's metric on the validation split, which the search sees",
       may_lack=True),
    _m("test_quality", "float64", "", "", "the same on the test split, after the last epoch; only reports show it",
       may_lack=True),
    _m("further_metrics", "string", "", "", "JSON object: further metrics of the evaluation", may_lack=True),
    _m("compute_saved", "float64", "fraction", "max",
       "1 - executed / dense FLOPs over the full budget; steps not yet executed count as dense"),
    _m("backward_saved", "float64", "fraction", "max", "the same, of the backward FLOPs alone"),
    _m("executed_flops", "int64", "FLOPs", "min",
       "forward and backward FLOPs of the executed steps, as if the trial were trained alone"),
    _m("search_flops", "int64", "FLOPs", "min",
       "FLOPs that the search executed for this trial (search cost: over dense_flops); less than executed_flops where "
       "a stretch was known already"),
    _m("forward_flops", "int64", "FLOPs", "min", "forward FLOPs of the executed steps"),
    _m("backward_flops", "int64", "FLOPs", "min", "backward FLOPs of the executed steps"),
    _m("dense_flops", "int64", "FLOPs", "", "FLOPs of the full budget with nothing stopped"),
    _m("gradient_bytes", "int64", "bytes", "min", "gradients produced, which data-parallel training would send"),
    _m("optimizer_bytes", "int64", "bytes", "min", "parameters, gradients and state that the optimizer visited"),
    _m("train_time_s", "float64", "seconds", "min", "training steps, without evaluation"),
    _m("train_energy_j", "float64", "joules", "min",
       "energy of the whole card during training steps, where NVML tells it (nvidia-ml-py)", may_lack=True),
    _m("wall_time_s", "float64", "seconds", "min", "everything since the run was built"),
    _m("peak_memory_bytes", "int64", "bytes", "min", "peak resident memory of the process (CPU) or allocated (CUDA)"),
    _m("learning_rate", "float64", "", "", "scheduled learning rate after the epoch's last step"),
    _m("stage", "string", "", "", "the trial's stage in the tree: equal where the training was; empty without a tree"),
    _m("sparsity", "float64", "fraction", "max", "zero elements among the weights of convolutions and linear layers"),
    _m("structured_sparsity", "float64", "fraction", "max",
       "elements of those weights in filters, rows or channels that are zero as a whole"),
    _m("inference_saved", "float64", "fraction", "max",
       "1 - multiply-adds of the model now, zeros included / those of the model as it was built, for one sample"),
    _m("sparse_inference_saved", "float64", "fraction", "max",
       "the same, without multiplications by zero weights, which kernels for dense weights execute"),
    _m("dense_macs", "Int64", "multiply-adds", "min", "of one sample through the model as it is now, zeros included",
       may_lack=True),
    _m("effective_macs", "Int64", "multiply-adds", "min", "the same, of the non-zero weights alone", may_lack=True),
    _m("parameters", "Int64", "", "min", "parameters of the model as it is now, zeros included", may_lack=True),
    _m("latency_s", "float64", "seconds", "min",
       "median time of one sample through a model from which structures were removed, after the last epoch",
       may_lack=True),
    _m("layer_sparsity", "string", "", "", "JSON object: share of zeros by weight"),
    _m("effective_samples", "float64", "fraction", "max",
       "effective sample size of a batch over its size, under importance sampling", may_lack=True),
    _m("gradient_clusters", "string", "", "",
       "JSON list of the clusters of equal gradients after the last epoch: size, spread, examples"),
    _m("gradient_statistics", "string", "", "",
       "JSON list of the epoch's measurements of gradient statistics: step, estimator, cost, total, layers"),
    _m("stopped_through", "int64", "", "", "index of the last stopped parameter, -1 for none"),
    _m("stop_events", "string", "", "", "JSON list of the stops: iteration, layer, name, ratio, rule"),
)  # fmt: skip

#: Columns that analysis adds to a finished trial.
RELATIVE: tuple[Metric, ...] = (
    _m("saved", "float64", "fraction", "max",
       "what the study ranks by: training compute saved, inference compute saved, or the mean of both"),
    _m("accuracy_drop", "float64", "fraction", "min", "baseline's accuracy minus the trial's, same seed"),
    _m("test_accuracy_drop", "float64", "fraction", "min", "the same on the test split"),
    _m("time_saved", "float64", "fraction", "max", "1 - train_time_s / baseline's, same seed"),
    _m("communication_saved", "float64", "fraction", "max", "1 - gradient_bytes / baseline's, same seed"),
    _m("optimizer_bytes_saved", "float64", "fraction", "max", "1 - optimizer_bytes / baseline's, same seed"),
    _m("peak_memory_saved", "float64", "fraction", "max",
       "1 - peak_memory_bytes / baseline's, same seed; on the CPU that of the process, which may have run other "
       "trials before"),
)  # fmt: skip


def row_metrics(quality: Quality = ACCURACY) -> dict[str, Metric]:
    """Return the columns of what trials of this metric report, in order."""
    names = {"quality": quality.name, "test_quality": quality.test}
    found = [
        replace(m, name=names[m.name], unit=quality.unit, direction=quality.direction) if m.name in names else m
        for m in ROW
    ]
    return {metric.name: metric for metric in found if metric.name != "further_metrics"}


def metrics_of(quality: Quality = ACCURACY) -> dict[str, Metric]:
    """Return the columns of results of trials that are compared by this metric, in order.

    >>> list(metrics_of(Quality(name="val_loss", direction="min", unit="")))[3:5]
    ['val_loss', 'test_val_loss']
    """
    drops = {"accuracy_drop": quality.drop, "test_accuracy_drop": quality.test_drop}
    found = row_metrics(quality)
    for metric in RELATIVE:
        name = drops.get(metric.name, metric.name)
        found[name] = replace(metric, name=name, unit=quality.unit) if metric.name in drops else metric
    return found


#: Columns of results of trials that are compared by accuracy.
METRICS: dict[str, Metric] = metrics_of()


def current_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with today's keys.

    Before 2026-11-27 an accuracy had its own in place of ``quality``; before 2026-11-29 ``inference_saved`` left out
    multiplications by zeros.

    >>> current_row({"inference_saved": 0.75, "dense_macs": 80, "effective_macs": 50})["inference_saved"]  # of 200
    0.6
    >>> current_row({"epoch": 1, "accuracy": 0.5}), current_row({"quality": 2.5})
    ({'epoch': 1, 'quality': 0.5}, {'quality': 2.5})
    """
    row = dict(row)
    if row.get("inference_saved") and "sparse_inference_saved" not in row:
        saved, dense, effective = (row.get(name) or 0 for name in ("inference_saved", "dense_macs", "effective_macs"))
        executed = dense * (1 - saved) / effective if effective and dense else 1.0
        row |= {"sparse_inference_saved": saved, "inference_saved": 1 - executed}
    if "quality" in row:
        return row
    return {{"accuracy": "quality", "test_accuracy": "test_quality"}.get(key, key): value for key, value in row.items()}


def named_row(row: Mapping[str, Any], quality: Quality = ACCURACY) -> dict[str, Any]:
    """Return a trial's row with the metrics under their own names; further metrics never replace another column.

    >>> named_row({"epoch": 1, "quality": 2.5, "further_metrics": '{"f1": 0.5}'}, Quality(name="nll"))
    {'epoch': 1, 'nll': 2.5, 'f1': 0.5}
    """
    names = {"quality": quality.name, "test_quality": quality.test}
    named = {names.get(key, key): value for key, value in row.items() if key != "further_metrics"}
    try:
        further = dict(json.loads(row.get("further_metrics") or "{}"))
    except (TypeError, ValueError):  # of a damaged file
        further = {}
    accuracies = set() if quality.is_accuracy else {ACCURACY.name, ACCURACY.test}  # further metrics then
    known = ({*METRICS, *ROW_KEYS, *TABLE_COLUMNS} - accuracies) | set(named)
    return named | {str(name): value for name, value in further.items() if name not in known}


#: Columns of tables of trials that are no results; a metric of such a name would replace them.
TABLE_COLUMNS = frozenset({
    "trial", "role", "status", "error", "control", "candidate", "options", "of_epochs", "study", "rank", "within_drop",
    "on_front", "baseline", "duplicate_of", "beats_shorter", "run_facts", "seeds", "drop_mean", "drop_low", "drop_high",
    "drop_worst", "within_over_seeds",
})  # fmt: skip
#: Keys that a row may have.
ROW_KEYS: tuple[str, ...] = tuple(metric.name for metric in ROW)
#: Keys of the search's objectives in a row, in the order of their values in Optuna.
OBJECTIVES = ("quality", "compute_saved")


def further_columns(values: Mapping[str, float]) -> dict[str, str]:
    """Return the keys of a row for further metrics: none where there are none."""
    return {"further_metrics": json.dumps(values)} if values else {}


def check_metric(quality: Quality, others: Iterable[str] = ()) -> None:
    """Raise UserError for a metric with the name of another column of results, or of ``others``."""
    taken = {*METRICS, *ROW_KEYS, *TABLE_COLUMNS, *others} - {ACCURACY.name}
    for name in () if quality.is_accuracy else (quality.name, quality.test, quality.drop, quality.test_drop):
        if name in taken:
            raise UserError(
                f"the metric must have a name of its own, and {name} is a column of results already, got "
                f"{quality.name}: rename it, such as validation_loss"
            )


#: Values of the columns measured on the model where nothing is measured, since the model is as it was built.
MODEL_DEFAULTS: dict[str, object] = {
    "sparsity": 0.0, "structured_sparsity": 0.0, "inference_saved": 0.0, "sparse_inference_saved": 0.0,
    "dense_macs": None, "effective_macs": None, "parameters": None, "latency_s": None, "layer_sparsity": "{}",
    "effective_samples": None,
    "gradient_clusters": "[]", "gradient_statistics": "[]",
}  # fmt: skip

#: Values of a method's own columns where the method is not attached.
METHOD_DEFAULTS: dict[str, object] = {"stopped_through": -1, "stop_events": "[]"}
