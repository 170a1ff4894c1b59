"""Replay searches on a table of qualities: what answers over seeds save, lose and cost, and how often they are right.

    python benchmarks/seeds.py [--searches 200] [--allowed 0.5] [--rules NAME ...] [--table seeds_digits.csv]

The table has 40 outcomes of digits (`late_stops.py`) on 24 seeds: compute saved, and how many of 599 samples of either
split are right. A search draws an order of these seeds. On the first it trains outcomes of the full run and of the cut
dense runs (`tune_cac.tuning.controls`) as `tune_cac.tuning.outcomes` chooses them, by validation; then what saves most,
beside the baseline, on the next ones, as `tune_cac.tuning.race` decides with `analysis.metrics.over_seeds`. Where a
setting is refused, outcomes are chosen anew, up to `most_trainings`. Controls are not counted. The true loss is the
mean on the test split, over all seeds of the table; whether an interval has it is judged by the seeds alone that the
search did not use.

Printed for each rule: share of searches with an answer; of answers: compute saved, true loss, share of true losses
within the allowed one, share of intervals with the true loss in it, half width; full trainings of all that was executed
(what follows the steps shared with another run of the same length and seed). ``one seed`` has no further ones;
``confirm`` then trains the three that save most and the baseline on three seeds and asks for simultaneous 95 %
intervals of the test split (`analysis.confirm_table`); ``TPE`` draws outcomes by Optuna's sampler, savings and losses
its objectives, for as much compute as the search on one seed. ``fixed`` is 15 of 30 epochs with stops from 60 % on,
without a search.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from machine import header
from numpy.typing import NDArray

from analysis.io.study_options import most_trainings
from analysis.metrics import over_seeds
from analysis.metrics.confirmation import paired_interval
from analysis.metrics.noise import seed_noise
from analysis.metrics.over_seeds import BEYOND, OPEN, WITHIN
from trainables.quality import ACCURACY
from tune_cac.tuning.controls import TRIED
from tune_cac.tuning.outcomes import LEAST
from tune_cac.tuning.quality_model import (
    WORTHWHILE,
    WORTHWHILE_AREA,
    are_new,
    area_of,
    loss_scale,
    posterior,
    worthwhile,
)
from tune_cac.tuning.race import is_close_below, leading

SAMPLES, FULL = 599, 30
DENSE, FIXED = "30 dense", "15 late 0.6"
#: Number of further seeds.
RULES = {f"{number} seeds": number for number in (3, 4, 5, 7)}
#: Searches on one seed; settings and seeds of ``confirm``; full trainings of a search on one seed, the mean of ours.
ON_ONE, TOP, CONFIRMED, ON_ONE_COST = ("one seed", "one seed, confirm", "TPE, confirm"), 3, 3, 3.3


class Table:
    """Qualities of outcomes (k,) on seeds (s,), as fractions."""

    def __init__(self, file: Path) -> None:
        rows = pd.read_csv(file)
        rows["outcome"] = rows["epochs"].astype(str) + " " + rows["name"]
        self.seeds = sorted(rows["seed"].unique())
        names = [name for name in rows["outcome"].unique() if name != DENSE]
        self.validation, self.test = (
            rows.pivot_table(index="outcome", columns="seed", values=split) / SAMPLES
            for split in ("validation", "test")
        )
        self.names, saved = np.array(names), rows.groupby("outcome")["saved"].mean()
        self.saved = saved[names].to_numpy()
        self.length = np.array([int(name.split()[0]) / FULL for name in names])
        self.first = np.array([1.0 if name.endswith("dense") else float(name.split()[-1]) for name in names])
        self.cut = {round(share * FULL): names.index(f"{round(share * FULL)} dense") for share in TRIED}
        runs = (FULL, *self.cut)  # whose stops are searched; lengths near them stand for more of their outcomes
        self.run = np.array([min(runs, key=lambda run, at=FULL * share: abs(run - at)) for share in self.length])
        own_saved = 1 - (1 - self.saved) / self.length
        self.features = np.column_stack(
            [1.5 * own_saved, self.length, self.first]
        )  # a backward pass is two forward ones

    def true(self, number: int, seeds: Iterable[int]) -> float:
        """Return the mean loss of an outcome on the test split over some seeds."""
        test = self.test[list(seeds)]
        return float((test.loc[DENSE] - test.loc[self.names[number]]).mean())


class ReplayedSearch:
    """One search; numbers of outcomes are places in the table, -1 is the baseline's."""

    def __init__(self, table: Table, allowed: float, draw: int) -> None:
        self.table, self.allowed = table, allowed
        self.order = np.random.default_rng(draw).permutation(table.seeds)
        self.trainings, self.lost = 1.0, dict[int, float]()  # on the own seed
        self.further: dict[tuple[int, int], float] = {}  # value by number and place of the seed
        self.scale = loss_scale(self.quality(-1, 0), [1 / SAMPLES], ACCURACY, allowed)

    def quality(self, number: int, place: int, *, test: bool = False) -> float:
        """Return the accuracy of an outcome on a seed."""
        split = self.table.test if test else self.table.validation
        return float(split.loc[DENSE if number < 0 else self.table.names[number], self.order[place]])

    def train(self, number: int) -> None:
        """Train an outcome on the own seed."""
        self.trainings += self._cost(number, [-1, *self.lost])
        self.lost[number] = self.quality(-1, 0) - self.quality(number, 0)

    def _cost(self, number: int, others: Sequence[int]) -> float:
        """Return what an outcome executes behind the steps that it shares with others of its seed and length."""
        table, places = self.table, [one for one in others if one >= 0]
        alike = [table.first[one] for one in places if table.length[one] == table.length[number]]
        alike += [1.0] if -1 in others and table.length[number] == 1 else []
        shared = table.length[number] * min(table.first[number], max(alike, default=0.0))
        return float(max(0.05, 1 - table.saved[number] - shared))

    def model(self, numbers: Sequence[int]) -> Any:
        """Return the posterior of outcomes' losses."""
        table = self.table
        own, further = [*self.lost], [*self.further]
        features = [table.features[one] for one in own]
        features += [table.features[one] if one >= 0 else np.array([0.0, 1.0, 1.0]) for one, _ in further]
        losses = [*self.lost.values(), *(self.quality(-1, place) - self.quality(one, place) for one, place in further)]
        seeds = np.array([0] * len(own) + [place for _, place in further], float)
        return posterior(
            np.array(features), np.array(losses), table.features[list(numbers)], unit=self.scale.unit,
            noise=self.scale.seed_noise, seeds=seeds,
        )  # fmt: skip

    def search(self, refused: Sequence[int] = ()) -> None:
        """Train outcomes on the own seed until none is worth it, some being refused over further ones."""
        self._train_lengths(refused)
        while (chosen := self._chosen(refused)) is not None:
            self.train(chosen)

    def _train_lengths(self, refused: Sequence[int]) -> None:
        """Train cut dense runs while the one before loses too much."""
        for number in self.table.cut.values():
            if number not in self.lost:
                self.train(number)
            if self.lost[number] <= self.allowed and number not in refused:
                break

    def _left(self) -> list[int]:
        """Return what was not trained, of the full run and of the cut dense runs that were."""
        runs = [FULL, *(run for run, number in self.table.cut.items() if number in self.lost)]
        is_left = np.isin(self.table.run, runs) & (self.table.first < 1)
        return [int(one) for one in np.flatnonzero(is_left) if one not in self.lost]

    def _chosen(self, refused: Sequence[int]) -> int | None:
        table, tried = self.table, [*self.lost]
        left = np.array(self._left(), int)
        left = left[are_new(table.features[left], table.features[tried])]
        if not left.size:
            return None
        found, means, limit = self.model(left.tolist()), self.model(tried).mean_over_seeds, self._limit(refused)
        close = partial(is_close_below, refused=table.saved[[*refused]])
        answers = [
            table.saved[one]
            for one, mean in zip(tried, means, strict=True)
            if self.lost[one] <= self.allowed + 1e-9 and mean <= limit and not close(table.saved[one])
        ]
        best, worst = max(answers, default=0.0), 2 * self.scale.unit
        likely = (found.mean_over_seeds <= limit) & [not close(share) for share in table.saved[left]]
        answer = np.where(likely, found.share_within(self.scale.limit), 0) * np.maximum(table.saved[left] - best, 0)
        front = [(0.0, 0.0), *((self.lost[one], table.saved[one]) for one in tried)]
        area = found.area_gained(table.saved[left], front, worst) / worst
        worth: NDArray[np.float64] = answer + area
        if len(tried) >= LEAST:
            enough = answer >= worthwhile(best, WORTHWHILE)
            enough |= area >= worthwhile(area_of(front, worst), WORTHWHILE_AREA)
            worth = np.where(enough, worth, 0.0)
        costs = np.array([self._cost(one, [-1, *self.lost]) for one in left])
        return int(left[np.argmax(worth / costs)]) if worth.any() else None

    def drawn(self, draw: int) -> None:
        """Train what Optuna's sampler draws, the nearest outcome of a length, until `ON_ONE_COST`."""
        sampler = optuna.samplers.TPESampler(seed=draw, multivariate=True)
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        table, kinds = self.table, sorted({name.split()[1] for name in self.table.names})
        while self.trainings < ON_ONE_COST and len(study.trials) < 200:
            trial = study.ask()
            length = trial.suggest_categorical("length", sorted({float(one) for one in table.length}))
            kind, first = trial.suggest_categorical("kind", kinds), trial.suggest_float("first", 0.05, 1.0)
            distances = 10 * (table.length != length) + np.array([name.split()[1] != kind for name in table.names])
            number = int(np.argmin(distances + np.abs(table.first - first)))
            if number not in self.lost:
                self.train(number)
            study.tell(trial, [table.saved[number], self.lost[number]])

    def confirmed(self) -> tuple[int | None, tuple[float, float] | None]:
        """Return the setting that `tune_cac confirm` confirms, and the interval of its loss."""
        within, places = (
            [one for one, loss in self.lost.items() if loss <= self.allowed + 1e-9],
            range(1, 1 + CONFIRMED),
        )
        top = sorted(within, key=lambda one: -self.table.saved[one])[:TOP]
        self.trainings += CONFIRMED * (1 + sum(self._cost(one, [-1, *top[:rank]]) for rank, one in enumerate(top)))
        for one in top:
            losses = [self.quality(-1, place, test=True) - self.quality(one, place, test=True) for place in places]
            found = paired_interval(losses, comparisons=len(top), resolution=1 / SAMPLES)
            if found.high <= self.allowed:
                return one, (found.low, found.high)
        return None, None

    def answer(self, seeds: int) -> int | None:
        """Return the answer over further seeds, which are trained."""
        seen = 0
        while True:
            if len(refused := self._refused(seeds)) > seen and self.trainings < most_trainings(1 + seeds):
                seen = len(refused)
                self.search(refused)
            number, decided = self._leader(seeds)
            if number is None or (
                refused and self.trainings >= most_trainings(1 + seeds) and (number, 1) not in self.further
            ):
                return None
            if decided == WITHIN:
                return number
            place = next(p for p in range(1, seeds + 1) if (number, p) not in self.further)
            for one in (-1, number):
                if (one, place) not in self.further:
                    there = [other for other, at in self.further if at == place]
                    self.trainings += 1 if one < 0 else self._cost(one, there)
                    values = [self.quality(one, place, test=test) for test in (False, True)]
                    self.further[one, place] = float(np.mean(values))

    def _limit(self, refused: Sequence[int]) -> float:
        """Return the mean over seeds up to which an outcome may be the answer, behind refused ones."""
        return self.scale.limit_behind(self.model(refused).mean_over_seeds if refused else np.array([]))

    def _refused(self, seeds: int) -> list[int]:
        return [one for one, known in self.over_seeds().items() if known.decides(self.allowed, seeds) == BEYOND]

    def _leader(self, seeds: int) -> tuple[int | None, str]:
        """Return the outcome whose turn it is, and what is decided of it."""
        table, found = self.table, self.over_seeds()
        verdicts = {one: known.decides(self.allowed, seeds) for one, known in found.items()}
        saved = {one: table.saved[one] for one in sorted(self.lost, key=lambda one: -table.saved[one])}

        @cache
        def expected_within() -> dict[int, bool]:
            within = self.model([*self.lost]).mean_over_seeds <= self._limit(self._refused(seeds))
            return dict(zip(self.lost, within, strict=True))

        number = leading(saved, verdicts, found, lambda one: expected_within()[one])
        return number, BEYOND if number is None else verdicts.get(number, OPEN)

    def over_seeds(self) -> dict[int, over_seeds.OverSeeds]:
        """Return what is known of outcomes over further seeds."""
        losses: dict[int, list[float]] = {}
        for (one, place), value in self.further.items():
            if one >= 0:
                losses.setdefault(one, []).append(self.further[-1, place] - value)
        expected = float(seed_noise(self.quality(-1, 0), 1 / SAMPLES)) / 2**0.5  # of the mean of two splits
        return over_seeds.over_seeds(losses, expected)


def replayed(table: Table, allowed: float, rule: str, draw: int) -> dict[str, float]:
    """Return what one search gives."""
    search, interval = ReplayedSearch(table, allowed, draw), None
    seeds = RULES.get(rule, 0)
    if rule.startswith("TPE"):
        search.drawn(draw)
    else:
        search.search()
    if "confirm" in rule:
        (number, interval), seeds = search.confirmed(), CONFIRMED
    elif seeds:
        number = search.answer(seeds)
        interval = search.over_seeds()[number].interval if number is not None else None
    else:
        within = [one for one, loss in search.lost.items() if loss <= allowed + 1e-9]
        number = max(within, key=lambda one: table.saved[one], default=None)
    row = {"trainings": search.trainings, "answered": float(number is not None)}
    if number is None:
        return row
    true = table.true(number, table.seeds)
    row |= {"saved": table.saved[number], "true loss": 100 * true, "within": float(true <= allowed)}
    if interval is not None:
        low, high = interval
        others = table.true(number, search.order[1 + seeds :])
        row |= {"covered": float(low <= others <= high), "half width": 50 * (high - low)}
    return row


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--rules", nargs="+", choices=[*ON_ONE, *RULES], default=[*ON_ONE, *RULES])
    parser.add_argument("--allowed", type=float, default=0.5, help="points")
    parser.add_argument("--table", type=Path, default=Path(__file__).with_name("seeds_digits.csv"))
    given = parser.parse_args()
    table, allowed, lines = Table(given.table), given.allowed / 100, {}
    numbers = range(len(table.names))
    most = max(table.saved[one] for one in numbers if table.true(one, table.seeds) <= allowed)
    print(
        header("benchmarks/seeds.py"),
        f"| {given.searches} searches, {len(table.seeds)} seeds; at most {most:.3f} can be saved",
    )
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        for name in given.rules:
            one = partial(replayed, table, allowed, name)
            lines[name] = pd.DataFrame(pool.map(one, range(given.searches), chunksize=10)).mean()
    fixed = list(table.names).index(FIXED)
    true = 100 * table.true(fixed, table.seeds)
    lines["fixed"] = pd.Series({"saved": table.saved[fixed], "true loss": true, "trainings": 0.0})
    print(pd.DataFrame(lines).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
