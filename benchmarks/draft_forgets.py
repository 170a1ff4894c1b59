"""Measure the loss of a search, and the cost of a draw, with a TPE whose copy of a long study forgets trials.

    python benchmarks/draft_forgets.py [--trials 3000] [--seeds 4]

A made-up search: five variables in [0, 1], a saving that is highest in the corner where the loss is, and a loss with
the noise of a seed. Settings are drawn as a search draws them, in a copy that forgets and in one that does not.
``best`` is the highest saving, without noise, of a setting whose loss without noise is within the allowed one.
"""

from __future__ import annotations

import argparse
import random
import time

import optuna
from machine import header, spread

from tune_cac.tuning.draft_study import DraftStudy
from tune_cac.tuning.samplers import make_sampler
from tune_cac.tuning.study_trials import StudyTrials

ALLOWED_LOSS, NOISE = 0.1, 0.02


def saved(values: list[float]) -> float:
    """Return the saving of a setting, at most 1."""
    return 1 - sum((value - target) ** 2 for value, target in zip(values, (0.8, 0.7, 0.9, 0.6, 0.85), strict=True))


def lost(values: list[float]) -> float:
    """Return the loss of a setting, which grows towards that corner."""
    return (0.5 * values[0] + 0.3 * values[2] * values[4] + 0.2 * values[1] ** 2) ** 4


def searched(seed: int, trials: int, *, limited: bool) -> tuple[float, float]:
    """Return the best saving within the allowed loss, and the CPU ms of a draw among the last tenth."""
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=make_sampler(seed))
    draft, noise, best, late = (
        DraftStudy(StudyTrials(study), make_sampler(seed), limited=limited),
        random.Random(seed),
        0.0,
        0.0,
    )
    for number in range(trials):
        begun = time.process_time()
        draft.follow()
        drawn = draft.study.ask()
        values = [drawn.suggest_float(name, 0, 1, step=0.02) for name in "abcde"]
        late += time.process_time() - begun if number >= 0.9 * trials else 0.0
        trial = StudyTrials(study).start({}, params=drawn.params, distributions=drawn.distributions)
        draft.begin(drawn.number, trial.number)
        loss = lost(values)
        trial.set_constraint("drop", loss + noise.gauss(0, NOISE) - ALLOWED_LOSS)
        study.tell(trial, [-loss, saved(values)])
        best = max(best, saved(values) if loss <= ALLOWED_LOSS else 0.0)
    return best, 1000 * late / (0.1 * trials)


def main() -> None:
    """Search on every seed with and without forgetting, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(header(f"benchmarks/draft_forgets.py, {arguments.trials} trials"))
    for limited in (True, False):
        found = [searched(seed, arguments.trials, limited=limited) for seed in range(arguments.seeds)]
        print(
            f"{'forgets' if limited else 'keeps all'}: best {', '.join(f'{best:.4f}' for best, _ in found)}; "
            f"CPU ms a draw, last tenth: {spread([ms for _, ms in found])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
