"""Outcomes that a study has trained or is training, read from its trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from analysis.metrics.controls import CUT
from trainables.quality import Quality
from tune_cac.tuning.optuna_objectives import missing_objectives, saved_of_baseline
from tune_cac.tuning.outcomes.distinct_outcomes import identity_in, stops_in
from tune_cac.tuning.outcomes.trial_attributes import EPOCHS, OUTCOME


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An outcome that was trained or is being trained."""

    trial: int
    """Number of its trial."""
    epochs: int
    """Epochs of the run."""
    stops: tuple[tuple[int, int], ...]
    """(iteration, position of the last parameter stopped) of each stop."""
    saved: float
    """Compute saved, a fraction of that of the full run."""
    loss: float | None
    """Of quality against the baseline; None while it is being trained."""
    identity: str = ""
    """`Outcome.identity`, predicted until it is trained; empty for a dense run."""
    config: Mapping[str, Any]
    """Fields of its configuration."""
    chosen: bool = False
    """True if it was chosen as an outcome."""

    @property
    def lost(self) -> float:
        """Return the loss of one that was trained."""
        assert self.loss is not None, f"trial {self.trial} is being trained"
        return self.loss


def tried_in(
    trials: Iterable[FrozenTrial],
    baseline: Mapping[str, Any],
    quality: Quality,
    epochs: int,
    predicted: Callable[[int, Sequence[Mapping[str, Any]]], list[dict[str, Any] | None]],
) -> list[Tried]:
    """Return what was trained or is being trained, by trial.

    Failed trials are as bad as a run can be.

    Args:
        trials: of the study.
        baseline: its result row.
        quality: its metric.
        epochs: of the full run.
        predicted: returns stops, savings and identity of settings of a length, None for what is not predicted.
    """
    found: list[Tried] = []
    without_row: dict[int, list[tuple[dict[str, Any], Mapping[str, Any]]]] = {}  # by epochs: facts and configuration
    for trial in trials:
        attrs = trial.user_attrs
        if attrs.get("role") in ("baseline", "control") or "continued_by" in attrs:
            continue
        row, config = attrs.get("row"), attrs.get("config", {})
        own_epochs = config.get(EPOCHS, epochs)
        known: dict[str, Any] = {
            "trial": trial.number, "epochs": own_epochs, "chosen": OUTCOME in attrs, "config": config,
        }  # fmt: skip
        if row is not None and not missing_objectives(row, quality):
            loss = quality.lost(row[quality.key], baseline[quality.key])
            stops, saved = stops_in(row), saved_of_baseline(row, baseline)
            found.append(Tried(**known, stops=stops, saved=saved, loss=loss, identity=identity_in(row, config)))
            continue
        known["loss"] = None if trial.state == TrialState.RUNNING else np.inf  # it runs, or failed
        if attrs.get("role") == CUT:
            found.append(Tried(**known, stops=(), saved=1 - own_epochs / epochs))
        elif config:
            without_row.setdefault(own_epochs, []).append((known, config))
    for own_epochs, several in without_row.items():
        facts = predicted(own_epochs, [config for _, config in several])
        found += [
            Tried(**known, stops=of["stops"], saved=of["saved"], identity=of["identity"])
            for (known, _), of in zip(several, facts, strict=True)
            if of is not None
        ]
    return sorted(found, key=lambda one: one.trial)
