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
from compressed import MACS, frame_of, pruned, write_compressed
from studies import result_row, write_study

import analysis
import search_spaces
from analysis.io.studies import to_frame
from analysis.io.study_files import Layout, StudyInfo
from analysis.metrics.over_seeds import SEED_COLUMNS
from analysis.metrics.ranking import CUT, SHORTER, control_line
from analysis.presentation.best_env import best_env, best_schedule
from analysis.presentation.markdown_report import layers, ranked_table, report_markdown, stop_table, sums
from analysis.presentation.summary_text import (
    against_shorter,
    config_of,
    headline,
    is_answer,
    settings_text,
    what_to_train,
)
from search_spaces import SpaceContext
from trainables.compression.schedule import read_schedule
from trainables.config import TrialConfig
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import RULES
from tune_cac.study.study_result import SearchResult, answer, best_or_confirmed, write_answer

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
    method = "none" if role == "baseline" else "gradskip"
    return {
        "trial": number, "role": role, "status": "completed", "error": None,
        "row": result_row(accuracy, saved), "config": TrialConfig(method=method, **config).to_dict(),
    }  # fmt: skip


def study(*others: dict[str, Any]) -> pd.DataFrame:
    return to_frame([record(0, 0.97, 0.0, "baseline"), *others])


def test_headline_says_why_nothing_is_saved_and_only_then() -> None:
    why = "weight decay is 0: --space stop_rules works"
    saves = analysis.rank(study(record(1, 0.97, 0.3)), allowed_drop=0.01)
    assert "eight decay" not in headline(saves, analysis.best(saves), 0.01, why_little=why)
    nothing = analysis.rank(study(record(1, 0.97, 0.0)), allowed_drop=0.005)
    said = headline(nothing, analysis.best(nothing), 0.005, why_little=why)
    assert said == f"{NOTHING} Weight decay is 0: --space stop_rules works."


@pytest.mark.parametrize(("last", "is_said"), [(0.97, True), (0.971, False)])
def test_a_metric_that_is_the_same_for_all_trials_tells_nothing(last: float, is_said: bool) -> None:
    ranking = analysis.rank(study(record(1, 0.97, 0.3), record(2, 0.97, 0.5), record(3, last, 0.4)))
    doubt = "Doubtful: all 4 trials end at the same accuracy, 0.9700, so it tells nothing of them."
    assert (doubt in headline(ranking, analysis.best(ranking), 0.005)) == is_said


def over_seeds(ranking: pd.DataFrame, found: dict[int, tuple[Any, ...]]) -> pd.DataFrame:
    """The ranking with what trials lose over further seeds: number, mean, interval, worst, whether it is within."""
    found = {number: (*row, *[None] * (len(SEED_COLUMNS) - len(row))) for number, row in found.items()}
    table = pd.DataFrame.from_dict(found, orient="index", columns=list(SEED_COLUMNS)).reindex(ranking["trial"])
    return ranking.join(table.astype({"seeds": "Int64", "within_over_seeds": "boolean"}).set_axis(ranking.index))


TAKE = "Take the settings of trial 1: saves 31.0 % of the training compute (31.0 % of the time); "
NOTHING = "No setting tried saves compute within the allowed accuracy loss of 0.50 points."
FAILED = (1, float("inf"), float("nan"), float("nan"), float("inf"), float("nan"), False)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((None,) * 7, f"{TAKE}validation accuracy -0.30 points on one seed, 0.50 points allowed. What other seeds give "
         "is not known."),
        ((3, 0.002, -0.001, 0.0045, 0.004, 0.001, True), f"{TAKE}accuracy of both splits -0.20 points on average over "
         "3 seeds (95 %: -0.45 to +0.10; worst seed -0.40; splits 0.10 apart), 0.50 points allowed."),
        ((3, 0.004, 0.001, 0.00501, 0.006, None, True), f"{TAKE}accuracy of both splits -0.40 points on average over "
         "3 seeds (95 %: -0.501 to -0.10; worst seed -0.60), 0.50 points allowed."),
        ((1, 0.004, None, None, 0.004, None, True), f"{TAKE}accuracy of both splits -0.40 points on one further seed, "
         "0.50 points allowed."),
        ((3, 0.02, 0.01, 0.03, 0.025, None, False), f"{NOTHING} Nearest is trial 1: t{TAKE[1:]}accuracy of both splits "
         "-2.00 points on average over 3 seeds (95 %: -3.00 to -1.00; worst seed -2.50), 0.50 points allowed."),
        (FAILED, NOTHING),
    ],
)  # fmt: skip
def test_the_answer_is_one_sentence(found: tuple[Any, ...], said: str) -> None:
    """Trial 2 saves more; where seeds are known its run on one of them failed."""
    trials = study(record(1, 0.967, 0.31, **VARIABLES), record(2, 0.97, 0.5))
    ranking = analysis.rank(trials if found[0] else trials.head(2), allowed_drop=0.005)
    ranking = over_seeds(ranking, {1: found, 2: FAILED}) if found[0] else ranking
    assert headline(ranking, analysis.best(ranking), 0.005) == said


def test_the_table_has_the_mean_over_further_seeds_and_their_number() -> None:
    ranking = over_seeds(
        analysis.rank(study(record(1, 0.97, 0.3), record(2, 0.97, 0.5))), {1: (3, 0.002, *FAILED[2:]), 2: FAILED}
    )
    table = pd.DataFrame(ranked_table(ranking))
    assert table[table.iloc[0].tolist().index("over seeds")].tolist() == ["over seeds", "failed (1)", "+0.0020 (3)", ""]


LOWER = {"metric": "val_loss", "direction": "min", "metric_unit": "nats"}


def test_the_answer_of_a_metric_where_smaller_is_better() -> None:
    longer = record(1, 0.93, 0.31, **LOWER)
    longer["row"]["train_time_s"] = 1.27
    ranking = analysis.rank(to_frame([record(0, 0.90, 0.0, "baseline", **LOWER), longer]), allowed_drop="10%")
    take = "Take the settings of trial 1: saves 31.0 % of the training compute (in 27.0 % more time); val_loss"
    assert headline(ranking, analysis.best(ranking), "10%") == (
        f"{take} +0.03 nats on one seed, 0.09 nats allowed. What other seeds give is not known."
    )
    ranking = over_seeds(ranking, {1: (3, 0.02, -0.01, 0.05, 0.04, None, True)})
    best = analysis.best(ranking)
    assert headline(ranking, best, "10%") == (
        f"{take} of both splits +0.02 nats on average over 3 seeds (95 %: -0.01 to +0.05; worst seed +0.04), 0.09 nats "
        "allowed."
    )
    assert beside_shorter(best, 0.05, scale=10) == (
        "Simply training 12 epochs: +0.09 nats; the setting is ahead of that on these seeds (-0.05, 95 %: -0.0804 to "
        "-0.0196)."
    )


def beside_shorter(best: pd.Series, less: float, *, scale: float = 1, allowed: float = 0.005) -> str:
    """What is said beside a dense run that loses 0.8 and 1 point on two seeds, on each so much more than the setting.

    Squares about both means are 2e-6 in all, of two degrees of freedom, so the mean's deviation is 1e-3 / sqrt(2), and
    the interval reaches 4.303 times as far: 0.304 points.
    """
    line = pd.DataFrame({"compute_saved": [0.0]})
    its = {1001: 0.008 * scale, 1002: 0.010 * scale}
    line.attrs = {
        "losses": {1: {seed: lost - less for seed, lost in its.items()}, -2: its},
        "epochs": {1: 12},
        "saved": {1: 0.6},
    }
    return against_shorter(best, line, allowed, None)


@pytest.mark.parametrize(
    ("less", "said"),
    [
        (0.005, "is ahead of that on these seeds (+0.50, 95 %: +0.20 to +0.80)."),
        (-0.005, "is behind that on these seeds (-0.50, 95 %: -0.80 to -0.20)."),
        (0.001, "cannot be told from that on these seeds (+0.10, 95 %: -0.20 to +0.40)."),
    ],
)
def test_a_setting_is_compared_with_the_dense_run_cut_to_its_compute_on_the_same_seeds(less: float, said: str) -> None:
    best = best_of(study(record(1, 0.967, 0.31, **VARIABLES)))
    assert beside_shorter(best, less) == f"Simply training 12 epochs: -0.90 points; the setting {said}"
    does_too = "" if "ahead" in said else " saves 60.0 % and is within the allowed loss, too"
    within = f"Simply training 12 epochs{does_too}: -0.90 points; the setting {said}"
    assert beside_shorter(best, less, allowed=0.009) == within


@pytest.mark.parametrize(
    ("events", "row", "said"),
    [
        ([(0, "a"), (0, "b")], {}, "Freeze all up to b"),
        ([(12, "a"), (12, "b")], {}, "Stop all up to b from step 12 on"),
        ([(0, "a"), (0, "b"), (30, "c")], {}, "Freeze all up to b, then all up to c from step 30 on"),
        ([(12, "a"), (30, "b"), (40, "c")], {}, "Stop layers from step 12 on, all up to c from step 40 on"),
        ([(12, "")], {}, "Take the settings of trial 1"),
        ([(0, "a")], {"epochs": 15, "of_epochs": 30}, "Train 15 of 30 epochs and freeze all up to a"),
        ([], {"epochs": 15, "of_epochs": 30}, "Train 15 of 30 epochs and take the settings of trial 1"),
        ([], {"epochs": 15, "of_epochs": 30, "method": "none"}, "Train 15 of 30 epochs"),
        ([(0, "a")], {"method": "gradskip+compression"}, "Freeze all up to a and take the settings of trial 1"),
        ([(0, "a")], {"CAC_PREFIX_MODE": "eval"}, "Freeze all up to a in evaluation mode"),
        (
            [(0, "a")],
            {"CAC_LR_FACTOR": 1.0, "CAC_NORM_STATISTICS": "go_on", "CAC_PREFIX_MODE": "train"},
            "Freeze all up to a",
        ),
        (
            [(0, "a"), (9, "b")],
            {"CAC_LR_FACTOR": 2.0, "CAC_NORM_STATISTICS": "hold_all", "CAC_PREFIX_MODE": "eval"},
            "Freeze all up to a, then all up to b from step 9 on in evaluation mode, with all norms held and 2 times "
            "the learning rate",
        ),
        (
            [(0, "a")],
            {"CAC_LR_FACTOR": 0.5, "epochs": 15, "of_epochs": 30},
            "Train 15 of 30 epochs and freeze all up to a, with 0.5 times the learning rate",
        ),
    ],
)
def test_what_to_train_in_words(events: list[tuple[int, str]], row: dict[str, Any], said: str) -> None:
    stops = json.dumps([{"iteration": step, "name": name} for step, name in events])
    assert what_to_train(pd.Series({"trial": 1, "method": "gradskip", "stop_events": stops, **row})) == said


@pytest.mark.parametrize(
    ("norms", "factor", "said"),
    [
        ("hold_all", 1.0, "Holding all norms alone (trial 2) ends at no loss (3.00 points better) and skips nothing."),
        ("hold_all", 2.0, "Holding all norms with 2 times the learning rate alone (trial 3) ends at a loss of 1.00"),
        ("go_on", 2.0, "2 times the learning rate alone (trial 4) ends at no loss (7.00 points better)"),
    ],
)
def test_what_norms_and_rates_do_alone_is_said_and_no_baseline_doubted(norms: str, factor: float, said: str) -> None:
    off = {"CAC_VAR_START_THR": -1.0}
    trials = [
        record(0, 0.9, 0.0, "baseline"),
        record(1, 0.95, 0.3, CAC_NORM_STATISTICS=norms, CAC_LR_FACTOR=factor),
        record(2, 0.93, 0.0, **off, CAC_NORM_STATISTICS="hold_all"),
        record(3, 0.89, 0.0, **off, CAC_NORM_STATISTICS="hold_all", CAC_LR_FACTOR=2.0),
        record(4, 0.97, 0.0, **off, CAC_LR_FACTOR=2.0),
    ]
    ranking = analysis.rank(to_frame(trials), allowed_drop=0.002)
    text = headline(ranking, ranking[ranking["trial"] == 1].iloc[0], 0.002)
    assert said in text
    assert "Doubtful" not in text


@pytest.mark.parametrize(
    ("near", "said"),
    [
        (0.948, "trial 3 saves most, 36.0 % (its settings: export --trial 3)."),
        (0.898, "nothing that saves compute is within the allowed accuracy loss of that."),
    ],
)
def test_where_norms_alone_are_far_ahead_of_the_answer_what_is_near_them_is_said(near: float, said: str) -> None:
    held = {"CAC_NORM_STATISTICS": "hold_all"}
    trials = [
        record(0, 0.539, 0.0, "baseline"),
        record(1, 0.549, 0.88, **held),
        record(2, 0.905, 0.0, **held, CAC_VAR_START_THR=-1.0),
        record(3, near, 0.36, **held),
        record(4, 0.858, 0.61, **held),
    ]
    ranking = analysis.rank(to_frame(trials), allowed_drop=0.005)
    assert said in headline(ranking, analysis.best(ranking), 0.005)


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_answer_says_whether_fresh_seeds_confirmed_it(confirmed: bool) -> None:
    ranking = analysis.rank(study(record(1, 0.97, 0.3, **VARIABLES)))
    found = pd.DataFrame(
        {"candidate": [1], "seeds": [4], "compute_saved": [0.29], "accuracy_drop": [0.002], "drop_low": [-0.001],
         "drop_high": [0.004 if confirmed else 0.008], "drop_worst": [0.003], "confidence": [0.95], "failed": [0],
         "confirmed": [confirmed], "refuted": [False]}
    )  # fmt: skip
    best, most = analysis.best(ranking), "4" if confirmed else "8"
    lost = (
        "ake the settings of trial 1: saves 29.0 % of the training compute (30.0 % of the time); test accuracy -0.20 "
        f"points on average over 4 seeds (95 %: -0.{most}0 to +0.10; worst seed -0.30), 0.50 points allowed."
    )
    refuted = (
        "No setting was confirmed to stay within the allowed accuracy loss of 0.50 points. The best of the search: "
        f"t{lost} That is not certain to be within the allowed loss."
    )
    said = f"T{lost} Confirmed on fresh seeds." if confirmed else refuted
    assert headline(ranking, best, 0.005, confirmation=found) == said
    in_file = "Confirmed on fresh seeds." if confirmed else "Not confirmed on fresh seeds: it failed on 1 fresh seed."
    assert f"\n# {in_file}\n" in best_env(INFO, best, 0.005, confirmation=found.assign(failed=int(not confirmed)))


@pytest.mark.parametrize(("confirmed", "trial"), [(True, 2), (False, 2), (None, 0)])
def test_what_fresh_seeds_refute_was_not_refused_by_the_searchs(confirmed: bool | None, trial: int) -> None:
    """Trial 1, of which the search had its seeds; of 2 alone it is told, or refuted, too, and nothing is near."""
    trials = study(record(1, 0.97, 0.3), record(2, 0.968, 0.25, **VARIABLES))
    ranking = over_seeds(analysis.rank(trials), {1: (3, 0.002, -0.001, 0.004, 0.004, None, True, 0.3, 0.3)})
    found = pd.DataFrame(
        {"candidate": [1, 2], "seeds": 4, "compute_saved": 0.3, "accuracy_drop": [0.02, 0.004], "drop_low": 0.001,
         "drop_high": 0.02, "drop_worst": 0.02, "confidence": 0.95, "failed": 0,
         "confirmed": [False, bool(confirmed)], "refuted": [True, confirmed is None]}
    )  # fmt: skip
    best = best_or_confirmed(ranking, found)
    assert best is not None
    assert best["trial"] == trial
    assert "over further seeds" not in headline(ranking, best, 0.005, confirmation=found)
    result = SearchResult(
        folder=Path(), trials=trials, ranking=ranking, best=best, allowed_drop=0.005, confirmation=found,
        interrupted=False,
    )  # fmt: skip
    assert result.beside == ""


def test_beside_a_confirmed_answer_a_cut_run_is_of_one_seed_in_words_and_numbers() -> None:
    """On it the setting is far ahead, over the search's further seeds behind."""
    best = best_of(study(record(1, 0.967, 0.31, **VARIABLES)))
    line = pd.DataFrame({"compute_saved": [0.0, 0.4], "accuracy": [0.97, 0.8]})
    line.attrs = {
        "losses": {1: {1001: 0.1, 1002: 0.1}, -2: {1001: 0.0, 1002: 0.001}},
        "epochs": {1: 12},
        "saved": {1: 0.6},
    }
    again = pd.DataFrame({"candidate": [1], "seeds": [4]})
    assert against_shorter(best, line, 0.0, None).startswith(
        "Simply training 12 epochs: -0.05 points; the setting is behind"
    )
    assert against_shorter(best, line, 0.0, again).startswith("On one seed it is ahead of a dense run cut")


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


def test_headline_without_baseline_or_trials() -> None:
    alone = analysis.rank(to_frame([record(1, 0.9, 0.5)]))
    assert headline(alone, analysis.best(alone), 0.005).startswith("The baseline did not complete")
    nothing = analysis.rank(to_frame([]))
    assert headline(nothing, None, 0.005) == "No trial has completed, so there is nothing to rank."


def source(text: str, **environment: str) -> dict[str, str]:
    """The CAC_* variables of a shell that has sourced the text."""
    done = subprocess.run(
        ["sh", "-eu", "-c", 'eval "$TEXT"; env'], env={"PATH": os.environ["PATH"], "TEXT": text, **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line.partition("=") for line in done.stdout.splitlines() if line.startswith("CAC_"))
    return {name: value for name, _, value in lines}


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


@pytest.mark.slow
def test_answers_of_every_space_survive_frame_file_and_polluted_shell(tmp_path: Path) -> None:
    configs = samples()
    assert {config.get("CAC_RULE") for config in configs} == {None, *RULES}
    study(*(record(n, 0.97, 0.1, **config) for n, config in enumerate(configs, 1))).to_parquet(tmp_path / "t.parquet")
    trials = pd.read_parquet(tmp_path / "t.parquet")
    for (_, row), config in zip(trials.iloc[1:].iterrows(), configs, strict=True):
        wanted = TrialConfig(**config)
        assert config_of(row) == wanted
        text = best_env(INFO, row, 0.005)
        found = Settings.from_environment(source(text, **LEFT_OVER))  # of a rule that is off, too
        assert found == replace(wanted.gradskip_settings(), samples=found.samples), text
        assert found.sampling_interval == wanted.gradskip_settings().sampling_interval
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
    further = over_seeds(ranking, {1: (3, 0.0, -0.001, 0.001, 0.0, None, True)})  # by both splits
    text = report_markdown(INFO, trials, further, analysis.best(further), 0.005)
    assert "On the test split, seed 0: 0.9670, baseline 0.9700." in text
    assert "- trial 2: ValueError: no" in text
    assert "export CAC_VAR_START_THR=0.97" in text


def test_settings_that_a_grid_excludes_are_left_out() -> None:
    row = pd.Series(
        {"method": "gradskip", "CAC_VAR_START_THR": 0.97, "CAC_VAR_SAMPLES": 5.0, "unnamed": '["CAC_VAR_SAMPLES"]'}
    )
    assert settings_text(row) == "START_THR=0.97"
    assert settings_text(row.drop("unnamed")) == "START_THR=0.97 SAMPLES=5"


# --- studies that compress ------------------------------------------------------------------------------------------

COMPRESSED = StudyInfo(
    space="pruning_sensitivities", workload="digits", epochs=30, seed=0, trials=3, allowed_drop=0.005, versions={},
    saving="inference",
)  # fmt: skip
MARKED = """version: 1
pruners:
  levels:
    class: SparsityLevelParameterPruner
    levels: {conv1.weight: !search {low: 0.1, high: 0.9}}
policies:
  - pruner: {instance_name: levels}
    epochs: [3]
"""


def best_of(trials: pd.DataFrame) -> pd.Series:
    best = analysis.best(analysis.rank(trials))
    assert best is not None
    return best


def said(trials: pd.DataFrame, **more: object) -> str:
    ranking = analysis.rank(trials)
    return headline(ranking, analysis.best(ranking), 0.005, **more)  # type: ignore[arg-type]


def test_a_failed_search_of_schedules_has_no_settings_of_gradient_skip(tmp_path: Path) -> None:
    layout = write_compressed(tmp_path, [pruned(0.5, 0.62)])
    write_answer(layout, answer(layout, allowed_drop=0.005))
    lines = layout.best.read_text().splitlines()
    assert lines[1:] == [
        "# Nothing tried saves compute within the allowed accuracy loss of 0.50 points: off.",
        "# Nearest is trial 1: take the settings of trial 1: saves 62.0 % of the inference compute; validation "
        "accuracy",
        "#   -47.00 points on one seed, 0.50 points allowed. What other seeds give is not known.",
        "# Compression alone was searched, which no variable sets: no schedule.",
    ]
    assert not layout.best_schedule.exists()
    layout.write_info(replace(layout.read_info(), method="gradskip+compression"))
    write_answer(layout, answer(layout, allowed_drop=0.005))
    assert "export CAC_VAR_START_THR=-1" in layout.best.read_text()


def test_without_a_baseline_nothing_is_written_to_paste(tmp_path: Path) -> None:
    layout = write_compressed(tmp_path, [pruned(0.97, 0.62)])
    write_answer(layout, answer(layout, allowed_drop=0.005))
    assert layout.best.is_file()
    layout.journal.unlink()
    write_study(tmp_path, [{"error": "ValueError: no"}])
    write_answer(layout, answer(layout, allowed_drop=0.005))
    assert not layout.best.exists()


def test_the_headline_says_which_compute() -> None:
    thinned = {"sparse_inference_saved": 0.8}
    for saving, words in {
        "inference": "saves 62.0 % of the inference compute; validation",
        "sparse-inference": "80.0 % of the multiply-adds of inference where kernels skip zeros (those of a CPU do not)",
        "both": "trial 1: saves 36.0 % of training and inference compute, on average; ",
        "both-sparse": "45.0 % of training compute and, where kernels skip zeros (those of a CPU do not), inference",
    }.items():
        assert words in said(frame_of(pruned(0.967, 0.62, 0.1, saving=saving, columns=thinned), saving=saving))
    assert said(frame_of(pruned(0.97, 0.0, 0.5))) == NOTHING  # compute of training alone is nothing here


def test_training_shorter_is_not_mentioned_where_it_is_no_rival() -> None:
    shorter = pruned(0.97, 0.0, 0.9) | {"role": "control", "control": "shorter"}
    trials = frame_of(pruned(0.967, 0.62, 0.1), shorter)
    line = control_line(trials)
    assert len(line) == 2
    assert "shorter" not in said(trials, line=line)
    of_training = frame_of(pruned(0.967, 0.62, 0.1, saving="training"), shorter, saving="training")
    assert "On one seed it cannot be told from a dense run cut to the same compute" in said(of_training, line=line)
    better = pruned(0.97, 0.0, 0.9) | {"role": "control", "control": "shorter"}
    better["row"]["quality"] = 0.99
    of_training = frame_of(pruned(0.967, 0.62, 0.1, saving="training"), better, saving="training")
    assert "On one seed it is behind a dense run cut to the same" in said(of_training, line=control_line(of_training))


def test_the_ranked_table_has_what_belongs_to_the_saving() -> None:
    table = pd.DataFrame(ranked_table(analysis.rank(frame_of(pruned(0.968, 0.62, 0.1), pruned(0.5, 0.3)))))
    assert table.iloc[:, 4:7].values.tolist() == [
        ["saved", "sparsity", "MACs"], ["62.0 %", "30.0 %", "38.0 %"], ["0.0 %", "0.0 %", "100.0 %"],
        ["30.0 %", "30.0 %", "70.0 %"],
    ]  # fmt: skip
    both = ranked_table(analysis.rank(frame_of(pruned(0.968, 0.6, 0.1, saving="both"), saving="both")), test=True)
    assert [row[4:9] for row in both[:2]] == [
        ["test acc.", "saved", "training saved", "sparsity", "MACs"], ["0.9680", "35.0 %", "10.0 %", "30.0 %", "40.0 %"]
    ]  # fmt: skip


def test_the_report_has_sums_layers_confirmation_and_no_schedule() -> None:
    named = {"layer_sparsity": '{"a|b.weight": 0.25, "fc.weight": 0.5}'}
    trials = frame_of(pruned(0.968, 0.62, 0.1, columns=named))
    ranking = analysis.rank(trials)
    found = pd.DataFrame(
        {"candidate": [1, 2, 3, 4], "seeds": [4, 12, 12, 0], "compute_saved": 0.1, "saved": 0.525,
         "accuracy_drop": 0.00215, "drop_low": 0.001, "drop_high": 0.003, "drop_worst": [0.002] * 3 + [None],
         "confidence": 0.95, "confirmed": [True, True, False, False], "failed": 0}
    )  # fmt: skip
    held = replace(COMPRESSED, hold={"schedule": MARKED})
    text = report_markdown(held, trials, ranking, analysis.best(ranking), 0.005, confirmation=found)
    assert "Training compute saved: 10.0 %. " in text
    assert (
        "## Sparsity\n\nTrial 1 compresses: s: conv1 0.5, conv2 0.25. The whole schedule is in `best.yaml`.\n\n"
        "- sparsity: 30.0 %\n"
    ) in text
    assert "| layer | sparsity |\n|:--|--:|\n| a\\|b.weight | 25.0 % |\n| fc.weight | 50.0 % |\n" in text
    assert f"- MACs of a sample, zeros included: {MACS:,}\n" in text
    assert "compute saved | accuracy loss (points) | interval (points) | worst seed | confidence | confirmed |" in text
    assert "| 1 | 4 | 52.5 % | +0.21 | +0.10 to +0.30 | +0.20 | 95 % | yes |" in text
    assert (  # 1 - .05^(1 / 4) and 1 - .05^(1 / 12)
        " The share of all seeds that lose more than the worst of these is, with 95 % confidence each, at most 53 % "
        "for trial 1, 22 % for trial 2.\n"
    ) in text
    assert "Fixed in every trial but the baseline: schedule=YAML of 8 lines." in text
    assert "SparsityLevelParameterPruner" not in text


HEAD = [
    "# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0",
    "# trial 1",
    "# Take the settings of trial 1: saves 50.0 % of the inference compute; validation accuracy -0.20 points on one",
    "#   seed, 0.50 points allowed. What other seeds give is not known.",
]


def test_best_env_of_compression_alone_points_to_best_yaml() -> None:
    text = best_env(COMPRESSED, best_of(frame_of(pruned(0.968, 0.5))), 0.005)
    assert text.splitlines() == [*HEAD, "# It compresses, and no variable says how: the answer is best.yaml."]
    assert source(text, CAC_VAR_SAMPLES="3") == {"CAC_VAR_SAMPLES": "3"}


def test_best_env_of_both_has_the_variables_too() -> None:
    trial = pruned(
        0.968, 0.5, 0.3, saving="both", method="gradskip+compression", CAC_VAR_START_THR=0.97, agp_final_sparsity=0.8,
        agp_weights=("conv1.weight",),
    )  # fmt: skip
    text = best_env(COMPRESSED, best_of(frame_of(trial, saving="both")), 0.005)
    assert "# It compresses, too, and no variable says how: the schedule is best.yaml.\n" in text
    assert "saves 40.0 % of training and inference compute, on average" in text
    assert Settings.from_environment(source(text)).start_thr == 0.97


def test_best_yaml_is_the_schedule_that_the_trial_trained() -> None:
    best = best_of(frame_of(pruned(0.968, 0.5, pruning_sensitivities=("conv1.weight=0.5", "fc.weight=0.25"),
                                   pruning_start_epoch=3, pruning_end_epoch=9, pruning_frequency=2)))  # fmt: skip
    text = best_schedule(COMPRESSED, best, 0.005)
    assert text is not None
    assert text.splitlines()[:5] == [*HEAD, "# Epochs are those of a run of this length."]
    schedule = read_schedule(text)
    (policy,) = schedule.policies
    assert list(policy.timing.active_epochs()) == [3, 5, 7]
    (pruner,) = schedule.sections["pruners"].values()
    assert pruner.class_name == "SensitivityPruner"
    assert pruner.settings is not None
    assert pruner.settings.model_dump()["sensitivities"] == {"conv1.weight": 0.5, "fc.weight": 0.25}


def test_the_files_of_a_study(tmp_path: Path) -> None:
    layout = write_compressed(tmp_path / "s", [pruned(0.968, 0.5), pruned(0.9, 0.9)])
    write_answer(layout, answer(layout, allowed_drop=0.005))
    assert layout.best_schedule.name == "best.yaml"
    text = layout.best_schedule.read_text()
    assert read_schedule(text).policies
    assert "# Take the settings of trial 1: saves 50.0 % of the inference compute" in text
    assert "the answer is best.yaml" in layout.best.read_text()
    assert config_of(pd.read_parquet(layout.trials).iloc[1]).saving == "inference"
    ranking = pd.read_csv(layout.ranking)
    assert ranking["saved"].tolist() == [0.5, 0.0, 0.9]
    assert ranking["beats_shorter"].isna().all()


def test_sums_are_those_of_the_row() -> None:
    row = frame_of(pruned(0.97, 0.25, columns={"latency_s": 0.0012})).iloc[1]
    assert sums(row) == [
        ("sparsity", "30.0 %"),
        ("sparsity in whole filters, rows or channels", "10.0 %"),
        ("inference compute saved", "25.0 %"),
        ("inference compute saved where zeros are skipped", "25.0 %"),
        ("MACs of a sample, zeros included", f"{MACS:,}"),
        ("MACs of the weights that are not zero", "750,000"),
        ("parameters", "18,482"),
        ("latency of a sample", "1.20 ms"),
    ]


@pytest.mark.parametrize("text", ["{}", "", None, pd.NA])
def test_layers_that_were_not_measured_are_none(text: object) -> None:
    assert layers(pd.Series({"layer_sparsity": text})) == []
    assert layers(pd.Series({"trial": 1})) == []


# --- runs of fewer epochs than the full one -------------------------------------------------------------------------


def half(accuracy: float, executed: int, **more: object) -> dict[str, object]:
    """A row of 15 of 30 epochs, whose own full budget is 500 of 1000."""
    own = 1 - executed / 500
    return {
        **result_row(accuracy, dense_flops=500, executed_flops=executed, search_flops=executed, epoch=15), **more,
        "compute_saved": own,
    }  # fmt: skip


CUT_RUN = {
    "role": CUT, "control": SHORTER, "of_epochs": 30, "row": half(0.966, 500),
    "config": TrialConfig(method="none", epochs=15).to_dict(),
}  # fmt: skip
STOPS = {
    "of_epochs": 30, "row": half(0.968, 400),
    "config": TrialConfig(method="gradskip", epochs=15, CAC_VAR_START_THR=0.97).to_dict(),
}  # fmt: skip
FULL = {"row": result_row(0.969, 0.2)}


@pytest.fixture
def cut_study(tmp_path: Path) -> Layout:
    return write_study(tmp_path / "s", [{"row": result_row(0.97)}, FULL, CUT_RUN, STOPS])


def test_a_cut_run_is_ranked_and_told_with_and_without_stops(cut_study: Layout) -> None:
    trials = analysis.load(cut_study.root)
    ranking = analysis.rank(trials, allowed_drop=0.005)
    assert ranking["trial"].tolist() == [3, 2, 1, 0]
    best, dense = ranking.iloc[0], ranking.iloc[1]
    line = control_line(trials)
    assert headline(ranking, best, 0.005, line=line).startswith(
        "Train 15 of 30 epochs and take the settings of trial 3: saves 60.0 % of the training compute"
    )
    assert headline(ranking, dense, 0.005, line=line).startswith(
        "Train 15 of 30 epochs: saves 50.0 % of the training compute"
    )
    assert is_answer(dense)
    assert settings_text(best).startswith("EPOCHS=15 START_THR=0.97")
    assert settings_text(dense) == "EPOCHS=15"
    assert settings_text(ranking.iloc[3]) == "-"
    info = cut_study.read_info()
    for row in (best, dense):
        text = best_env(info, row, 0.005, line=line)
        assert (
            "\n# Train 15 of 30 epochs, with a learning-rate schedule of that length:\nexport TUNE_CAC_EPOCHS=15\n"
            in text
        )
    assert "export CAC_VAR_START_THR=0.97\n" in best_env(info, best, 0.005)
    assert "export CAC_VAR_START_THR=-1" in best_env(info, dense, 0.005)  # no layer stops
    assert "export TUNE_CAC_EPOCHS" not in best_env(info, ranking.iloc[2], 0.005)
