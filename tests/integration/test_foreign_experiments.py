"""A Ray Tune experiment that has nothing to do with us, read beside Ray's own reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS

import analysis
from analysis.io.foreign import IDENTITY
from analysis.io.studies import BOOKKEEPING
from trainables.config import field_names
from trainables.metrics import METRICS

SPACE = {
    "lr": tune.grid_search([0.1, 0.9]),
    "seed": tune.grid_search([3, 4]),
    "opt": {"name": tune.choice(["sgd", "adam"]), "betas": [0.9, 0.99]},
}


def train(config: dict[str, Any]) -> None:
    for step in range(4):
        if config["lr"] > 0.5 and config["seed"] == 4 and step == 2:
            raise RuntimeError("boom")
        tune.report(
            {"loss": config["lr"] / (step + 1), "val": {"acc": np.float32(0.5)}, "hidden": np.nan, "epoch": step}
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> tune.ResultGrid:
    folder = tmp_path_factory.mktemp("theirs")
    return tune.Tuner(train, param_space=SPACE, run_config=tune.RunConfig(name="plain", storage_path=str(folder))).fit()


@pytest.mark.thorough
@pytest.mark.slow
def test_states_metrics_and_parameters_are_rays_and_nothing_else_is_there(results: tune.ResultGrid) -> None:
    trials = analysis.load(results.experiment_path).set_index("trial_id")
    theirs = results.get_dataframe().set_index("trial_id").loc[trials.index]
    assert len(trials) == 4
    failed = {result.metrics["trial_id"] for result in results if result.error is not None}
    assert trials["status"].to_dict() == {name: "failed" if name in failed else "completed" for name in trials.index}
    assert len(failed) == 1
    assert trials["error"].dropna().tolist() == ["RuntimeError: boom"]
    for name in ("loss", "val/acc", "epoch", "training_iteration", "time_total_s"):
        assert trials[name].tolist() == theirs[name].tolist(), name
    for name in ("lr", "seed", "opt/name"):
        assert trials[name].tolist() == theirs[f"config/{name}"].tolist(), name
    assert trials["opt/betas"].tolist() == ["[0.9, 0.99]"] * 4
    assert trials["hidden"].isna().all()
    theirs_names = {
        "loss",
        "val/acc",
        "hidden",
        "epoch",
        "training_iteration",
        "time_total_s",
        "lr",
        "seed",
        "opt/name",
    }
    known = {*IDENTITY, *METRICS, *field_names(), *theirs_names, "opt/betas"}
    assert set(trials.columns) == known
    invented = sorted(known - theirs_names - {"trial", "role", "status", "error", "opt/betas"})
    assert trials[invented].isna().all(axis=None)


@pytest.mark.thorough
@pytest.mark.slow
def test_what_ray_adds_is_left_out_and_nothing_else() -> None:
    kept = {"training_iteration", "time_total_s", "episodes_total", "timesteps_total", "timesteps_since_restore"}
    assert set(AUTO_RESULT_KEYS) - kept <= BOOKKEEPING
