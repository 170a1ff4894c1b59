"""How long loading takes: 100,000 trials from Parquet, and from the journal that a search writes.

    python benchmarks/load_speed.py

The study is written to a temporary folder: the rows of a journal of 10,000 trials, each line as Optuna and the search
write it (a trial is asked for, gets seven parameters, its config, folder, row and constraint, and is told), and as a
Parquet file the same rows ten times over with other numbers. Seconds are those of `analysis.load`, one run before the
clock starts. Beside it, for the journal, Optuna's own reader, which must find the same trials.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from machine import header, seconds, spread
from optuna.storages.journal import JournalFileBackend

import analysis
from analysis.io.layout import STUDY_NAME, Layout, StudyInfo
from trainables.config import TrialConfig
from trainables.metrics import ROW

IN_PARQUET, IN_JOURNAL, REPEATS = 100_000, 10_000, 5
BEGUN, ENDED = {"datetime_start": "2026-01-01T00:00:00+00:00"}, {"datetime_complete": "2026-01-01T00:01:00+00:00"}
PARAMETERS = ("START_ITR", "START_THR", "MT_COUNT_THR", "MT_THR", "SLOPE_THR", "SAMPLES", "BRAKING_DISTANCE")
DISTRIBUTION = '{"name": "FloatDistribution", "attributes": {"step": null, "low": 0.0, "high": 100.0, "log": false}}'


def result(rng: np.random.Generator) -> dict[str, Any]:
    """A trial's last row, every value another one."""
    values: dict[str, Any] = {}
    for metric in ROW:
        if metric.dtype == "string":
            values[metric.name] = f"{rng.integers(2**62):024x}"
        else:
            values[metric.name] = int(rng.integers(10**12)) if metric.dtype.lower() == "int64" else float(rng.random())
    stop = {"iteration": int(rng.integers(300)), "layer": 3, "name": "conv2.weight", "ratio": 0.97, "rule": "slope"}
    return values | {"stop_events": json.dumps([stop] * int(rng.integers(5)))}


def operations(trials: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """What a search of so many trials writes into its journal."""
    yield {"op_code": 0, "study_name": STUDY_NAME, "directions": [2, 2]}
    for number in range(trials):
        of_trial = {"trial_id": number}
        yield {"op_code": 4, "study_id": 0, **BEGUN}
        settings: dict[str, Any] = {}
        if number:
            settings = {
                f"CAC_{'' if name == 'BRAKING_DISTANCE' else 'VAR_'}{name}": int(rng.integers(1, 100))
                if name.endswith(("ITR", "COUNT_THR", "SAMPLES", "DISTANCE"))
                else float(rng.random())
                for name in PARAMETERS
            }
            for name, value in settings.items():
                at = {"param_name": name, "param_value_internal": float(value), "distribution": DISTRIBUTION}
                yield {"op_code": 5, **of_trial, **at}
        config = TrialConfig(method="gradskip" if number else "none", **settings).to_dict()
        row = result(rng)
        attrs = {"role": "search" if number else "baseline", "config": config, "folder": f"ray/{number}", "row": row}
        for name, value in attrs.items():
            yield {"op_code": 8, **of_trial, "user_attr": {name: value}}
        yield {"op_code": 9, **of_trial, "system_attr": {"constraints:accuracy_drop": 0.0}}
        yield {"op_code": 6, **of_trial, "state": 1, "values": [row["quality"], row["compute_saved"]], **ENDED}


def write_study(layout: Layout) -> None:
    """``study.json`` and the journal."""
    info = StudyInfo(
        space="auto_thresholds", workload="digits", epochs=30, seed=0, trials=IN_JOURNAL, allowed_drop=0.005,
        versions={},
    )  # fmt: skip
    layout.write_info(info)
    with layout.journal.open("w") as file:
        for operation in operations(IN_JOURNAL, np.random.default_rng(0)):
            file.write(json.dumps({"op_code": operation["op_code"], "worker_id": "w", **operation}) + "\n")


def write_parquet(layout: Layout) -> None:
    """The journal's rows several times over, noise added to their numbers."""
    rng = np.random.default_rng(1)
    one = analysis.load(layout.root)
    trials = pd.concat([one] * (IN_PARQUET // IN_JOURNAL), ignore_index=True)
    for name in trials.select_dtypes("float64"):
        trials[name] += rng.random(len(trials))
    trials["trial"] = np.arange(len(trials))
    trials.attrs = one.attrs
    trials.to_parquet(layout.trials)


def optuna_reads(layout: Layout) -> list[optuna.trial.FrozenTrial]:
    """The journal's trials by Optuna's own reader."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(layout.journal)))
    return optuna.load_study(study_name=STUDY_NAME, storage=storage).get_trials(deepcopy=False)


def main() -> None:
    """Write, measure, print."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(header("benchmarks/load_speed.py"))
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder))
        write_study(layout)
        ours, theirs = analysis.load(layout.journal), optuna_reads(layout)
        assert ours["accuracy"].tolist() == [trial.values[0] for trial in theirs]
        print(f"journal of {IN_JOURNAL} trials, {layout.journal.stat().st_size / 1e6:.0f} MB")
        times = seconds(lambda: analysis.load(layout.journal), REPEATS)
        print(f"  seconds: {spread(times)}; trials a second: {spread([IN_JOURNAL / t for t in times])}")
        print(f"  Optuna's own reader alone, seconds: {spread(seconds(lambda: optuna_reads(layout), 3))}")
        write_parquet(layout)
        loaded = analysis.load(layout.root)
        print(f"Parquet of {len(loaded)} trials, {layout.trials.stat().st_size / 1e6:.0f} MB")
        print(f"  seconds: {spread(seconds(lambda: analysis.load(layout.root), REPEATS))}")


if __name__ == "__main__":
    main()
