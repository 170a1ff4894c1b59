"""Luck that a cut dense run shares with the full run: simulated runs, and really trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searchers import learning
from tiny_workload import STEPS_PER_EPOCH, Tiny, tiny  # noqa: F401 - a fixture
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.tuning.outcomes.common_luck import DenseState, dense_states, deviation_of_state, luck_in_common


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_it_is_the_correlation_over_seeds_of_levels_with_noise(share: float) -> None:
    """Runs at a level of their own, whose epochs deviate from it by a share of the variance."""
    draw = np.random.default_rng(0)
    luck, runs, epochs = 0.005, 4000, 30
    levels = draw.normal(0, luck * (1 - share) ** 0.5, size=(runs, 1))
    values = 0.9 + levels + draw.normal(0, luck * share**0.5, size=(runs, epochs))
    seen = np.corrcoef(values[:, 0], values[:, -1])[0, 1]
    assert seen == pytest.approx(1 - share, abs=0.03)
    assert np.mean([luck_in_common(run, luck) for run in values[:200]]) == pytest.approx(seen, abs=0.05)


def test_few_epochs_prove_little() -> None:
    equal = [luck_in_common([0.9] * (1 + n), 0.005) for n in (0, 1, 3, 30)]
    assert equal == pytest.approx([0.0, 2 / 3, 6 / 7, 60 / 61])


def test_a_state_deviates_as_the_epochs_near_it_do() -> None:
    draw = np.random.default_rng(1)
    noisy, quiet = draw.normal(0.9, 0.02, size=20), draw.normal(0.95, 0.001, size=20)
    many = [deviation_of_state(draw.normal(0.9, 0.02, size=20), 10, 0.005) for _ in range(500)]
    assert np.median(many) == pytest.approx(4, rel=0.1)
    run = [*noisy, *quiet]
    assert deviation_of_state(run, 10, 0.005) == deviation_of_state(noisy, 10, 0.005) > 1
    assert deviation_of_state(run, 30, 0.005) == 1.0  # after the drop
    assert deviation_of_state([0.9], 1, 0.005) == 1.0


def _drops(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [STEPS_PER_EPOCH], gamma=1e-4)


def _cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=total_steps)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("schedule", [_drops, _cosine])
def test_cut_runs_whose_start_is_the_full_runs_are_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: Any
) -> None:
    monkeypatch.setattr(Tiny, "make_scheduler", lambda self, optimizer, total_steps: schedule(optimizer, total_steps))
    made = learning(tmp_path, lengths="1.0,0.5")
    assert made.outcomes is not None
    while True:
        suggested = made.suggest("t")
        assert isinstance(suggested, dict)
        sharing = Sharing(tree=tmp_path / "tree", of_epochs=suggested["sharing"]["of_epochs"])
        with SharedRun(TrialConfig(**suggested["config"]), sharing) as run:
            while not run.finished:
                last = run.train_epoch()
        made.on_trial_complete("t", last)
        if suggested["role"] == "cut":
            break
    runs = made._roots()
    rows = runs[4].trace.dense.recorded.rows
    values = [rows[STEPS_PER_EPOCH * epoch]["accuracy"] for epoch in (2, 3, 4)]
    luck = made.outcomes._scale(made.trials.baseline_row()).luck
    every = [rows[STEPS_PER_EPOCH * epoch]["accuracy"] for epoch in (1, 2, 3, 4)]
    times = {epoch: deviation_of_state(every, epoch, luck) for epoch in (2, 3)}
    wanted = {
        epoch: DenseState(value=of[0], tie=min(luck_in_common(of, luck), 1 / times[epoch]), times=times[epoch])
        for epoch, of in ((2, values), (3, values[1:]))
    }
    assert dense_states(runs, tmp_path / "tree", 4, luck) == (wanted if schedule is _drops else {})
    # The model of the quality is told of them, and of the full run's third epoch as of a run that was trained.
    asked: dict[str, Any] = {}
    monkeypatch.setattr("tune_cac.tuning.outcomes.outcome_queue.posterior", _noting(asked))
    made.outcomes._held = 0, {}
    made.outcomes.holds()
    of_cut, third = np.isclose(asked["candidates"][:, 1], 0.5), np.isclose(asked["trained"][:, 1], 0.75)
    assert of_cut.any()
    if schedule is _cosine:
        assert asked["states_to"].tolist() == [[0.0, 1.0]] * len(of_cut)
        assert not third.any()
        return
    assert asked["states_to"][of_cut].tolist() == [[wanted[2].tie, wanted[2].times]]
    assert wanted[2].tie > 0
    assert asked["trained"][third].tolist() == [[0.25, 0.75, *[0.75] * (asked["trained"].shape[1] - 2)]]
    assert asked["losses"][third].tolist() == [pytest.approx(values[-1] - values[1])]


def _noting(asked: dict[str, Any]) -> Any:
    from tune_cac.tuning.outcomes.quality_model import posterior

    def noted(trained: Any, losses: Any, candidates: Any, **how: Any) -> Any:
        asked.update(how, trained=trained, losses=losses, candidates=candidates)
        return posterior(trained, losses, candidates, **how)

    return noted
