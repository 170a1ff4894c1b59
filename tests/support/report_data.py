"""What a report is made of, invented: a study in which a deeper and earlier stop saves more and costs accuracy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
from studies import result_row

from analysis.io.studies import to_frame
from analysis.io.study_files import StudyInfo
from analysis.metrics.accounting import search_cost
from analysis.metrics.ranking import best, rank
from analysis.presentation.best_env import best_env
from analysis.presentation.html import ReportData
from analysis.presentation.markdown_report import search_cost_line
from analysis.presentation.summary_text import headline
from trainables.config import TrialConfig

LAYERS = tuple(f"features.{n}.weight" for n in range(0, 18, 3))
STEPS, EPOCHS = 300, 30
DENSE_FLOPS = 10**9


def report_data(trials: int = 60, *, seed: int = 0, allowed_drop: float = 0.005, **more: Any) -> ReportData:
    """A study of so many trials with everything that a report can show; ``more`` replaces fields."""
    rng = np.random.default_rng(seed)
    frame = to_frame([_record(number, rng) for number in range(trials)])
    ranking = rank(frame, allowed_drop=allowed_drop)
    found = best(ranking)
    info = StudyInfo(
        space="auto_thresholds", workload="digits", epochs=EPOCHS, seed=seed, trials=trials, allowed_drop=allowed_drop,
        versions={"torch": "2.13.0", "ray": "2.60.0"},
    )  # fmt: skip
    values: dict[str, Any] = {
        "info": info,
        "trials": frame,
        "ranking": ranking,
        "best": found,
        "allowed_drop": allowed_drop,
        "headline": headline(ranking, found, allowed_drop),
        "cost_line": search_cost_line(search_cost(frame)),
        "best_env": best_env(info, found, allowed_drop),
        "controls": controls(),
        "confirmation": confirmation(ranking),
        "stages": stages(),
        "environment": {"Python": "3.11.7", "machine": "AMD EPYC, 2 cores"},
    }
    return ReportData(**{**values, **more})


def stages(name: str = "conv1.weight") -> pd.DataFrame:
    """A stage tree of two stages, as `analysis.stage_frame` returns it."""
    common = {"root": "0" * 24, "known_until": 300, "checkpoints": 1, "checkpoint_steps": (0,), "ends": (0,)}
    frame = pd.DataFrame(
        [{**common, "stage": "a", "parent": None, "depth": 0, "begin": None, "action": "dense run", "trials": (0, 1),
          "saved": 0.0, "accuracy": 0.97},
         {**common, "stage": "b", "parent": "a", "depth": 1, "begin": 116, "action": f"stop through {name}",
          "trials": (1,), "saved": 0.3, "accuracy": 0.96}]
    )  # fmt: skip
    frame.attrs = {"total_steps": 300}
    return frame


def _record(number: int, rng: np.random.Generator) -> dict[str, Any]:
    record: dict[str, Any] = {"trial": number, "role": "search", "status": "completed", "error": None}
    if number == 0:
        row = result_row(0.972, epoch=EPOCHS, step=STEPS, train_time_s=2.0)
        row |= {"backward_saved": 0.0, "gradient_bytes": 10**6, "peak_memory_bytes": 10**8}
        row |= {"dense_flops": DENSE_FLOPS, "executed_flops": DENSE_FLOPS, "search_flops": DENSE_FLOPS}
        return record | {"role": "baseline", "row": row, "config": TrialConfig(method="none").to_dict()}
    settings = {
        "CAC_VAR_START_ITR": int(rng.integers(0, 15)) * 10,
        "CAC_VAR_START_THR": round(float(rng.uniform(0.9, 1.0)), 3),
        "CAC_VAR_MT_THR": round(float(rng.uniform(0.9, 1.0)), 3),
        "CAC_VAR_SLOPE_THR": round(float(rng.uniform(0.9, 1.0)), 3),
        "CAC_VAR_SAMPLES": int(rng.integers(1, 6)) * 5,
        "CAC_BRAKING_DISTANCE": int(rng.integers(0, 10)),
    }
    config = TrialConfig(method="gradskip", **settings).to_dict()
    if number % 13 == 7:
        return record | {"status": "failed", "error": f"TrainingDiverged: loss is nan at step {number}", "row": {},
                         "config": config}  # fmt: skip
    stops = int(rng.integers(0, len(LAYERS))) if number % 5 else 0
    when = np.sort(rng.choice(np.arange(40, STEPS - 20, 5), stops, replace=False)) if stops else []
    events = [
        {"iteration": int(i), "layer": 3 * n, "name": LAYERS[n], "ratio": 0.95 - 0.01 * n,
         "rule": "start" if n == 0 else "slope"}
        for n, i in enumerate(when)
    ]  # fmt: skip
    saved = sum((STEPS - int(i)) / STEPS * 0.14 for i in when)
    accuracy = round((0.972 - 0.03 * saved**2 - abs(float(rng.normal(0, 0.002)))) * 599) / 599
    executed = round(DENSE_FLOPS * (1 - saved))
    row = result_row(accuracy, saved, epoch=EPOCHS, step=STEPS, train_time_s=2.0 * (1 - 0.9 * saved))
    row |= {"backward_saved": saved * 1.45, "dense_flops": DENSE_FLOPS, "executed_flops": executed}
    row |= {"search_flops": round(executed * 0.3), "test_quality": accuracy - 0.004}
    row |= {"gradient_bytes": round(10**6 * (1 - 1.2 * saved)), "peak_memory_bytes": round(10**8 * (1 - 0.2 * saved))}
    row |= {"stopped_through": 3 * (stops - 1) if stops else -1, "stop_events": json.dumps(events)}
    return record | {"role": "published" if number == 1 else "search", "row": row, "config": config}


def controls() -> pd.DataFrame:
    """Training shorter."""
    shares = (0.9, 0.8, 0.7, 0.6, 0.5)
    return pd.DataFrame(
        {"control": "shorter", "compute_saved": [1 - s for s in shares], "epochs": [27, 24, 21, 18, 15],
         "accuracy": [0.970, 0.969, 0.966, 0.962, 0.955]}
    )  # fmt: skip


def confirmation(ranking: pd.DataFrame) -> pd.DataFrame:
    """The first five: two confirmed."""
    top = ranking[ranking["role"] == "search"].head(5)
    drop = np.array([0.001, 0.0015, 0.003, 0.004, 0.006])[: len(top)]
    return pd.DataFrame(
        {
            "candidate": top["trial"].to_numpy(), "seeds": 5, "compute_saved": top["compute_saved"].to_numpy(),
            "accuracy_drop": drop, "drop_low": drop - 0.003, "drop_high": drop + 0.003, "drop_worst": drop + 0.002,
            "confidence": 0.95,
            "confirmed": drop + 0.003 <= 0.005,
        }
    )  # fmt: skip
