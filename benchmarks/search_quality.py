"""Measure the cost and the quality of a search's answer, by way of searching and seed.

    python benchmarks/search_quality.py [--searches lengths auto tpe] [--trials 100] [--seeds 10] [--concurrency 2]
                                        [--space auto_thresholds] [--workload digits] [--option NAME=VALUE ...]
                                        [--data FOLDER] [--model NAME] [--epochs N] [--answer-seeds 4] [--fresh 0]
                                        [--same-fresh] [--allowed 0.005] [--equal-compute] [--results FOLDER]

Each search is a command of its own. ``lengths`` is the default search, with cut dense runs and all controls, whose cost
counts; ``auto`` the default on runs of full length, without controls;
the others (``tpe``, ``random``, ``gp``, ``nsga2``) are samplers of Optuna over our stage tree, without controls, and
``asha`` is Ray's scheduler without that tree (``asha_search.py``, always with ``--equal-compute``). With
``--equal-compute`` all but the first search named may execute what the first one did.

``answer`` is what the setting handed out saves of the compute that the study ranks by, which is training's unless the
``--space`` joins another (``--answer-seeds``: of ours, others have one), ``most`` that of the setting that saves most
within the allowed loss on the search's own seed, which others hand out; ``executed`` is what the search trained, in
dense runs, its baseline included; ``hypervolume`` is that of the front above no saving and twice the allowed loss,
``area`` the same with gains over the baseline counted as no loss. With ``--fresh N`` every answer and its baseline are
trained on N fresh seeds, others for each search unless ``--same-fresh``: ``loss`` is the mean of validation and test
loss over them, in points, ``kept`` the share of these seeds on which that mean is within the allowed loss; an answer
that saves nothing loses nothing. ``low`` and ``high`` are the ends of the interval that comes with the answer, in
points.
The lines at the end are medians over the searches' seeds, with ratios to the last one named, seed by seed.
Searches that a folder has already are not run again.
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
from statistics import fmean, median

import numpy as np
from machine import header
from numpy.typing import NDArray
from trainings import ALLOWED, fresh_losses, fresh_seeds, share_kept

from trainables.config import TrialConfig
from trainables.workloads import default_epochs

#: What is searched.
SPACE = "auto_thresholds"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of one search."""

    saved: float
    """By the answer, a fraction."""
    most: float
    """By the setting within the allowed loss that saves most, a fraction."""
    executed: float
    """Compute that the search trained, in dense runs."""
    settings: int
    """Trials that completed, without the baseline and controls."""
    hypervolume: float
    """Of the front, above no saving at the reference loss."""
    area: float
    """The same with a gain over the baseline, which is noise of the seed, counted as no loss."""
    wall_time_s: float
    """From the command's start to its end; 0 for a search that was there before."""
    loss: float
    """Mean loss of the answer on fresh seeds, a fraction; NaN without them."""
    kept: float
    """Share of the fresh seeds on which the answer's loss is within the allowed one; NaN without them."""
    low: float = float("nan")
    """Ends of the answer's interval, fractions; NaN without seeds of its own."""
    high: float = float("nan")


def run(folder: Path, *arguments: str) -> None:
    """Run a command of tune_cac in a folder."""
    subprocess.run([sys.executable, "-m", "tune_cac", *arguments], cwd=folder, check=True, capture_output=True)


def found_by(kind: str, seed: int, folder: Path, arguments: argparse.Namespace, budget: float | None) -> Found:
    """Search by command, unless the folder has this search, and read what was found.

    Args:
        kind: way of searching.
        seed: of the search.
        folder: that keeps the studies.
        arguments: of the command line.
        budget: full trainings that may be executed; None for no limit.
    """
    import analysis
    from analysis.io.study_files import Layout
    from analysis.presentation.summary_text import config_of
    from tune_cac.study.study_result import answer

    if kind == "asha":
        assert arguments.space == SPACE, f"asha_search.py searches {SPACE} alone"
        return found_by_asha(seed, folder, arguments, budget)
    name = f"{kind}-{seed}" if budget is None else f"{kind}-equal-{seed}"
    name += "" if arguments.space == SPACE else "-" + arguments.space.replace("+", "_")  # names have no plus
    study, begun, wall_time_s = folder / "results" / name, time.perf_counter(), 0.0
    if not (study / "best.env").exists():
        ours = kind == "lengths"
        how = ("--sampler", "auto") if ours else ("--sampler", kind, "--no-controls")
        how = ("--space", arguments.space, *how)
        given = {"--data": arguments.data, "--model": arguments.model, "--epochs": arguments.epochs}
        run(
            folder, "search", "--trials", str(arguments.trials), "--seed", str(seed), "--name", name, *how,
            "--concurrency", str(arguments.concurrency), "--workload", arguments.workload,
            "--allowed-drop", str(arguments.allowed),
            *(text for flag, value in given.items() if value is not None for text in (flag, str(value))),
            *(text for value in arguments.option for text in ("--option", value)),
            *(() if budget is None else ("--cost-budget", f"{budget:.3f}")),
            "--seeds", str(arguments.answer_seeds if ours else 1),
        )  # fmt: skip
        wall_time_s = time.perf_counter() - begun
    found = answer(Layout(study), allowed_drop=arguments.allowed)
    trials, best = found.trials, found.best
    ended = trials[(trials["status"] == "completed") & (trials["role"] != "control")]
    within = ended[ended["accuracy_drop"] <= arguments.allowed + 1e-9]
    points = ended[["accuracy_drop", "saved"]].to_numpy(float) * (-1.0, 1.0)
    saved, loss, kept = 0.0, 0.0, 1.0  # no answer: the user's own run
    if best is not None:
        saved = float(best["saved"])
        loss, kept = on_fresh_seeds(config_of(best), saved, seed, folder, arguments)
    handed = found.answer
    low, high = (handed.low, handed.high) if handed is not None and handed.low is not None else (np.nan, np.nan)
    return Found(
        saved=saved,
        most=float(within["saved"].max()),
        executed=analysis.search_cost(trials).dense_equivalents,
        settings=len(ended) - 1,
        hypervolume=hypervolume_of(points, arguments.allowed),
        area=hypervolume_of(np.minimum(points, (0.0, np.inf)), arguments.allowed),
        wall_time_s=wall_time_s,
        loss=loss,
        kept=kept,
        low=low,
        high=high if high is not None else np.nan,
    )


def hypervolume_of(points: NDArray[np.float64], allowed: float) -> float:
    """Return the hypervolume of (n, 2) points, loss negated and saving, above no saving at twice the allowed loss."""
    from analysis.metrics.pareto import hypervolume, non_dominated

    return hypervolume(points[non_dominated(points)], (-2 * allowed, 0.0))


def found_by_asha(seed: int, folder: Path, arguments: argparse.Namespace, budget: float | None) -> Found:
    """Search by ASHA in a process of its own, unless the folder has this search, and read what was found."""
    assert budget is not None, "asha needs --equal-compute and another search before it"
    file, begun, wall_time_s = folder / f"asha-equal-{seed}.json", time.perf_counter(), 0.0
    if not file.exists():
        script = Path(__file__).with_name("asha_search.py")
        epochs = () if arguments.epochs is None else ("--epochs", str(arguments.epochs))
        given = {"data": arguments.data, "model": arguments.model}
        options = [*arguments.option, *(f"{name}={value}" for name, value in given.items() if value is not None)]
        subprocess.run(
            [
                sys.executable, str(script), str(file), "--budget", f"{budget:.3f}", "--seed", str(seed), "--workload",
                arguments.workload, *(text for value in options for text in ("--option", value)), *epochs,
                "--concurrency", str(arguments.concurrency),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        wall_time_s = time.perf_counter() - begun
    told = json.loads(file.read_text())
    points = np.array([(-one["loss"], one["saved"]) for one in told["rows"]])
    saved = float(points[points[:, 0] >= -arguments.allowed - 1e-9, 1].max())
    loss, kept = on_fresh_seeds(TrialConfig.from_mapping(told["answer"]), saved, seed, folder, arguments)
    return Found(
        saved=saved,
        most=saved,
        executed=told["executed"],
        settings=len(points) - 1,
        hypervolume=hypervolume_of(points, arguments.allowed),
        area=hypervolume_of(np.minimum(points, (0.0, np.inf)), arguments.allowed),
        wall_time_s=wall_time_s,
        loss=loss,
        kept=kept,
    )


def on_fresh_seeds(
    answer: TrialConfig, saved: float, seed: int, folder: Path, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Return mean loss and share within the allowed loss of an answer on fresh seeds; NaN for no seeds."""
    if arguments.fresh == 0:
        return float("nan"), float("nan")
    if saved <= 0:
        return 0.0, 1.0
    epochs = (
        default_epochs(answer.workload, answer.workload_options or ()) if arguments.epochs is None else arguments.epochs
    )
    seeds = fresh_seeds(0 if arguments.same_fresh else seed, arguments.fresh)
    found = fresh_losses(answer, epochs, seeds, folder, arguments.concurrency)
    losses = [loss for loss, _ in found]
    return fmean(losses), share_kept(losses, arguments.allowed)


def shown(ratios: list[float]) -> str:
    """Return median and least ratio to a reference; a dash where that never found anything."""
    return f"{median(ratios):.3f} (lowest {min(ratios):.3f})" if ratios else "-"


def main() -> None:
    """Run every search and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--searches", nargs="+", default=["lengths", "auto", "tpe"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--space", default=SPACE)
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--data")
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--answer-seeds", type=int, default=4, help="seeds of our searches' answers")
    parser.add_argument("--fresh", type=int, default=0, help="fresh seeds on which every answer is trained again")
    parser.add_argument("--same-fresh", action="store_true", help="the same fresh seeds for the answer of every search")
    parser.add_argument("--allowed", type=float, default=ALLOWED, help="loss that is allowed, a fraction")
    parser.add_argument("--equal-compute", action="store_true", help="searches after the first execute as much as it")
    parser.add_argument("--results", type=Path, help="keep the studies in this folder")
    arguments = parser.parse_args()
    print(header("benchmarks/search_quality.py"))
    print(
        f"{arguments.space} on {arguments.workload}, at most {arguments.trials} trials, "
        f"{arguments.concurrency} at a time"
    )
    print(
        f"{'search':<9}{'seed':>5}{'settings':>9}{'executed':>9}{'answer':>8}{'most':>7}{'hypervolume':>12}{'loss':>7}{'kept':>6}{'low':>7}{'high':>6}"
        f"{'wall s':>8}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        of: dict[str, list[Found]] = {kind: [] for kind in arguments.searches}
        for seed in range(arguments.seeds):
            budget = None
            for kind, runs in of.items():
                runs.append(one := found_by(kind, seed, folder, arguments, budget))
                budget = (budget or one.executed) if arguments.equal_compute else None
                print(
                    f"{kind:<9}{seed:>5}{one.settings:>9}{one.executed:>9.2f}{one.saved:>8.1%}{one.most:>7.1%}"
                    f"{one.hypervolume:>12.6f}{100 * one.loss:>7.2f}{one.kept:>6.0%}"
                    f"{100 * one.low:>7.2f}{100 * one.high:>6.2f}{one.wall_time_s:>8.1f}",
                    flush=True,
                )
    reference = of[arguments.searches[-1]]
    for kind, runs in of.items():
        saved = [one.saved / other.saved for one, other in zip(runs, reference, strict=True) if other.saved > 0]
        most = [one.most / other.most for one, other in zip(runs, reference, strict=True) if other.most > 0]
        pairs = [(one, other) for one, other in zip(runs, reference, strict=True) if other.saved > 0]
        volumes = [one.hypervolume / other.hypervolume for one, other in pairs]
        areas = [one.area / other.area for one, other in pairs]
        executed, shares = [one.executed for one in runs], [one.saved for one in runs]
        print(
            f"{kind}, {len(runs)} seeds: median {median(executed):.2f} dense runs ({min(executed):.2f} to "
            f"{max(executed):.2f}); answer saves {median(shares):.1%}, mean {fmean(shares):.1%}; over "
            f"{arguments.searches[-1]}: answer median {shown(saved)}, most within on its seed {shown(most)}, "
            f"hypervolume {shown(volumes)}, area {shown(areas)}"
            + (f"; fresh seeds: loss {100 * fmean(one.loss for one in runs):.2f} points, kept "
               f"{fmean(one.kept for one in runs):.0%}; mean within for "
               f"{sum(one.loss <= arguments.allowed for one in runs)}, in "
               f"the interval for {sum(one.low <= one.loss <= one.high for one in runs)}" if arguments.fresh else "")
        )  # fmt: skip


if __name__ == "__main__":
    main()
