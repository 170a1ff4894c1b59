"""Search a space by Ray's ASHA, without a stage tree, until a number of full trainings is executed.

    python benchmarks/asha_search.py FILE [--budget 4] [--seed 0] [--space auto_thresholds] [--workload digits]
                                     [--option NAME=VALUE ...] [--epochs N] [--concurrency 2] [--fresh 0]

Settings are drawn at random from the space's own ranges: what a baseline's recorded run shows about thresholds is not
known here. Trials are compared by their validation accuracy at equal compute executed, in percent of a full training:
at 10, 30 and 90 %, the better third goes on (`ray.tune.schedulers.AsyncHyperBandScheduler`); compared at equal epochs,
what saves most would be ended first. The JSON file gets a row for each training that ended by itself, and what was
executed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler

from trainables.trial import Trial
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning.candidates import make_sampler
from tune_cac.tuning.run_context import baseline_config, run_context
from tune_cac.tuning.searcher import config_of_trial

#: Compute executed, in percent of a full training: of the first comparison, and what each next one is multiplied by.
FIRST, FACTOR = 10, 3
#: Settings that are drawn, more than a budget allows.
MOST = 200


class ComputeTrial(Trial):
    """A trial that tells the compute it has executed, in percent of a full training."""

    def setup(self, config: dict[str, Any]) -> None:
        """Build the run."""
        self._dense_flops: float | None = config["dense_flops"]
        super().setup(config)

    def step(self) -> dict[str, Any]:
        """Train one epoch and return its row."""
        row = super().step()
        return {**row, "compute": 100 * row["executed_flops"] / (self._dense_flops or row["dense_flops"])}


class Budget(tune.Stopper):
    """End the run when its trials have executed a number of full trainings."""

    def __init__(self, trainings: float) -> None:
        self._trainings, self.executed = trainings, dict[str, float]()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Count a row; no single trial is ended."""
        self.executed[trial_id] = result["compute"] / 100
        return False

    def stop_all(self) -> bool:
        """Return whether the budget is used up."""
        return sum(self.executed.values()) >= self._trainings


def trained(
    configs: Sequence[dict[str, Any]], *, dense_flops: float | None, concurrency: int, budget: float | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Train configs, all of them to their end or by ASHA within a budget.

    Returns:
        The last row of each run that ended by itself, with its ``config``; and the full trainings executed.
    """
    stopper = Budget(float("inf") if budget is None else budget)
    by_asha = AsyncHyperBandScheduler(
        time_attr="compute", metric="quality", mode="max", max_t=1000, grace_period=FIRST, reduction_factor=FACTOR
    )
    with tempfile.TemporaryDirectory() as folder:
        fields = [
            {"config": one, "trial": number, "folder": folder, "dense_flops": dense_flops}
            for number, one in enumerate(configs)
        ]
        results = tune.Tuner(
            tune.with_resources(ComputeTrial, {"cpu": 1}),
            param_space=tune.grid_search(fields),
            tune_config=tune.TuneConfig(
                scheduler=FIFOScheduler() if budget is None else by_asha,
                max_concurrent_trials=concurrency,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, name="asha", verbose=0, stop=stopper),
        ).fit()
        rows = [
            {**found.metrics, "config": found.config["config"]}
            for found in results
            if found.metrics and found.metrics.get("epoch") == found.config["config"]["epochs"]
        ]
    return rows, sum(stopper.executed.values())


def main() -> None:
    """Search, and write the rows and the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--budget", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--space", default="auto_thresholds")
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--allowed", type=float, default=0.005)
    arguments = parser.parse_args()
    options = SearchOptions(
        space=arguments.space, workload=arguments.workload, workload_options=tuple(arguments.option),
        epochs=arguments.epochs, seed=arguments.seed,
    )  # fmt: skip
    base = baseline_config(options, device="cpu")
    context, concurrency = run_context(base), arguments.concurrency
    (dense,), executed = trained([base.to_dict()], dense_flops=None, concurrency=concurrency)
    study = optuna.create_study(directions=["maximize"] * 2, sampler=make_sampler(arguments.seed, "random"))
    drawn = [config_of_trial(study.ask(), options.loaded_space, base, {}, lambda _: context) for _ in range(MOST)]
    rows, spent = trained(
        drawn, dense_flops=dense["dense_flops"], concurrency=concurrency, budget=arguments.budget - executed
    )
    within = [one for one in rows if one["quality"] >= dense["quality"] - arguments.allowed - 1e-9]
    answer = max([dense, *within], key=lambda one: one["compute_saved"])["config"]
    arguments.file.write_text(
        json.dumps(
            {
                "executed": executed + spent,
                "rows": [
                    {"saved": one["compute_saved"], "loss": dense["quality"] - one["quality"]} for one in [dense, *rows]
                ],
                "answer": answer,
            }
        )
    )


if __name__ == "__main__":
    main()
