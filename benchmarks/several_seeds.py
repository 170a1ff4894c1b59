"""Measure what a recommendation from several seeds saves and loses on other seeds.

    python benchmarks/several_seeds.py [--seeds 5] [--groups 2] [--fresh 10] [--workload digits]
                                       [--option NAME=VALUE ...] [--epochs N] [--results FOLDER]

Each group of seeds is searched by ``python -m tune_cac recommend --seeds N``; what that prints is trained, and the run
without it, on fresh seeds that no search has seen. ``executed`` is what the searches trained, in full trainings,
``loss`` the mean of validation and test loss in points with its standard deviation over the fresh seeds, ``kept`` the
share of them on which that is within the allowed loss, half a point. Searches that a folder has are not run again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

from fresh_seeds import fresh_losses, fresh_seeds, share_kept
from machine import header

from analysis.presentation.length_text import EPOCHS_VARIABLE
from trainables.config import TrialConfig
from tune_cac.study.fixed_params import read_assignments


def main() -> None:
    """Search, train on fresh seeds and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--fresh", type=int, default=10)
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--results", type=Path, help="keep the studies in this folder")
    arguments = parser.parse_args()
    print(header("benchmarks/several_seeds.py"))
    print(f"{arguments.workload}, {arguments.seeds} seeds each")
    run = {"workload": arguments.workload, "workload_options": tuple(arguments.option)}
    how = [f"--workload={arguments.workload}", *(text for one in arguments.option for text in ("--option", one))]
    how += [] if arguments.epochs is None else [f"--epochs={arguments.epochs}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for group in range(arguments.groups):
            first = group * arguments.seeds
            done = subprocess.run(
                [
                    sys.executable, "-m", "tune_cac", "recommend", f"--seeds={arguments.seeds}", f"--seed={first}",
                    "--name=r", *how,
                ],
                cwd=folder, capture_output=True, text=True, check=True,
            )  # fmt: skip
            said = dict(re.findall(r"export (\w+)=(\S+)", done.stdout))
            (executed,) = re.findall(r"seeds for ([\d.]+) full", done.stderr)
            (epochs,) = map(int, re.findall(r", (\d+) epochs?", done.stdout.splitlines()[0]))
            own = int(said.pop(EPOCHS_VARIABLE, epochs))
            settings = read_assignments(f"{name}={value}" for name, value in said.items())
            answer = TrialConfig(**run, epochs=own, method="gradskip", **settings)
            found = fresh_losses(answer, epochs, fresh_seeds(first, arguments.fresh), folder)
            losses, saved = zip(*found, strict=True)
            spread = stdev(losses) if len(losses) > 1 else 0.0
            print(
                f"seeds {first} to {first + arguments.seeds - 1}: executed {executed}, {own} of {epochs} epochs, "
                f"saved {fmean(saved):.1%}, loss {100 * fmean(losses):.2f} +- {100 * spread:.2f} points, "
                f"kept {share_kept(losses):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
