"""The answer of a study that compresses: words, tables, best.env, best.yaml."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
from compressed import MACS, frame_of, pruned, write_compressed
from studies import write_study

import analysis
from analysis.io.layout import Layout, StudyInfo
from analysis.metrics.confirmation import confirm_table
from analysis.metrics.ranking import control_line
from analysis.presentation.markdown_report import ranked_table, report_markdown
from analysis.presentation.summary_text import best_env, best_schedule, config_of, headline
from trainables.compression.schedule import read_schedule
from trainables.gradskip.settings import Settings
from tune_cac.study.study_result import answer, write_answer

INFO = StudyInfo(
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


# --- words ----------------------------------------------------------------------------------------------------------


def test_the_headline_says_which_compute() -> None:
    assert said(frame_of(pruned(0.967, 0.62, 0.1))) == (
        "You can skip 62.0 % of the inference compute at a loss of 0.30 points in validation accuracy "
        "(allowed: 0.50 points). One seed, not confirmed."
    )
    assert said(frame_of(pruned(0.967, 0.6, 0.2, saving="both"), saving="both")).startswith(
        "You can skip 40.0 % of training and inference compute, on average, at a loss of 0.30 points"
    )
    # Compute of training alone is nothing here.
    assert said(frame_of(pruned(0.97, 0.0, 0.5))) == (
        "No setting tried saves compute within the allowed accuracy loss of 0.50 points."
    )


def test_training_shorter_is_not_mentioned_where_it_is_no_rival() -> None:
    shorter = pruned(0.97, 0.0, 0.9) | {"role": "control", "control": "shorter"}
    trials = frame_of(pruned(0.967, 0.62, 0.1), shorter)
    line = control_line(trials)
    assert len(line) == 2
    assert "shorter" not in said(trials, line=line)
    of_training = frame_of(pruned(0.967, 0.62, 0.1, saving="training"), shorter, saving="training")
    assert "It is about equal to a dense run cut to the same compute" in said(of_training, line=line)
    better = pruned(0.97, 0.0, 0.9) | {"role": "control", "control": "shorter"}
    better["row"]["quality"] = 0.99
    of_training = frame_of(pruned(0.967, 0.62, 0.1, saving="training"), better, saving="training")
    assert "It does not beat a dense run cut to the same compute" in said(of_training, line=control_line(of_training))


def confirmation(saved: float, drop: float, *, trial: int = 1) -> pd.DataFrame:
    """Four fresh seeds on which a trial saves so much of inference, and a tenth of training."""
    rows = []
    for seed in range(1, 5):
        rows += [
            {"role": "baseline", "candidate": None, "seed": seed, "test_accuracy": 0.97, "compute_saved": 0.0,
             "inference_saved": 0.0},
            {"role": "candidate", "candidate": trial, "seed": seed, "test_accuracy": 0.97 - drop + seed / 10_000,
             "compute_saved": 0.1, "inference_saved": saved + seed / 100},
        ]  # fmt: skip
    frame = pd.DataFrame(rows).assign(status="completed", saving="inference")
    return confirm_table(frame, allowed_drop=0.005)


# --- tables ---------------------------------------------------------------------------------------------------------


def column(table: list[list[str]], heading: str) -> list[str]:
    return [row[table[0].index(heading)] for row in table[1:]]


def test_the_ranked_table_has_what_belongs_to_the_saving() -> None:
    trials = frame_of(pruned(0.968, 0.62, 0.1), pruned(0.5, 0.3))
    table = ranked_table(analysis.rank(trials))
    assert table[0][:7] == ["rank", "trial", "accuracy", "accuracy loss", "saved", "sparsity", "MACs"]
    assert column(table, "saved") == ["62.0 %", "0.0 %", "30.0 %"]
    assert column(table, "sparsity") == ["30.0 %", "0.0 %", "30.0 %"]
    assert column(table, "MACs") == ["38.0 %", "100.0 %", "70.0 %"]
    assert all(len(row) == len(table[0]) for row in table)
    both = ranked_table(analysis.rank(frame_of(pruned(0.968, 0.6, 0.1, saving="both"), saving="both")), test=True)
    assert both[0][4:9] == ["test acc.", "saved", "training saved", "sparsity", "MACs"]
    assert [row[5:9] for row in both[1:]] == [["35.0 %", "10.0 %", "30.0 %", "40.0 %"],
                                               ["0.0 %", "0.0 %", "0.0 %", "100.0 %"]]  # fmt: skip


def test_the_report_has_sums_and_layers_of_the_best() -> None:
    named = {"layer_sparsity": '{"a|b.weight": 0.25, "fc.weight": 0.5}'}
    trials = frame_of(pruned(0.968, 0.62, 0.1, columns=named))
    ranking = analysis.rank(trials)
    text = report_markdown(INFO, trials, ranking, analysis.best(ranking), 0.005)
    assert "Training compute saved: 10.0 %. " in text
    assert (
        "## Sparsity\n\nTrial 1 compresses: s: conv1 0.5, conv2 0.25. The whole schedule is in `best.yaml`.\n\n"
        "- sparsity: 30.0 %\n"
    ) in text
    assert "| layer | sparsity |\n|:--|--:|\n| a\\|b.weight | 25.0 % |\n| fc.weight | 50.0 % |\n" in text
    assert f"- MACs of a sample, zeros included: {MACS:,}\n" in text
    table = report_markdown(
        INFO, trials, ranking, analysis.best(ranking), 0.005, confirmation=confirmation(0.5, 0.00215)
    )
    assert "| inference compute saved | accuracy loss (points) | interval (points) | confidence | confirmed |" in table
    assert "| 1 | 4 | 52.5 % |" in table


def test_a_held_schedule_is_counted_in_lines() -> None:
    trials = frame_of(pruned(0.968, 0.5, schedule=MARKED, schedule_values=("levels.conv1.weight=0.5",)))
    ranking = analysis.rank(trials)
    text = report_markdown(replace(INFO, hold={"schedule": MARKED}), trials, ranking, None, 0.005)
    assert "Fixed in every trial but the baseline: schedule=YAML of 8 lines." in text
    assert "SparsityLevelParameterPruner" not in text


# --- files ----------------------------------------------------------------------------------------------------------


def sourced(text: str, **environment: str) -> dict[str, str]:
    """The CAC_* variables of a shell that has sourced the text."""
    done = subprocess.run(
        ["sh", "-eu", "-c", 'eval "$TEXT"; env'], env={"PATH": os.environ["PATH"], "TEXT": text, **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line.partition("=") for line in done.stdout.splitlines() if line.startswith("CAC_"))
    return {name: value for name, _, value in lines}


def test_best_env_of_compression_alone_points_to_best_yaml() -> None:
    text = best_env(INFO, best_of(frame_of(pruned(0.968, 0.5))), 0.005)
    assert text.splitlines() == [
        "# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0",
        "# trial 1: inference compute saved 50.0 %, validation accuracy 0.9680, accuracy loss 0.20 points (allowed "
        "0.50 points)",
        "# One seed, not confirmed.",
        "# It compresses, and no variable says how: the answer is best.yaml.",
    ]
    assert sourced(text, CAC_VAR_SAMPLES="3") == {"CAC_VAR_SAMPLES": "3"}


def test_best_env_of_both_has_the_variables_too() -> None:
    trial = pruned(
        0.968, 0.5, 0.3, saving="both", method="gradskip+compression", CAC_VAR_START_THR=0.97, agp_final_sparsity=0.8,
        agp_weights=("conv1.weight",),
    )  # fmt: skip
    text = best_env(INFO, best_of(frame_of(trial, saving="both")), 0.005)
    assert "# It compresses, too, and no variable says how: the schedule is best.yaml.\n" in text
    assert "mean of training and inference saved 40.0 %" in text
    assert Settings.from_environment(sourced(text)).start_thr == 0.97


def test_best_yaml_is_the_schedule_that_the_trial_trained() -> None:
    best = best_of(frame_of(pruned(0.968, 0.5, pruning_sensitivities=("conv1.weight=0.5", "fc.weight=0.25"),
                                   pruning_start_epoch=3, pruning_end_epoch=9, pruning_frequency=2)))  # fmt: skip
    text = best_schedule(INFO, best, 0.005)
    assert text is not None
    assert text.splitlines()[:4] == [
        "# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0",
        "# trial 1: inference compute saved 50.0 %, validation accuracy 0.9680, accuracy loss 0.20 points (allowed "
        "0.50 points)",
        "# One seed, not confirmed.",
        "# Epochs are those of a run of this length.",
    ]
    schedule = read_schedule(text)
    (policy,) = schedule.policies
    assert list(policy.timing.active_epochs()) == [3, 5, 7]
    (pruner,) = schedule.section("pruners").values()
    assert pruner.class_name == "SensitivityPruner"
    assert pruner.settings is not None
    assert pruner.settings.model_dump()["sensitivities"] == {"conv1.weight": 0.5, "fc.weight": 0.25}


def written(folder: Path, *trials: dict[str, object]) -> Layout:
    layout = write_compressed(folder, trials)
    write_answer(layout, answer(layout, allowed_drop=0.005))
    return layout


def test_the_files_of_a_study(tmp_path: Path) -> None:
    layout = written(tmp_path / "s", pruned(0.968, 0.5), pruned(0.9, 0.9))
    assert layout.best_schedule.name == "best.yaml"
    text = layout.best_schedule.read_text()
    assert read_schedule(text).policies
    assert "# trial 1: inference compute saved 50.0 %" in text
    assert "the answer is best.yaml" in layout.best.read_text()
    assert config_of(pd.read_parquet(layout.trials).iloc[1]).saving == "inference"
    ranking = pd.read_csv(layout.ranking)
    assert ranking["saved"].tolist() == [0.5, 0.0, 0.9]
    assert ranking["beats_shorter"].isna().all()
