"""Gradient statistics in the course of a run, as columns of its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from trainables.attachment import EstimateFlops
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.gradient_statistics import GradientMeasurement, GradientStatistics
from trainables.gradients.moments import GradientMoments
from trainables.gradients.variance_fields import KEPT_SAMPLES, STATISTICS_SAMPLES
from trainables.workloads.base import Samples, Workload
from trainables.workloads.sample_access import reservoir

#: Statistics of each layer that rows keep.
OF_LAYERS = ("norm", "average_variance", "normalised_variance", "snr")
#: Statistics of all layers together that are columns, with the estimator's name before them.
COLUMNS = (*OF_LAYERS, "bias")
#: Significant digits in rows.
DIGITS = 6


def open_statistics(
    config: TrialConfig, workload: Workload, model: nn.Module, total_steps: int
) -> RunStatistics | None:
    """Return the run's statistics; None if the configuration asks for none.

    Raises:
        UserError: samples of a measurement without the number of measurements.
    """
    if config.statistics_samples is not None and config.statistics_measurements is None:
        raise UserError(
            f"statistics_samples={config.statistics_samples} needs statistics_measurements, the number of measurements"
        )
    return None if config.statistics_measurements is None else RunStatistics(config, workload, model, total_steps)


class RunStatistics:
    """Measure SGD's gradients, and those of the trial's own estimator beside them, at equal distances of a run.

    Args:
        config: with ``statistics_measurements``.
        workload: whose training samples are drawn from; of samples without numbers the first epoch's are kept.
        model: of the run.
        total_steps: of the run.
    """

    def __init__(self, config: TrialConfig, workload: Workload, model: nn.Module, total_steps: int) -> None:
        data = workload.samples()
        if data is None:
            data = _kept(workload, config.seed)
        self._steps_per_epoch = workload.steps_per_epoch
        self._statistics = GradientStatistics(
            model,
            data,
            config.statistics_measurements or 1,
            config.statistics_samples or STATISTICS_SAMPLES,
            loss=workload.loss,
            total_steps=total_steps,
            batch_size=min(data.batch_size, data.count),
            seed=config.seed,
        )
        self._rows: list[dict[str, Any]] = []  # of the epoch of the last measurement

    def before_step(self, step: int, method: GradientMethod | None) -> EstimateFlops | None:
        """Measure if this step is due; return what that executed."""
        if not self._statistics.is_due(step):
            return None
        found = self._statistics.measure(step, *(() if method is None else (method,)))
        self._statistics.history.clear()
        epoch = step // self._steps_per_epoch
        self._rows = [row for row in self._rows if row["step"] // self._steps_per_epoch == epoch]
        self._rows += [_row(one) for one in found]
        return EstimateFlops(
            forward_flops=sum(one.forward_flops for one in found),
            backward_flops=sum(one.backward_flops for one in found),
        )

    def columns(self) -> dict[str, float]:
        """Return the statistics of the last measurement as columns: ``sgd_normalised_variance``, ``svrg_bias``, ..."""
        last = [row for row in self._rows if row["step"] == self._rows[-1]["step"]]
        return {
            f"{row['estimator']}_{name}": row["total"][name]
            for row in last
            for name in COLUMNS
            if not (name == "bias" and row["estimator"] == "sgd")
        }

    def text(self, epoch: int) -> str:
        """Return the measurements in an epoch, from 1, as JSON (`metrics`, column ``gradient_statistics``)."""
        rows = [row for row in self._rows if row["step"] // self._steps_per_epoch == epoch - 1]
        return json.dumps(rows, separators=(",", ":"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"rows": json.dumps(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; empty for a run that was not measured."""
        self._rows = json.loads(state["rows"]) if state else []


def _kept(workload: Workload, seed: int) -> Samples:
    first = next(iter(workload.train_batches(0, seed)))
    return reservoir(workload.train_batches(0, seed), most=KEPT_SAMPLES, seed=seed, batch_size=len(first[0]))


def _row(found: GradientMeasurement) -> dict[str, Any]:
    return {
        "step": found.step,
        "estimator": found.estimator,
        "gradient_evaluations": found.gradient_evaluations,
        "total": _rounded(found.total),
        "layers": {name: _rounded(moments, OF_LAYERS) for name, moments in found.layers.items()},
    }


def _rounded(moments: GradientMoments, names: tuple[str, ...] | None = None) -> dict[str, float | None]:
    values = asdict(moments)
    return {name: float(f"{values[name]:.{DIGITS}g}") for name in names or values}
