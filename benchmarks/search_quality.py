"""What a search's answer costs, and how good it is, by sampler and seed.

    python benchmarks/search_quality.py [--samplers outcomes tpe] [--trials 100] [--seeds 10] [--concurrency 2]
                                        [--workload digits] [--epochs N] [--results FOLDER]

Each search is a command of its own without controls. ``saved`` is the compute that the best setting within the allowed
loss saves on the search's own seed; ``executed`` is what the search trained, in dense runs, its baseline included;
``hypervolume`` is that of the front above no saving and twice the allowed loss. The lines at the end are medians over
the seeds, with ratios to the last sampler named, seed by seed. Searches that a folder has already are not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from machine import header

#: Loss of accuracy at the hypervolume's reference point; a search allows half of it.
REFERENCE_LOSS = 0.01


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of one search."""

    saved: float
    """By the best setting within the allowed loss, a fraction."""
    executed: float
    """Compute that the search trained, in dense runs."""
    settings: int
    """Trials that completed, without the baseline."""
    hypervolume: float
    """Of the front, above no saving at the reference loss."""
    wall_time_s: float
    """From the command's start to its end; 0 for a search that was there before."""


def found_by(sampler: str, seed: int, folder: Path, arguments: argparse.Namespace) -> Found:
    """Search by command, unless the folder has this search, and read what was found."""
    import analysis
    from analysis.metrics.pareto import hypervolume, non_dominated

    name = f"{sampler}-{seed}"
    begun = time.perf_counter()
    if not (folder / "results" / name / "best.env").exists():
        command = [
            sys.executable, "-m", "tune_cac", "search", "--trials", str(arguments.trials), "--seed", str(seed),
            "--sampler", sampler, "--name", name, "--no-controls", "--concurrency", str(arguments.concurrency),
            "--workload", arguments.workload, *(("--epochs", str(arguments.epochs)) if arguments.epochs else ()),
        ]  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    took = time.perf_counter() - begun
    trials = analysis.load(folder / "results" / name)
    ended = trials[trials["status"] == "completed"]
    within = ended[ended["accuracy_drop"] <= REFERENCE_LOSS / 2 + 1e-9]
    points = ended[["accuracy_drop", "compute_saved"]].to_numpy(float) * (-1.0, 1.0)
    return Found(
        saved=float(within["compute_saved"].max()),
        executed=float((trials["search_flops"] / trials["dense_flops"]).sum()),
        settings=len(ended) - 1,
        hypervolume=hypervolume(points[non_dominated(points)], (-REFERENCE_LOSS, 0.0)),
        wall_time_s=took,
    )


def main() -> None:
    """Run every search and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samplers", nargs="+", default=["outcomes", "tpe"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--results", type=Path, help="keep the studies in this folder")
    arguments = parser.parse_args()
    print(header("benchmarks/search_quality.py"))
    print(f"{arguments.workload}, at most {arguments.trials} trials, {arguments.concurrency} at a time")
    print(f"{'sampler':<10}{'seed':>5}{'settings':>9}{'executed':>9}{'saved':>8}{'hypervolume':>12}{'wall s':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        of: dict[str, list[Found]] = {sampler: [] for sampler in arguments.samplers}
        for seed in range(arguments.seeds):
            for sampler, runs in of.items():
                runs.append(one := found_by(sampler, seed, folder, arguments))
                print(
                    f"{sampler:<10}{seed:>5}{one.settings:>9}{one.executed:>9.2f}{one.saved:>8.1%}"
                    f"{one.hypervolume:>12.6f}{one.wall_time_s:>8.1f}",
                    flush=True,
                )
    reference = of[arguments.samplers[-1]]
    for sampler, runs in of.items():
        saved = [one.saved / other.saved for one, other in zip(runs, reference, strict=True) if other.saved > 0]
        area = [one.hypervolume / other.hypervolume for one, other in zip(runs, reference, strict=True)]
        print(
            f"{sampler}: median of {len(runs)} seeds: {median(one.executed for one in runs):.2f} dense runs, "
            f"{median(one.saved for one in runs):.1%} saved; over {arguments.samplers[-1]}: saved "
            f"{median(saved):.3f} (lowest {min(saved):.3f}), hypervolume {median(area):.3f} (lowest {min(area):.3f})"
        )


if __name__ == "__main__":
    main()
