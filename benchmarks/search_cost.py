"""What a search costs: with the stage tree, without it, and as plain Ray Tune with OptunaSearch.

    python benchmarks/search_cost.py [--trials 100] [--concurrency 1 4] [--skip-plain] [--seed 0]

Each mode is a command of its own, timed from start to end (Ray's start and torch's import among it), with Optuna's TPE,
which asks for as many trials as it is told to. Executed FLOPs are those of training, in runs of the baseline. One trial
at a time the sampler's suggestions depend on the seed alone, so
the results with and without sharing are compared row by row; with several at a time they depend on who ends first.

Plain Ray Tune trains the same loop on the same space with the same sampler class, its trials reused in one process as
ours are; it knows no baseline, so its ranges are the space's own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import header

#: Columns that measure this machine and moment, or say what the search spent.
NOT_THE_RUNS = [
    "train_time_s", "train_energy_j", "wall_time_s", "peak_memory_bytes", "search_flops", "stage",
    "time_saved", "peak_memory_saved",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One search."""

    mode: str
    """What ran."""
    executed: float
    """FLOPs of training that were executed, in dense runs."""
    alone: float
    """What the same trials would execute alone, in dense runs."""
    wall_time_s: float
    """From the command's start to its end."""
    outcomes: int | None
    """Distinct stages in which trials ended; None without a tree."""


def ours(folder: Path, name: str, trials: int, seed: int, *flags: str) -> tuple[Measured, Any]:
    """A search by command; what it cost, and its trials."""
    import analysis

    command = [sys.executable, "-m", "tune_cac", "search", "--trials", str(trials), "--seed", str(seed), "--name", name]
    command += ["--no-controls", "--sampler", "tpe"]  # plain Ray Tune has no controls
    begun = time.perf_counter()
    subprocess.run([*command, *flags], cwd=folder, check=True, capture_output=True)
    took = time.perf_counter() - begun
    found = analysis.load(folder / "results" / name)
    shared = "--no-sharing" not in flags
    return Measured(
        mode=" ".join(("search", *flags)),
        executed=(found["search_flops"] / found["dense_flops"]).sum(),
        alone=(found["executed_flops"] / found["dense_flops"]).sum(),
        wall_time_s=took,
        outcomes=found["stage"].nunique() if shared else None,
    ), found


def plain(trials: int, seed: int) -> Measured:
    """Plain Ray Tune in a process of its own."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--as-plain", "--trials", str(trials), "--seed", str(seed)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    executed = json.loads(done.stdout.splitlines()[-1])
    return Measured(
        mode="plain Ray Tune", executed=executed, alone=executed, wall_time_s=time.perf_counter() - begun, outcomes=None
    )


def nothing(trial: Any) -> None:
    """For Ray's searcher, which pickles its space: trials are suggested below."""


def run_plain(trials: int, seed: int) -> None:
    """The child's work: print the executed FLOPs in dense runs."""
    import optuna
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    import search_spaces
    from trainables.config import TrialConfig
    from trainables.trial import Trial
    from tune_cac.ray_backend.session import ray_session
    from tune_cac.tuning.run_context import run_context

    base = TrialConfig(method="none", seed=seed)
    context, space = run_context(base), search_spaces.load("auto_thresholds")

    class Search(OptunaSearch):
        def suggest(self, trial_id: str) -> dict[str, Any]:
            trial = self._ot_trials.setdefault(trial_id, self._ot_study.ask())
            suggested = space.suggest(trial, context).items()
            values = {name: list(value) if isinstance(value, tuple) else value for name, value in suggested}
            return {"config": {**base.to_dict(), "method": "gradskip", **values}, "resume_from": None}

    sampler = optuna.samplers.TPESampler(
        multivariate=True, group=True, constant_liar=True, n_ei_candidates=48, seed=seed
    )
    search = Search(space=nothing, metric=["quality", "compute_saved"], mode=["max", "max"], sampler=sampler)
    with tempfile.TemporaryDirectory() as folder, ray_session(cpus=1):
        results = tune.Tuner(
            tune.with_resources(Trial, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                search_alg=search, num_samples=trials, max_concurrent_trials=1, reuse_actors=True
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        rows = [result.metrics for result in results]
    print(json.dumps(sum(row["executed_flops"] / row["dense_flops"] for row in rows)))


def main() -> None:
    """Run every mode once and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--skip-plain", action="store_true")
    parser.add_argument("--as-plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_plain:
        run_plain(arguments.trials, arguments.seed)
        return
    print(
        header("benchmarks/search_cost.py"),
        f"| digits, auto_thresholds, {arguments.trials} trials, seed",
        arguments.seed,
    )
    print(
        f"{'':<44}{'executed':>9} {'alone':>7} {'outcomes':>9} {'wall s':>8}   FLOPs and time over sharing's",
        flush=True,
    )
    first: Measured | None = None
    with tempfile.TemporaryDirectory() as folder:
        for count in arguments.concurrency:
            many = ("--concurrency", str(count))
            shared, rows = ours(Path(folder), f"shared{count}", arguments.trials, arguments.seed, *many)
            show(shared, shared)
            first = first or shared
            alone, rows_alone = ours(
                Path(folder), f"alone{count}", arguments.trials, arguments.seed, *many, "--no-sharing"
            )
            show(alone, shared)
            if count == 1:
                same = rows.drop(columns=NOT_THE_RUNS).equals(rows_alone.drop(columns=NOT_THE_RUNS))
                if not same:
                    raise SystemExit("one at a time, row by row: NOT EQUAL")
                print("one at a time, row by row: equal")
    if not arguments.skip_plain and first is not None:
        show(plain(arguments.trials, arguments.seed), first)


def show(found: Measured, shared: Measured) -> None:
    """One line, as soon as it is known: a run of this takes half an hour."""
    outcomes = "" if found.outcomes is None else str(found.outcomes)
    print(
        f"{found.mode:<44}{found.executed:>9.1f} {found.alone:>7.1f} {outcomes:>9} {found.wall_time_s:>8.0f}   "
        f"{found.executed / shared.executed:.1f} {found.wall_time_s / shared.wall_time_s:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
