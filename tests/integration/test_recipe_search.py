"""A search of the training recipe on a real Ray: each trial alone, by the clock."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from commands_run import run_here
from runs import assert_equals_alone

import analysis
from trainables.config import TrialConfig

pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_a_recipe_is_searched_by_the_clock_and_ends_in_lines_to_paste(one_ray: None, tmp_path: Path) -> None:
    done = run_here(
        tmp_path, "search", "--space", "training_recipe", "--epochs", "2", "--trials", "5", "--name", "s",
        "--set", "activation_checkpointing=blocks", "--allowed-drop", "0.99", "--set", "loader_workers=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert (trials["activation_checkpointing"] == "blocks").all()  # what is fixed holds for the baseline, too
    assert set(trials["role"]) == {"baseline", "search"}  # controls would say nothing of time
    ranked = analysis.rank(trials, allowed_drop=0.99)
    assert ranked["saved"].tolist() == pytest.approx(ranked["time_saved"].tolist())
    alone = [trials.loc[trial] for trial in trials.index[trials["trial"] >= 2]]
    assert len(alone) == 3
    for row in alone:  # each further trial differs from the baseline in one choice
        assert sum(not pd.isna(row[name]) for name in ("precision", "batch_size", "fused_optimizer")) == 1
    assert "precision=bfloat16" in done.stdout


@pytest.mark.thorough
def test_joined_with_gradient_skip_a_trial_is_the_same_alone(one_ray: None, tmp_path: Path) -> None:
    done = run_here(
        tmp_path, "search", "--space", "manual_layers+training_recipe", "--epochs", "2", "--trials", "4", "--name", "s",
        "--set", "activation_checkpointing=cheap",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    skipping = trials[(trials["method"] == "gradskip") & (trials["precision"] == "bfloat16")].iloc[0]
    assert skipping["compute_saved"] > 0
    assert_equals_alone(skipping)
    assert TrialConfig(method="gradskip").precision is None
