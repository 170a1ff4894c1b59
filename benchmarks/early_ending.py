"""Replay the rule of early ends on the epochs of studies that were trained to the end: what it would have ended.

    python benchmarks/early_ending.py STUDY [STUDY ...]

Trials are judged in their order, each against those before it that the rule did not end; the starting point and trials
beside the search are not judged. ``ended`` is the share of the judged trials that it ends; ``spared`` the compute that
these would not have trained, as a share of what all judged trials train alone; ``wrong`` are ended trials that no
remaining setting dominates at the end; ``hypervolume`` is that of the front without the ended trials over that with
them, above no saving and twice the allowed loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from machine import header

import analysis
from analysis.io.layout import Layout
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.metrics.quality import quality_of
from trainables.quality import allowed_amount
from tune_cac.tuning.early_ending import Curve, lead_over


def replayed(study: Path) -> str:
    """Return the line of a study."""
    trials, epochs = analysis.load(study), analysis.history(study)
    quality = quality_of(trials)
    done = trials[trials["status"] == "completed"].set_index("trial")
    finished: list[Curve] = []
    ended: dict[int, float] = {}
    judged = done[done["role"] == "search"].index
    for number, row in done.iterrows():
        rows = epochs[epochs["trial"] == number].set_index("epoch")
        values = dict(rows[quality.name].dropna().items())
        made = {"trial": number, "epochs": row["epochs"], "saved": row["compute_saved"]}
        whole = Curve(**made, quality=values, may_answer=row["role"] != "control")
        for epoch in range(1, int(row["epochs"])) if number in judged else ():
            so_far = {one: value for one, value in values.items() if one <= epoch}
            if lead_over(Curve(**made, quality=so_far), finished, quality) is not None:
                ended[number] = float(row["executed_flops"] - rows["executed_flops"].loc[epoch])
                break
        else:
            finished.append(whole)
    settings = done[done["role"] != "control"]
    reference = settings.loc[settings["role"] == "baseline", quality.name].iloc[0]
    worst = 2 * float(allowed_amount(Layout(study).read_info().allowed_drop, reference))

    def points(frame: pd.DataFrame) -> np.ndarray:
        return frame[[quality.drop, "compute_saved"]].to_numpy(float) * (-1.0, 1.0)

    def area(frame: pd.DataFrame) -> float:
        return hypervolume(points(frame)[non_dominated(points(frame))], (-worst, 0.0))

    left = settings.drop(index=list(ended))
    wrong = [n for n in ended if not (points(left) >= points(settings.loc[[n]])).all(axis=1).any()]
    share = sum(ended.values()) / done.loc[judged, "executed_flops"].sum()
    return (
        f"{study.name:<20}{len(judged):>7}{len(ended) / max(1, len(judged)):>7.0%}{share:>8.1%}{len(wrong):>6}"
        f"{area(left) / area(settings):>12.4f}"
    )


def main() -> None:
    """Print a line for each study."""
    parser = argparse.ArgumentParser()
    parser.add_argument("studies", type=Path, nargs="+")
    print(header("benchmarks/early_ending.py"))
    print(f"{'study':<20}{'judged':>7}{'ended':>7}{'spared':>8}{'wrong':>6}{'hypervolume':>12}")
    for study in parser.parse_args().studies:
        print(replayed(study), flush=True)


if __name__ == "__main__":
    main()
