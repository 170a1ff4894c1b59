"""The answer's words and its file, which a shell can source."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pandas as pd
import pytest

import analysis
from analysis.answer import best_env, config_of, headline, ranked_table, report_markdown
from analysis.layout import StudyInfo
from analysis.loading import to_frame
from trainables.config import TrialConfig
from trainables.gradskip import Settings
from trainables.metrics import METHOD_DEFAULTS, ROW

INFO = StudyInfo(
    space="auto_thresholds", workload="digits", epochs=30, seed=0, trials=3, allowed_drop=0.005,
    versions={"torch": "2"},
)  # fmt: skip
VARIABLES = {"CAC_VAR_START_ITR": 66, "CAC_VAR_START_THR": 0.97, "CAC_VAR_SAMPLES": 5, "CAC_BRAKING_DISTANCE": 6}


def record(number: int, accuracy: float, saved: float, role: str = "search", **config: Any) -> dict[str, Any]:
    row = {m.name: {"int64": 1, "float64": 1.0, "string": "[]"}[m.dtype] for m in ROW} | METHOD_DEFAULTS
    row |= {"accuracy": accuracy, "test_accuracy": accuracy, "compute_saved": saved}
    method = "none" if role == "baseline" else "gradskip"
    return {
        "trial": number, "role": role, "status": "completed", "error": None, "row": row,
        "config": TrialConfig(method=method, **config).to_dict(),
    }  # fmt: skip


def study(*others: dict[str, Any]) -> pd.DataFrame:
    return to_frame([record(0, 0.97, 0.0, "baseline"), *others])


def test_headline_states_what_can_be_skipped_at_what_drop() -> None:
    ranking = analysis.rank(study(record(1, 0.967, 0.31, **VARIABLES)))
    assert headline(ranking, analysis.best(ranking), 0.005) == (
        "You can skip 31.0 % of the training compute at a drop of 0.30 points in validation accuracy "
        "(allowed: 0.50 points). One seed, not confirmed."
    )


def test_headline_when_nothing_saves() -> None:
    ranking = analysis.rank(study(record(1, 0.9, 0.5, **VARIABLES)))
    assert headline(ranking, analysis.best(ranking), 0.005) == (
        "No setting tried saves compute within the allowed drop of 0.50 points."
    )


def test_headline_without_baseline_or_trials() -> None:
    alone = analysis.rank(to_frame([record(1, 0.9, 0.5)]))
    assert headline(alone, analysis.best(alone), 0.005).startswith("The baseline did not complete")
    nothing = analysis.rank(to_frame([]))
    assert headline(nothing, None, 0.005) == "No trial has completed, so there is nothing to rank."


def source(text: str, **environment: str) -> dict[str, str]:
    """The CAC_* variables of a shell that has sourced the text."""
    done = subprocess.run(
        ["sh", "-c", 'eval "$TEXT"; env'],
        env={"PATH": os.environ["PATH"], "TEXT": text, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.partition("=") for line in done.stdout.splitlines() if line.startswith("CAC_")]
    return {name: value for name, _, value in lines}


def test_best_env_sourced_gives_the_best_settings_back() -> None:
    ranking = analysis.rank(study(record(1, 0.967, 0.31, **VARIABLES), record(2, 0.97, 0.2)))
    text = best_env(INFO, analysis.best(ranking), 0.005)
    found = Settings.from_environment(source(text))
    assert found == Settings(start_itr=66, start_thr=0.97, samples=5, braking_distance=6)


def test_best_env_overrules_manual_lists_left_in_the_shell() -> None:
    ranking = analysis.rank(study(record(1, 0.967, 0.31, **VARIABLES)))
    text = best_env(INFO, analysis.best(ranking), 0.005)
    left = {"CAC_STOP_LAYER_NUM": "3", "CAC_STOP_LAYER_ITR": "1"}
    assert Settings.from_environment(source(text, **left)).mode == "auto"


def test_best_env_is_off_when_nothing_saves() -> None:
    ranking = analysis.rank(study(record(1, 0.5, 0.5, **VARIABLES)))
    text = best_env(INFO, analysis.best(ranking), 0.005)
    assert Settings.from_environment(source(text)).mode == "off"
    assert "Nothing tried saves compute" in text


@pytest.mark.parametrize(
    "config",
    [
        VARIABLES,
        {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (5, 6)},
        {"CAC_VAR_MT_COUNT_THR": 3, "CAC_VAR_START_THR": 1.0, "CAC_VAR_SLOPE_THR": 1.0},
    ],
)
def test_a_config_survives_the_frame(config: dict[str, Any]) -> None:
    trials = study(record(1, 0.9, 0.1, **config), record(2, 0.9, 0.1))
    assert config_of(trials.iloc[1]) == TrialConfig(**config)


def test_the_table_always_shows_the_baseline_and_hides_the_test_split() -> None:
    ranking = analysis.rank(study(*(record(n, 0.97, n / 10, **VARIABLES) for n in range(1, 6))))
    table = ranked_table(ranking, top=2)
    assert [row[1] for row in table[1:]] == ["5", "4", "0 (baseline)"]
    assert "test acc." not in table[0]
    assert "test acc." in ranked_table(ranking, test=True)[0]


def test_the_report_shows_test_accuracy_and_failures() -> None:
    failed = {"trial": 2, "role": "search", "status": "failed", "error": "ValueError: no", "row": {}, "config": {}}
    trials = study(record(1, 0.967, 0.31, **VARIABLES), failed)
    ranking = analysis.rank(trials)
    text = report_markdown(INFO, trials, ranking, analysis.best(ranking), 0.005)
    assert "On the test split, which no choice was made by: 0.9670, baseline 0.9700." in text
    assert "- trial 2: ValueError: no" in text
    assert "export CAC_VAR_START_THR=0.97" in text


def test_units_and_directions_travel_with_the_frame() -> None:
    columns = study().attrs["columns"]
    assert columns["accuracy"]["direction"] == "max"
    assert columns["train_time_s"]["unit"] == "seconds"
