"""Loggers of other programs beside TensorBoard's: one run a trial, offline by default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.quality import quality_in

#: Names of ``--log``.
LOGGERS = ("mlflow", "wandb")


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError for a name that is none, or whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise unknown_name("--log", name, LOGGERS)
        if find_spec(name) is None:
            raise UserError(f"--log {name} needs its package: pip install 'tune-cac[{name}]'")


def loggers(names: Sequence[str], folder: Path) -> list[Any]:
    """Return callbacks of these names for Ray.

    MLflow writes into ``mlflow.db`` of the study's folder, or where MLFLOW_TRACKING_URI says; W&B into its ``wandb``,
    to be sent by ``wandb sync``, or at once where WANDB_MODE says so.
    """
    made: list[Any] = []
    if "mlflow" in names:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        class MLflow(MLflowLoggerCallback):
            """With the settings and metrics of a trial alone: each is a call of the server."""

            def log_trial_start(self, trial: Any) -> None:
                if trial not in self._trial_runs:
                    run = self.mlflow_util.start_run(run_name=str(trial))
                    self._trial_runs[trial] = run.info.run_id
                    self.mlflow_util.log_params(run_id=run.info.run_id, params_to_log=_settings(trial))

            def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
                self.mlflow_util.log_metrics(
                    run_id=self._trial_runs[trial],
                    metrics_to_log=_metrics(trial, result),
                    step=int(result["training_iteration"]),
                )

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        made.append(MLflow(tracking_uri=uri, experiment_name=folder.name))
    if "wandb" in names:
        # Ray's own callback has an actor for each trial, which ends with Ray before it has written a short one.
        import wandb
        from ray.tune.logger import LoggerCallback

        mode: Any = os.environ.get("WANDB_MODE", "offline")

        class Wandb(LoggerCallback):
            """A run of this process for each trial."""

            def __init__(self) -> None:
                self._runs: dict[Any, Any] = {}

            def log_trial_start(self, trial: Any) -> None:
                if trial not in self._runs:
                    self._runs[trial] = wandb.init(
                        project="tune_cac", group=folder.name, name=str(trial), config=_settings(trial),
                        dir=str(folder.absolute()), mode=mode,
                        reinit="create_new", settings=wandb.Settings(silent=True),
                    )  # fmt: skip

            def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
                self._runs[trial].log(_metrics(trial, result), step=int(result["training_iteration"]))

            def log_trial_end(self, trial: Any, failed: bool = False) -> None:
                if trial in self._runs:
                    self._runs.pop(trial).finish(exit_code=int(failed))

        made.append(Wandb())
    return made


def _settings(trial: Any) -> dict[str, Any]:
    config = trial.config.get("config", {})
    return {name: value for name, value in config.items() if value not in (None, [], (), False, "")}


def _metrics(trial: Any, result: Mapping[str, Any]) -> dict[str, float]:
    from tune_cac.ray_backend.tensorboard import scalars

    found = scalars(result, quality_in(trial.config.get("config", {})))
    return {tag.removeprefix("ray/tune/"): value for tag, value in found.items()}
