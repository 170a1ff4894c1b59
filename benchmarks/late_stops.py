"""Measure what stops and shorter runs lose on average over seeds: late or early, of few or all layers, at many lengths.

    python benchmarks/late_stops.py [--seeds 16] [--first 20] [--outcomes '30 dense' '24 late 0.5' ...]
                                    [--baselines 100] [--rows FILE]

Trainings of digits, six convolutions of 18 parameters. ``late A``: layers 1, 3, 5, 6 and those before them stop at A,
A + 0.1, A + 0.2, A + 0.3 of the run; ``all T``: all of them at T; ``half T``: the first three at T; ``five T``: all
but the last at T; ``dense``: none. Printed: compute saved, mean loss of validation and test accuracy against 30 dense
epochs of the same seed with its standard deviation over seeds, in points, and the share of the seeds on which it is
within half a point. A shorter run shares nothing with the baseline of its seed, so it is compared with further
baselines, too (all pairs; `against_all`, `kept_all`): the seeds' own are few. Then how well the losses are
explained by the square of the compute saved (least squares without a constant). Rows that a file has already are not
trained again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import header
from trainings import fresh_seeds, last_row, share_kept

from trainables.config import TrialConfig

FULL, STEPS_PER_EPOCH = 30, 10
#: Last parameter of each convolution's unit.
UNITS = (2, 5, 8, 11, 14, 17)


def outcomes() -> Iterator[tuple[int, str, tuple[tuple[int, float], ...]]]:
    """Yield epochs, name, and (last parameter stopped, share of the run) of each stop."""
    for epochs in (30, 24, 21, 18, 16, 15, 14, 13, 12):
        yield epochs, "dense", ()
    late = {30: (0.2, 0.35, 0.5), 24: (0.2, 0.35, 0.5), 18: (0.2, 0.3, 0.35, 0.5), 16: (0.2, 0.35, 0.5)}
    late |= dict.fromkeys((15, 14, 13, 12), (0.5, 0.6))
    at_once = {30: (0.3, 0.45, 0.6), 24: (0.3, 0.45, 0.6), 18: (0.3, 0.45, 0.5, 0.6), 16: (0.3, 0.45, 0.6)}
    at_once |= dict.fromkeys((15, 14, 13, 12), (0.6, 0.7, 0.8))
    for epochs in late:
        for when in late[epochs]:
            yield epochs, f"late {when}", tuple((unit, when + 0.1 * n) for n, unit in enumerate((2, 8, 14, 17)))
        for when in at_once[epochs]:
            yield epochs, f"all {when}", ((17, when),)
        if epochs >= 16:
            yield from ((epochs, f"half {when}", ((8, when),)) for when in (0.05, 0.2))
            yield from ((epochs, f"five {when}", ((14, when),)) for when in (0.15, 0.3))


def trained(epochs: int, stops: tuple[tuple[int, float], ...], seed: int) -> dict[str, Any]:
    """Return accuracies and compute saved of one training."""
    method: dict[str, Any] = {"method": "none"}
    if stops:
        iterations = tuple(max(1, round(when * epochs * STEPS_PER_EPOCH)) for _, when in stops)
        layers = tuple(unit for unit, _ in stops)
        method = {"method": "gradskip", "CAC_STOP_LAYER_NUM": layers, "CAC_STOP_LAYER_ITR": iterations}
    row = last_row(TrialConfig(epochs=epochs, seed=seed, **method))
    saved = 1 - epochs / FULL * (1 - row["compute_saved"])
    return {"saved": saved, "quality": row["quality"], "test_quality": row["test_quality"]}


def explained(values: np.ndarray, losses: np.ndarray) -> str:
    """Return slopes, correlation and root mean square error of a least-squares fit without a constant."""
    slopes = np.linalg.lstsq(values, losses, rcond=None)[0]
    fitted = values @ slopes
    error = np.sqrt(np.mean((losses - fitted) ** 2))
    return (
        f"slopes {np.round(slopes, 2)}, correlation {np.corrcoef(losses, fitted)[0, 1]:.2f}, error {error:.2f} points"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--outcomes", nargs="+", help="epochs and names of those to train; by default all")
    parser.add_argument("--baselines", type=int, default=100, help="further ones, of seeds of their own")
    parser.add_argument("--rows", type=Path, help="JSON lines of what was trained, to go on with")
    arguments = parser.parse_args()
    print(header("benchmarks/late_stops.py"), f"| digits, {arguments.seeds} seeds from {arguments.first} on")
    known = arguments.rows.read_text().splitlines() if arguments.rows and arguments.rows.exists() else []
    rows = {(row["seed"], row["epochs"], row["name"]): row for row in map(json.loads, known)}
    wanted = range(arguments.first, arguments.first + arguments.seeds)
    further = fresh_seeds(0, arguments.baselines)
    for seed in (*wanted, *further):
        for epochs, name, stops in outcomes():
            asked_for = arguments.outcomes is None or f"{epochs} {name}" in arguments.outcomes
            if seed in further:
                asked_for = (epochs, name) == (FULL, "dense")
            if asked_for and (seed, epochs, name) not in rows:
                row = {"seed": seed, "epochs": epochs, "name": name, **trained(epochs, stops, seed)}
                rows[seed, epochs, name] = row
                if arguments.rows:
                    with arguments.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    table = pd.DataFrame([row for row in rows.values() if row["seed"] in wanted])
    if arguments.outcomes is not None:
        table = table[(table["epochs"].astype(str) + " " + table["name"]).isin(arguments.outcomes)]
    table["quality"] = 50 * (table["quality"] + table["test_quality"])
    own = table[(table["epochs"] == FULL) & (table["name"] == "dense")].set_index("seed")["quality"]
    table["loss"] = table["seed"].map(own) - table["quality"]
    baselines = np.array([
        50 * (rows[seed, FULL, "dense"]["quality"] + rows[seed, FULL, "dense"]["test_quality"]) for seed in further
    ])  # fmt: skip
    for kind, values in (("these seeds'", own.to_numpy()), ("further", baselines)):
        print(f"{kind} baselines: {values.mean():.2f} %, standard error {values.std(ddof=1) / len(values) ** 0.5:.2f}")

    def told(runs: pd.DataFrame) -> pd.Series:
        cut = runs["epochs"].iloc[0] < FULL and len(baselines) > 0
        losses = (baselines[:, None] - runs["quality"].to_numpy()).ravel() if cut else runs["loss"].to_numpy()
        kept = share_kept(runs["loss"] / 100)
        return pd.Series({
            "saved": runs["saved"].mean(), "loss": runs["loss"].mean(), "spread": runs["loss"].std(), "kept": kept,
            "against_all": losses.mean(), "kept_all": share_kept(losses / 100),
        })  # fmt: skip

    found = table.groupby(["epochs", "name"])[["epochs", "saved", "quality", "loss"]].apply(told).reset_index()
    print(found.sort_values("saved").to_string(index=False, float_format="{:.2f}".format))
    print("by its square:", explained(found[["saved"]].to_numpy(float) ** 2, found["against_all"].to_numpy(float)))


if __name__ == "__main__":
    main()
