"""Options of a search: bytes as people write them, and one declaration for every place that knows an option."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tune_cac
from analysis.io.study_files import StudyInfo
from analysis.io.study_options import StudyOptions, options_of
from trainables.errors import UserError
from tune_cac.cli.main import build_parser, main
from tune_cac.cli.search import options_given
from tune_cac.study.search_options import SearchOptions


@pytest.mark.parametrize(
    ("text", "number"),
    [("20GB", 20 * 10**9), ("1.5 mb", 1_500_000), ("512MiB", 512 * 2**20), ("4096", 4096), ("0", 0), (7, 7)],
)
def test_bytes_with_units(text: str | int, number: int) -> None:
    assert SearchOptions(checkpoint_budget=text).checkpoint_budget == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("3600", 3600), ("1h30m", 5400), ("1 h 30 m", 5400), ("1.5H", 5400), ("2d", 172_800), (7, 7)],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert SearchOptions(time_budget=text).time_budget == seconds


NOT_A_NUMBER = {
    "checkpoint_budget": ["", "GB", "-1", "1e3", "20 GiBs", "ten", True, "1,5GB"],
    "time_budget": ["", "0", "-5", "30m1h", "1,5h", "m", "nan", "1h30", True, 0, float("inf")],
    "trial_timeout": ["soon"],
    "cost_budget": [0, -1.5, float("nan"), float("inf"), True],
    "seeds": [0, 17, 2.5, True, "four"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NOT_A_NUMBER.items() for value in values]
)
def test_what_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^--{name.replace('_', '-')} must be an? .*, got {re.escape(repr(value))}$"):
        SearchOptions(**{name: value})


@pytest.mark.parametrize("name", ["sampler", "device"])
def test_none_is_no_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"^unknown --{name} 'None': Valid: auto, "):
        SearchOptions(**{name: None})


def test_a_forward_cache_is_for_trials_of_one_process() -> None:
    SearchOptions(hold={"forward_cache_mb": 64})
    with pytest.raises(UserError, match=r"forward_cache_mb must be 0 with several workers a trial, .*, got 64"):
        SearchOptions(hold={"forward_cache_mb": 64}, workers_per_trial=2)


def test_every_option_is_on_the_command_line_in_python_and_in_the_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["search", "--help-all"])
    flags = set(capsys.readouterr().out.replace(",", " ").split())
    keywords = inspect.signature(tune_cac.search).parameters
    text = inspect.getdoc(tune_cac.search) or ""
    declared = list(options_of(SearchOptions))
    # The texts of the space's files come from the files, and from study.json; the other is found out.
    named = [found.name for found in fields(SearchOptions) if found.name not in ("space_files", "fresh_processes")]
    assert [option.name for option in declared] == named == list(keywords)
    for option in declared:
        assert option.flag in flags
        assert keywords[option.name].default == option.default
        assert f"    {option.name}: {option.meaning.split()[0]}" in text


def test_a_resumed_study_takes_no_option_that_it_has_settled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tune_cac.tuning.run import resume

    monkeypatch.setattr("tune_cac.ray_backend.loggers.find_spec", lambda name: name)  # an extra
    anew = {option.name for option in options_of(SearchOptions) if option.on_resume}
    assert set(inspect.signature(resume).parameters) == {"name", *anew}
    for option in options_of(SearchOptions):
        values = [] if option.type is bool else [{"device": "cpu", "log": "mlflow"}.get(option.name, "2")]
        code = main(["search", "--resume", "nothing", option.flag, *values])
        message = capsys.readouterr().err
        assert code == 2
        assert ("no study 'nothing'" in message) == (option.name in anew), message
        assert (f"it takes no {option.flag}: leave that out" in message) == (option.name not in anew), message


def test_the_study_keeps_the_options_and_what_it_found() -> None:
    kept = {found.name for found in fields(StudyOptions)}
    assert {found.name for found in fields(StudyInfo)} - kept == {
        "versions", "candidates", "method", "why_little", "script_epochs", "format", "storage", "answer", "looks",
            "interrupted",
    }  # fmt: skip
    info = StudyInfo(epochs=3, versions={}, trials=7, seed=5, hold={"forward_cache_mb": 1}, gpus_per_trial=0.5)
    again = SearchOptions.of_study(info, concurrency=2)
    assert {name: getattr(again, name) for name in ("epochs", "trials", "seed", "hold", "gpus_per_trial")} == {
        "epochs": 3, "trials": 7, "seed": 5, "hold": {"forward_cache_mb": 1}, "gpus_per_trial": 0.5,
    }  # fmt: skip
    assert again.concurrency == 2


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^unknown option 'trails': did you mean 'trials'"):
        tune_cac.search(trails=3)


def test_the_first_page_of_help_has_what_most_searches_need(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    page = capsys.readouterr().out
    shown = {option.flag for option in options_of(SearchOptions) if f"  {option.flag} " in page}
    assert shown == {option.flag for option in options_of(SearchOptions) if not option.rare}
    assert len(shown) <= 18


def test_a_study_file_has_the_options_that_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("trials: 9\nsampler: tpe\nhold: {CAC_WATCH: linear}\nworkload_options: [width=8]\n")
    parser = build_parser()
    given = options_given(parser.parse_args(["search", "--study", str(file), "--trials", "5"]))
    assert SearchOptions(hold={"CAC_WHOLE_UNITS": 1}).fixed == {"CAC_WHOLE_UNITS": True}
    assert given == {
        "trials": 5, "sampler": "tpe", "hold": {"CAC_WATCH": "linear"}, "workload_options": ["width=8"],
    }  # fmt: skip
    for text, said in (
        ("trails: 9", "unknown option 'trails': did you mean 'trials'"),
        ("- trials", r"must be a YAML map of options, such as trials: 12"),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            options_given(parser.parse_args(["search", "--study", str(file)]))


def test_a_file_given_as_the_space_is_a_schedule_or_a_grid_by_what_it_says(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("all: {CAC_VAR_START_ITR: 0, CAC_VAR_START_THR: [0.98, 0.99]}\n")
    assert SearchOptions(space=str(grid)) == SearchOptions(grid=grid)
    marked, thinning = tmp_path / "marked.yaml", tmp_path / "thinning.yaml"
    text = (
        "version: 1\npruners: {p: {class: SensitivityPruner, sensitivities: {conv2.weight: !search {low: 0, high: 1}}}}"
        "\npolicies: [{pruner: {instance_name: p}, epochs: [1]}]\n"
    )
    marked.write_text(text)
    remover = "extensions: {x: {class: FilterRemover}}\n"
    thinning.write_text(remover + text.replace("[1]}", "[1]}, {extension: {instance_name: x}, epochs: [2]}"))
    options = SearchOptions(space=str(marked))
    assert options == SearchOptions(space="schedule", schedule=marked) == SearchOptions(schedule=marked)
    weights = tmp_path / "weights.yaml"
    weights.write_text("all: {distill_weight: [0.2, 0.5]}\n")
    assert SearchOptions(grid=weights, schedule=thinning, hold={"distill_teacher": "resnet20"}).space == "grid"
    assert options.ranked_by == "sparse-inference"
    assert SearchOptions(space=str(thinning)).ranked_by == "inference"  # what is removed is not executed
    assert SearchOptions(space="auto_thresholds+schedule", schedule=thinning).ranked_by == "both"
