"""Optuna's samplers by the names that the option ``--sampler`` takes."""

from __future__ import annotations

import warnings

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler


def make_sampler(seed: int, name: str = "auto") -> BaseSampler:
    """Return a sampler; all of them can handle several objectives and constraints.

    Args:
        seed: of its draws.
        name: ``auto``, whose candidates are twice Optuna's number, as they are cheap beside a trial; another one is
            Optuna's with its defaults. A grid draws nothing, so its study has a random one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "auto":
            return TPESampler(multivariate=True, group=True, constant_liar=True, n_ei_candidates=48, seed=seed)
        kinds = {"tpe": TPESampler, "gp": GPSampler, "nsga2": NSGAIISampler}
        sampler: BaseSampler = kinds.get(name, RandomSampler)(seed=seed)
        return sampler
