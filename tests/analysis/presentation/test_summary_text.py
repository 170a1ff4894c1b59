"""The answer's words and its file, which a shell can source."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest

import analysis
import search_spaces
from analysis.io.layout import StudyInfo
from analysis.io.studies import to_frame
from analysis.metrics.noise import with_holds
from analysis.presentation.markdown_report import ranked_table, report_markdown, stop_table
from analysis.presentation.summary_text import best_env, config_of, headline, settings_text
from search_spaces import SpaceContext
from trainables.config import TrialConfig
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import RULES
from trainables.metrics import METHOD_DEFAULTS, MODEL_DEFAULTS, ROW

INFO = StudyInfo(
    space="auto_thresholds", workload="digits", epochs=30, seed=0, trials=3, allowed_drop=0.005,
    versions={"torch": "2"},
)  # fmt: skip
VARIABLES = {"CAC_VAR_START_ITR": 66, "CAC_VAR_START_THR": 0.97, "CAC_VAR_SAMPLES": 5, "CAC_BRAKING_DISTANCE": 6}
LINEAR = {
    "CAC_RULE": "linear", "CAC_RULE_START_ITR": 20, "CAC_RULE_END_ITR": 300, "CAC_RULE_DEPTH": 0.5,
    "CAC_WHOLE_UNITS": True, "CAC_BRAKING_DISTANCE": 6,
}  # fmt: skip


def record(number: int, accuracy: float, saved: float, role: str = "search", **config: Any) -> dict[str, Any]:
    kinds = {"int64": 1, "Int64": 1, "float64": 1.0, "string": "[]"}
    row = {m.name: kinds[m.dtype] for m in ROW} | MODEL_DEFAULTS | METHOD_DEFAULTS
    row |= {"quality": accuracy, "test_quality": accuracy, "compute_saved": saved, "train_time_s": 1 - saved}
    method = "none" if role == "baseline" else "gradskip"
    return {
        "trial": number, "role": role, "status": "completed", "error": None, "row": row,
        "config": TrialConfig(method=method, **config).to_dict(),
    }  # fmt: skip


def study(*others: dict[str, Any]) -> pd.DataFrame:
    return to_frame([record(0, 0.97, 0.0, "baseline"), *others])


def test_headline_says_why_nothing_is_saved_and_only_then() -> None:
    why = "weight decay is 0: --space stop_rules works"
    saves = analysis.rank(study(record(1, 0.97, 0.3)), allowed_drop=0.01)
    assert "eight decay" not in headline(saves, analysis.best(saves), 0.01, why_little=why)
    nothing = analysis.rank(study(record(1, 0.97, 0.0)), allowed_drop=0.01)
    assert headline(nothing, analysis.best(nothing), 0.01, why_little=why) == (
        "No setting tried saves compute within the allowed accuracy loss of 1.00 points. Weight decay is 0: --space "
        "stop_rules "
        "works."
    )


def test_headline_states_what_can_be_skipped_at_what_drop() -> None:
    ranking = analysis.rank(study(record(1, 0.967, 0.31, **VARIABLES)))
    assert headline(ranking, analysis.best(ranking), 0.005) == (
        "You can skip 31.0 % of the training compute at a loss of 0.30 points in validation accuracy "
        "(allowed: 0.50 points). One seed, not confirmed."
    )


def test_a_baseline_that_lost_its_last_reports_is_doubted() -> None:
    far_better = analysis.rank(study(record(1, 0.9701 + 0.05, 0.3)))
    best = analysis.best(far_better)
    assert "Doubtful: so much better than the baseline's 0.9700 that" in headline(far_better, best, 0.005)
    assert "Doubtful" not in headline(far_better, best, 0.006)
    trial, baseline = record(1, 0.97, 0.3), record(0, 0.97, 0.0, "baseline")
    baseline["row"]["epoch"], trial["row"]["epoch"] = 29, 30
    ranking = analysis.rank(to_frame([baseline, trial]))
    said = headline(ranking, analysis.best(ranking), 0.005)
    assert "Doubtful: the baseline reported 29 epochs and other trials 30, so its last report was lost" in said


def test_the_answer_holds_on_another_seed_and_what_saves_more_but_does_not_is_told() -> None:
    """Trial 2 saves most and is too unsure; of trial 3 no probability is known."""
    trials = study(record(1, 0.967, 0.31, **VARIABLES), record(2, 0.967, 0.5, **VARIABLES), record(3, 0.97, 0.2))
    ranking = with_holds(analysis.rank(trials), {"1": 0.704, "2": 0.48})
    assert int(analysis.best(ranking)["trial"]) == int(analysis.best(ranking, sure=0.4)["trial"]) == 2
    best = analysis.best(ranking, sure=0.65)
    assert headline(ranking, best, 0.005, sure=0.65) == (
        "You can skip 31.0 % of the training compute at a loss of 0.30 points in validation accuracy "
        "(allowed: 0.50 points). One seed, not confirmed; on another it stays within that with a probability of 70 %. "
        "Trial 2 saves 50.0 % here, but would hold elsewhere with 48 % alone."
    )
    assert "# One seed, not confirmed; on another it stays within that with a probability of 70 %." in best_env(
        INFO, best, 0.005
    )
    assert int(analysis.best(ranking, sure=0.8)["trial"]) == 3  # of which nothing is known
    assert "One seed, not confirmed. Trial 2 saves" in headline(
        ranking, analysis.best(ranking, sure=0.8), 0.005, sure=0.8
    )
    assert headline(ranking, analysis.best(ranking, sure=0.4), 0.005, sure=0.4).endswith("a probability of 48 %.")
    heads, *rows = ranked_table(ranking)
    column = heads.index("other seeds")
    assert [row[column] for row in rows] == ["48 %", "70 %", "", ""]
    assert "other seeds" not in ranked_table(with_holds(analysis.rank(trials), {}))[0]


def test_what_is_too_unsure_to_be_an_answer_is_not_said_to_save_nothing() -> None:
    trials = study(record(1, 0.967, 0.3, **VARIABLES), record(2, 0.9675, 0.2, **{**VARIABLES, "CAC_VAR_SAMPLES": 3}))
    trials["stage"] = ["dense", "a", "b"]  # no duplicates
    for price in (None, 0.1):
        ranking = with_holds(analysis.rank(trials, price=price), {"1": 0.45, "2": 0.48})
        best = analysis.best(ranking, sure=0.5)
        assert headline(ranking, best, 0.005, sure=0.5) == (
            "No setting tried saves compute and is sure enough to hold on another seed. Trial 1 saves 30.0 % here, but "
            "would hold elsewhere with 45 % alone."
        )
        assert (
            "# Nothing tried saves compute within the allowed accuracy loss of 0.50 points and is sure enough to hold "
            "on another seed: off."
        ) in best_env(INFO, best, 0.005)
    refuted = pd.DataFrame({"candidate": [1], "refuted": [True], "confirmed": [False]})
    assert "Trial 2 saves 20.0 % here" in headline(ranking, best, 0.005, confirmation=refuted, sure=0.5)
    dear = with_holds(
        analysis.rank(study(record(1, 0.967, 0.35), record(2, 0.97, 0.3)), price=0.5), {"1": 0.85, "2": 0.95}
    )
    assert "Trial 1 saves" not in headline(dear, analysis.best(dear, sure=0.5), 0.005, sure=0.5)  # it is sure, and dear


def test_headline_when_nothing_saves() -> None:
    ranking = analysis.rank(study(record(1, 0.9, 0.5, **VARIABLES)))
    assert headline(ranking, analysis.best(ranking), 0.005) == (
        "No setting tried saves compute within the allowed accuracy loss of 0.50 points."
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


#: A shell in which every variable is left over: some would win, some be ignored, some be refused.
LEFT_OVER = {
    "CAC_STOP_LAYER_NUM": "3", "CAC_STOP_LAYER_ITR": "1", "CAC_RULE": "plasticity", "CAC_RULE_START_ITR": "900",
    "CAC_RULE_END_ITR": "9", "CAC_RULE_DEPTH": "0.3", "CAC_RULE_CUBIC": "1", "CAC_RULE_SCALED": "1",
    "CAC_RULE_INTERVAL": "7", "CAC_RULE_PERCENTILE": "3", "CAC_RULE_TOLERANCE": "0.7", "CAC_RULE_WINDOW": "x",
    "CAC_WATCH": "linear,Bottleneck", "CAC_WHOLE_UNITS": "1", "CAC_NORM_STATISTICS": "hold",
    "CAC_PREFIX_AUTOGRAD": "0", "CAC_VAR_START_ITR": "1", "CAC_VAR_START_THR": "-1", "CAC_VAR_MT_COUNT_THR": "1",
    "CAC_VAR_MT_THR": "7", "CAC_VAR_SLOPE_THR": "0.1", "CAC_VAR_SAMPLES": "3", "CAC_BRAKING_DISTANCE": "99",
}  # fmt: skip


def samples() -> list[dict[str, Any]]:
    """Configurations of every space, and some that no space suggests."""
    found: list[dict[str, Any]] = [
        {"CAC_VAR_SAMPLES": 3, "CAC_WATCH": ("conv", "linear"), "CAC_NORM_STATISTICS": "hold"},
        {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (5, 6), "CAC_PREFIX_AUTOGRAD": False},
        {"CAC_VAR_SAMPLES": 123_456_789, "CAC_VAR_START_THR": 0.1 + 0.2},
    ]
    for name in search_spaces.SPACES:
        if search_spaces.load(name).method != "gradskip":
            continue  # their answer is no variable
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        for steps in (7, 300, 450_450):
            context = SpaceContext(total_steps=steps, layer_names=tuple("abcdefghi"), unit_ends=(2, 4, 6))
            found += [search_spaces.load(name).suggest(study.ask(), context) for _ in range(12)]
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return found


def test_answers_of_every_space_survive_frame_file_and_polluted_shell(tmp_path: Path) -> None:
    configs = samples()
    assert {config.get("CAC_RULE") for config in configs} == {None, *RULES}
    study(*(record(n, 0.97, 0.1, **config) for n, config in enumerate(configs, 1))).to_parquet(tmp_path / "t.parquet")
    trials = pd.read_parquet(tmp_path / "t.parquet")
    for (_, row), config in zip(trials.iloc[1:].iterrows(), configs, strict=True):
        wanted = TrialConfig(**config)
        assert config_of(row) == wanted
        text = best_env(INFO, row, 0.005)
        assert Settings.from_environment(source(text, **LEFT_OVER)) == wanted.gradskip_settings(), text
        assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(("rule", "ratio"), [("slope", "variance/peak"), ("plasticity", "ratio")])
def test_a_table_of_stops_names_what_the_rule_measured(rule: str, ratio: str) -> None:
    event = {"iteration": 5, "layer": 3, "name": "b", "ratio": 0.98765, "rule": rule}
    assert stop_table(pd.Series({"stop_events": json.dumps([event])})) == [
        ["iteration", "layer", "name", "rule", ratio],
        ["5", "3", "b", rule, "0.9877"],
    ]


def test_best_env_says_what_the_published_library_does_not_know() -> None:
    ranking = analysis.rank(study(record(1, 0.97, 0.3, **LINEAR)))
    text = best_env(INFO, analysis.best(ranking), 0.005)
    assert (
        "# Unknown to the published library, read by tune_cac.gradskip, which wants model= for them:\n"
        "#   CAC_RULE, CAC_RULE_START_ITR, CAC_RULE_END_ITR, CAC_WHOLE_UNITS\n"
    ) in text
    published = best_env(INFO, study(record(1, 0.97, 0.3, **VARIABLES)).iloc[1], 0.005)
    assert "published library" not in published


def test_the_report_says_what_was_held() -> None:
    trials = study(record(1, 0.967, 0.31, **VARIABLES))
    ranking = analysis.rank(trials)
    info = replace(INFO, hold={"CAC_WATCH": ["conv", "linear"], "CAC_WHOLE_UNITS": True})
    text = report_markdown(info, trials, ranking, analysis.best(ranking), 0.005)
    assert "Fixed in every trial but the baseline: CAC_WATCH=conv,linear CAC_WHOLE_UNITS=1." in text
    assert "Held" not in report_markdown(INFO, trials, ranking, analysis.best(ranking), 0.005)


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
    assert "On the test split, which no choice was made by, seed 0: 0.9670, baseline 0.9700." in text
    assert "- trial 2: ValueError: no" in text
    assert "export CAC_VAR_START_THR=0.97" in text


def test_settings_that_a_grid_excludes_are_left_out() -> None:
    row = pd.Series(
        {"method": "gradskip", "CAC_VAR_START_THR": 0.97, "CAC_VAR_SAMPLES": 5.0, "unnamed": '["CAC_VAR_SAMPLES"]'}
    )
    assert settings_text(row) == "START_THR=0.97"
    assert settings_text(row.drop("unnamed")) == "START_THR=0.97 SAMPLES=5"
