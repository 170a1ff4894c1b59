"""Searches of compression on real Ray, as a user runs them; and what is refused before Ray starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands_run import run_here
from runs import assert_equals_alone
from studies import study_of

import analysis
from analysis.io.study_files import Layout
from analysis.presentation.summary_text import config_of
from trainables.compression.schedule import read_schedule
from trainables.compression.trial.from_config import schedule_of
from tune_cac.cli.main import main


def slow(test: Any) -> Any:
    """A search on Ray."""
    return pytest.mark.slow(pytest.mark.usefixtures("one_ray")(test))


MARKED = """
version: 1
pruners:
  gradual:
    class: AutomatedGradualPruner
    initial_sparsity: 0.05
    final_sparsity: !search {low: 0.2, high: 0.6, step: 0.1, name: final}
    weights: ['conv[2-6].weight']
regularizers:
  small: {class: L1Regularizer, reg_regims: {classifier.weight: !search {choices: [1.0e-5, 1.0e-4]}}}
policies:
- {pruner: {instance_name: gradual}, starting_epoch: !search {low: 1, high: 2}, ending_epoch: 4}
- {regularizer: {instance_name: small}, epochs: [1]}
"""


def search(folder: Path, *arguments: str) -> str:
    """A search that ends well; what it said."""
    done = run_here(folder, "search", "--no-controls", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def suggested(folder: Path) -> list[dict[str, object]]:
    """Parameters of each trial."""
    return [dict(trial.params) for trial in study_of(folder).trials]


@pytest.mark.thorough
@slow
def test_a_published_schedule_is_searched_as_distiller_read_it(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        MARKED.replace("version: 1", "extras: 3").replace("['conv[2-6].weight']", "[conv2.weight, module.fc.weight]")
    )
    arguments = ("--space", "schedule", "--schedule", "s.yaml", "--trials", "3", "--epochs", "5", "--name", "s")
    refused = run_here(tmp_path, "search", *arguments)
    assert refused.returncode == 2
    assert "s.yaml:2: extras: unknown section" in refused.stderr
    with pytest.warns(UserWarning, match=r"extras: unknown section|module\.fc\.weight|version is missing"):
        said = search(tmp_path, *arguments, "--compatible")
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 3, said
    assert (trials["sparsity"].iloc[1:] > 0).all()
    written = yaml.safe_load((tmp_path / "results" / "s" / "best.yaml").read_text())
    assert "extras" not in written
    assert written["version"] == 1


# --- a schedule with marks ------------------------------------------------------------------------------------------


@slow
def test_a_schedules_marks_are_searched_and_the_best_is_a_schedule_again(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MARKED)
    said = search(
        tmp_path, "--space", "schedule", "--schedule", "mine.yaml", "--trials", "3", "--epochs", "4", "--name", "s",
        "--allowed-drop", "0.9", "--concurrency", "2",
    )  # fmt: skip
    study = tmp_path / "results" / "s"
    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed"}, said
    params = suggested(study)
    assert params[0] == {}
    assert all(set(p) == set(params[1]) for p in params[1:])
    assert params[1] == {
        "mark:final": pytest.approx(0.4), "mark:regularizers/small/reg_regims/classifier/weight": 1e-5,
        "mark:policies/0/starting_epoch": 1,
    }  # fmt: skip
    for _, trial in trials.iloc[1:].iterrows():
        schedule = schedule_of(config_of(trial))
        share = schedule["pruners"]["gradual"]["final_sparsity"]
        assert 0.2 <= share <= 0.6
        # Of conv2 to conv6, 20,736 of 21,128 weights.
        assert trial["sparsity"] == pytest.approx(share * 17856 / 18248, abs=1e-3)
    assert_equals_alone(trials.iloc[2])
    best = analysis.best(analysis.rank(trials, allowed_drop=0.9))
    assert best is not None
    assert best["saving"] == "sparse-inference"  # it removes nothing
    assert best["sparse_inference_saved"] == max(trials["sparse_inference_saved"])
    written = study / "best.yaml"
    assert written.is_file(), sorted(path.name for path in study.iterdir())
    read = read_schedule(written)
    assert read == read_schedule(schedule_of(config_of(best)))
    assert "!search" not in yaml.safe_dump(yaml.safe_load(written.read_text()))


# --- with Gradient-Skip ---------------------------------------------------------------------------------------------


@slow
@pytest.mark.thorough
def test_thresholds_and_sensitivities_are_searched_at_once(tmp_path: Path) -> None:
    space = "auto_thresholds+pruning_sensitivities"
    said = search(tmp_path, "--space", space, "--trials", "3", "--epochs", "5", "--name", "s", "--concurrency", "2")
    study = tmp_path / "results" / "s"
    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed"}, said
    assert list(trials["method"]) == ["none"] + ["gradskip+compression"] * 2
    assert Layout(study).read_info().saving == "both-sparse"
    names = {name.split(":")[0] for params in suggested(study)[1:] for name in params}
    assert {"s", "CAC_VAR_START_THR"} <= names
    assert (trials["sparsity"].iloc[1:] > 0).all()
    for _, trial in trials.iloc[1:3].iterrows():
        assert_equals_alone(trial)


# --- refused before anything starts ---------------------------------------------------------------------------------

#: What each part of a wrong search says, in one line.
REFUSED: list[tuple[list[str], str]] = [
    (["--space", "schedule"], "searches a schedule of yours: give its file by --schedule, got none"),
    (["--space", "schedule", "--schedule", "missing.yaml"], "missing.yaml"),
    (["--schedule", "mine.yaml", "--space", "stop_rules"], "--schedule needs a space of compression, such as schedule"),
    (["--space", "distillation"], "space distillation needs a teacher: --set distill_teacher=NAME"),
    (["--space", "distillation", "--set", "distill_teacher=resnet21"], "resnet2"),
    (["--space", "agp", "--script", "python train.py"], "a script compresses by itself: space agp needs a workload"),
    (["--space", "agp", "--workers-per-trial", "2"], "space agp trains in one process, got --workers-per-trial 2"),
    (["--space", "agp", "--saving", "memory"], "memory"),
    (["--space", "agp", "--epochs", "1"], "needs two active epochs"),
    (["--space", "agp+auto_thresholds", "--set", "CAC_RULE=plasticity"], "CAC_RULE=plasticity can't be combined"),
    (["--space", "agp", "--set", "pruning_weights=3"], "pruning_weights"),
    (["--space", "schedule", "--schedule", "names.yaml"], "conv9.weight"),
    (["--space", "schedule", "--schedule", "late.yaml"], "the schedule never acts, for it begins in epoch 24"),
    (["--space", "schedule", "--schedule", "wrong.yaml"], "wrong.yaml"),
    (["--space", "auto_thresholds+schedule", "--schedule", "bits.yaml"], "can't be combined with quantizers"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_a_wrong_search_ends_in_one_line_before_ray_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import tune_cac.tuning.run as searching

    monkeypatch.chdir(tmp_path)
    pruner = "pruners: {p: {class: SparsityLevelParameterPruner, levels: {%s: !search {low: 0.2, high: 0.5}}}}\n"
    policy = "policies: [{pruner: {instance_name: p}, epochs: [%d]}]\n"
    Path("mine.yaml").write_text(MARKED)
    Path("names.yaml").write_text("version: 1\n" + pruner % "conv9.weight" + policy % 1)
    Path("late.yaml").write_text("version: 1\n" + pruner % "conv1.weight" + policy % 24)
    Path("wrong.yaml").write_text("version: 1\n" + pruner % "conv1.weight" + "polices: []\n")
    Path("bits.yaml").write_text(
        "version: 1\nquantizers: {q: {class: DorefaQuantizer, bits_weights: !search {low: 3, high: 5}}}\n"
        "policies: [{quantizer: {instance_name: q}, epochs: [1]}]\n"
    )

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a study was made, or Ray was started")

    monkeypatch.setattr(searching, "open_study", started)
    epochs = [] if "--epochs" in arguments else ["--epochs", "4"]
    assert main(["search", "--trials", "2", "--name", "s", *epochs, *arguments]) == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line]
    assert message in said
    assert "Traceback" not in said
    assert len(lines) == 1 or arguments[-1] == "wrong.yaml", said
    assert not (tmp_path / "results").exists()


def test_policies_that_begin_after_the_run_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two never acts: the search goes on, and says so."""
    import tune_cac.tuning.run as searching

    class Reached(Exception):
        pass

    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(searching, "open_study", reached)
    file = tmp_path / "s.yaml"
    file.write_text(
        "version: 1\n"
        "pruners: {p: {class: SparsityLevelParameterPruner, levels: {conv1.weight: !search {low: 0.2, high: 0.5}}}}\n"
        "policies:\n- {pruner: {instance_name: p}, epochs: [1]}\n- {pruner: {instance_name: p}, epochs: [30]}\n"
    )
    with (
        pytest.warns(UserWarning, match="policies 1 of the schedule never act, for the last epoch of a trial is 3"),
        pytest.raises(Reached),
    ):
        searching.search(space="schedule", schedule=file, epochs=4, results=tmp_path)
