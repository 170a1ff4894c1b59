"""Every message of the command line: one line with the rule, the value and the way out, exit code 2."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands_run import Run

import tune_cac
from analysis.io.layout import Layout, StudyInfo
from search_spaces import SPACES
from trainables.gradskip.variables import BY_NAME
from trainables.runtime.processors import processors
from tune_cac.cli.main import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

VALID_VARIABLES = "Valid: " + ", ".join(sorted(BY_NAME))


VALID_WORKLOADS = "Valid: binary_mlp, digits, gan_digits, images, package.module:function, rosenbrock, text"
VALID_SPACES = f"Valid: {', '.join(sorted(SPACES))}"


LIST = "must be a comma list of integers >= 0 in strictly ascending order, such as 10,20, got"


def a_study(root: Path, **changes: object) -> Layout:
    layout = Layout(root)
    root.mkdir(parents=True)
    values = {
        "space": "auto_thresholds", "workload": "digits", "epochs": 30, "seed": 0, "trials": 2,
        "allowed_drop": 0.005, "versions": {},
    }  # fmt: skip
    layout.write_info(StudyInfo(**(values | changes)))  # type: ignore[arg-type]
    return layout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "search --space auto_treshold",
            f"unknown space 'auto_treshold': did you mean 'auto_thresholds'? {VALID_SPACES}",
        ),
        (
            "search --workload digit",
            f"unknown workload 'digit': did you mean 'digits'? {VALID_WORKLOADS}",
        ),
        ("search --trials 0", "--trials must be an integer >= 1, got 0"),
        ("search --epochs 0", "--epochs must be an integer >= 1, got 0"),
        ("search --seed -1", "--seed must be an integer in [0, 4294967295], got -1"),
        ("search --concurrency 0", "--concurrency must be an integer >= 1, got 0"),
        ("search --cpus-per-trial 0", "--cpus-per-trial must be an integer >= 1, got 0"),
        ("search --gpus-per-trial -1", "--gpus-per-trial must be a number >= 0, got -1.0"),
        ("search --checkpoint-every nan", "--checkpoint-every must be a number >= 0, got nan"),
        (
            "search --allowed-drop 1.5",
            "the allowed accuracy loss must be a fraction in [0, 1), such as 0.005 for half a point, or such as 2% of "
            "the baseline's, got 1.5",
        ),
        (
            "search --name a/b",
            "--name must be letters, digits, '.', '_' and '-', beginning with a letter or digit, got 'a/b'",
        ),
        ("search --resume nothing", "no study 'nothing' in results: there is no study there yet"),
        (
            "search --resume x --trials 3 --space y",
            "--resume finishes a study as it was begun, so it takes no --space, --trials: leave that out, "
            "or use --name without --resume to add trials",
        ),
        (
            "search --resume x --set CAC_VAR_START_THR=0.9",
            "--resume finishes a study as it was begun, so it takes no --set: leave that out, "
            "or use --name without --resume to add trials",
        ),
        (
            "search --set CAC_VAR_START_THR",
            "--set takes VARIABLE=VALUE, such as CAC_VAR_START_THR=0.97, got 'CAC_VAR_START_THR'",
        ),
        (
            "search --space braking_distance --set CAC_VAR_STRT_THR=0.9",
            f"unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'? {VALID_VARIABLES}",
        ),
        (
            "search --set forward_cache=1",
            f"unknown setting 'forward_cache': did you mean 'forward_cache_mb'? {VALID_VARIABLES}, "
            "activation_checkpointing, agp_final_sparsity, agp_initial_sparsity, batch_size, channels_last, "
            "clip_grad_norm, cluster_count, cluster_decay, cluster_every, cluster_iterations, cluster_mode, "
            "compile_mode, cudnn_benchmark, deterministic, discrete_objective, discrete_stride, "
            "distill_checkpoint, distill_start_epoch, distill_teacher, distill_temperature, distill_weight, "
            "forward_cache_mb, fused_optimizer, gradient_epsilon, gradient_epsilon_decays, gradient_layers, "
            "gradient_start_itr, importance_by, importance_uniform, importance_update_every, kept_samples, "
            "kfac_damping, kfac_decay, kfac_factor_every, kfac_fisher, kfac_inverse_every, kfac_kl_clip, "
            "loader_workers, pin_memory, precision, pruning_end_epoch, pruning_frequency, "
            "pruning_start_epoch, statistics_measurements, statistics_samples, ste_candidates, ste_estimator, "
            "ste_normalised, ste_samples, ste_sigma, ste_spread, ste_trial_step, ste_weighting, svrg_alpha, "
            "svrg_alpha_decays, svrg_snapshot_every, zero_threshold, zero_unbiased",
        ),
        ("search --set forward_cache_mb=lots", "forward_cache_mb must be an integer >= 0, got 'lots'"),
        ("search --set CAC_WHOLE_UNITS=maybe", "CAC_WHOLE_UNITS must be 0 or 1, got 'maybe'"),
        (
            "search --space auto_thresholds_by_network",
            "space auto_thresholds_by_network is gone: settings for each network saved 2.2 %: take auto_thresholds, "
            "with CAC_WATCH for one of them",
        ),
        (
            "search --space braking_distance --set CAC_BRAKING_DISTANCE=3",
            "CAC_BRAKING_DISTANCE is searched by space braking_distance, so it can't be fixed, got "
            "CAC_BRAKING_DISTANCE=3: leave it out, or take another space",
        ),
        (
            "search --space manual_layers --set CAC_STOP_LAYER_NUM=3,9",
            "CAC_STOP_LAYER_NUM is searched by space manual_layers, so it can't be fixed, got CAC_STOP_LAYER_NUM=3,9: "
            "leave it out, or take another space",
        ),
        (
            "search --space stop_rules --set CAC_RULE_DEPTH=0.3",
            "CAC_RULE_DEPTH is searched by space stop_rules, so it can't be fixed, got CAC_RULE_DEPTH=0.3: leave it "
            "out, or take another space",
        ),
        (
            "search --seed 99999999999999999999",
            "--seed must be an integer in [0, 4294967295], got 99999999999999999999",
        ),
        (
            "trial --seed 4294967296",
            "seed must be an integer in [0, 4294967295], got 4294967296",
        ),
        (
            "search --cpus-per-trial 9999",
            f"--cpus-per-trial must be at most {processors()}, which is all that this process may use, got 9999; give "
            "--address to search on a cluster",
        ),
        ("search --retries -1", "--retries must be an integer >= 0, got -1"),
        (
            "search --script train.sh --epochs 3",
            "--epochs must be left out where the command has no {epochs} to take it, got 3",
        ),
        ("search --set epochs=3", "epochs has an option of its own, so it can't be set by name: use --epochs"),
        (
            "search --set method=none",
            "method has an option of its own, so it can't be set by name: use --method of a trial; in a search the "
            "space says it",
        ),
        (
            "search --set CAC_STOP_LAYER_ITR=3",
            "CAC_STOP_LAYER_ITR=3 can't be fixed in space auto_thresholds: CAC_STOP_LAYER_NUM and CAC_STOP_LAYER_ITR "
            "must have one entry for each stop, got 0 layers ('') and 1 iterations ('3')",
        ),
        (
            "search --space stop_rules --epochs 10 --set CAC_RULE_END_ITR=40",
            "CAC_RULE_END_ITR=40 can't be fixed in space stop_rules: CAC_RULE_END_ITR must be after CAC_RULE_START_ITR "
            "(50), got 40",
        ),
        (
            "trial --set seed=3",
            "seed has an option of its own, so it can't be set by name: use --seed",
        ),
        (
            "trial --set CAC_VAR_STRT_THR=1",
            f"unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'? {VALID_VARIABLES}",
        ),
        ("trial --set CAC_VAR_START_THR=abc", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 'abc'"),
        ("trial --set CAC_VAR_START_THR=1.2", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 1.2"),
        (
            "trial --set CAC_VAR_START_THR",
            "--set takes VARIABLE=VALUE, such as CAC_VAR_START_THR=0.97, got 'CAC_VAR_START_THR'",
        ),
        (
            "trial --set CAC_STOP_LAYER_NUM=1,2 --set CAC_STOP_LAYER_ITR=5",
            "CAC_STOP_LAYER_NUM and CAC_STOP_LAYER_ITR must have one entry for each stop, got 2 layers ('1,2') and "
            "1 iterations ('5')",
        ),
        (
            "trial --set CAC_STOP_LAYER_NUM=2,1 --set CAC_STOP_LAYER_ITR=5,6",
            f"CAC_STOP_LAYER_NUM {LIST} '2,1'",
        ),
        (
            "trial --set CAC_STOP_LAYER_NUM=20 --set CAC_STOP_LAYER_ITR=5",
            "CAC_STOP_LAYER_NUM must be at most 19 (this model has 20 parameters, numbered from 0), got 20",
        ),
        (
            "trial --method none --set CAC_VAR_SAMPLES=2",
            "--set and --schedule need a method that heeds them, got --method none",
        ),
        ("trial --epochs 0", "epochs must be an integer >= 1, got 0"),
        (
            "trial --workload x",
            f"unknown workload 'x': {VALID_WORKLOADS}",
        ),
        ("spaces zzz", f"unknown space 'zzz': {VALID_SPACES}"),
        ("spaces auto_thresholds --epochs 0", "--epochs must be an integer >= 1, got 0"),
        ("rank nothing", "no study 'nothing' in results: there is no study there yet"),
        ("report nothing --results elsewhere", "no study 'nothing' in elsewhere: there is no study there yet"),
        ("rank nothing --top 0", "--top must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert err == f"tune_cac: error: {message}\n"
    assert out == ""


def test_a_study_of_another_space_under_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_study(tmp_path / "results" / "mine", space="other_space")
    assert main(["search", "--name", "mine"]) == 2
    assert capsys.readouterr().err == (
        "tune_cac: error: results/mine holds a study with space 'other_space', not 'auto_thresholds': choose another "
        "--name, or the same settings to add trials to it\n"
    )


@pytest.mark.parametrize(
    ("held", "given", "message"),
    [
        ({}, ["--set", "CAC_WATCH=linear"], "nothing fixed, not CAC_WATCH=linear"),
        ({"CAC_WATCH": ["linear"]}, [], "CAC_WATCH=linear fixed, not nothing"),
        (
            {"CAC_WATCH": ["linear"], "CAC_WHOLE_UNITS": True},
            ["--set", "CAC_WATCH=conv,linear"],
            "CAC_WATCH=linear CAC_WHOLE_UNITS=1 fixed, not CAC_WATCH=conv,linear",
        ),
    ],
)
def test_a_study_that_holds_other_values(
    held: dict[str, Any], given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_study(tmp_path / "results" / "mine", hold=held)
    assert main(["search", "--name", "mine", *given]) == 2
    assert capsys.readouterr().err == (
        f"tune_cac: error: results/mine holds a study with {message}: choose another --name, or the same --set to add "
        "trials to it\n"
    )


@pytest.mark.parametrize("field", [{"epochs": 3}, {"seed": 4}])
def test_a_study_of_another_run_under_the_same_name(
    field: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_study(tmp_path / "results" / "mine", **field)
    assert main(["search", "--name", "mine"]) == 2
    assert f"holds a study with {next(iter(field))} {next(iter(field.values()))}, not" in capsys.readouterr().err


def test_a_folder_of_something_else_under_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results" / "mine").mkdir(parents=True)
    (tmp_path / "results" / "mine" / "thesis.tex").touch()
    assert main(["search", "--name", "mine"]) == 2
    assert capsys.readouterr().err == (
        "tune_cac: error: results/mine is not empty and holds no study: choose another --name\n"
    )


def test_a_results_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["search", "--results", "file", "--name", "s"]) == 2
    assert capsys.readouterr().err == (
        "tune_cac: error: cannot write results to file/s: Not a directory; choose another --results\n"
    )


def test_a_study_whose_search_never_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_study(tmp_path / "results" / "one")
    assert main(["rank", "one"]) == 2
    assert "its search never began; delete the folder and search anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "study.json cannot be read: "), (json.dumps({"format": 99}), "has format 99, this version reads 1")],
)
def test_a_broken_study_file(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = a_study(tmp_path / "results" / "one")
    layout.info.write_text(text)
    assert main(["rank", "one"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="--trials must be"):
        main(["search", "--trials", "0", "--debug"])


def test_wrong_arguments_end_before_torch_or_ray_is_loaded(tune_cac_command: Run) -> None:
    done = tune_cac_command("search", "--trials", "0", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "tune_cac.study.options" in loaded
    assert loaded & {"torch", "ray", "optuna"} == set()


def test_no_command_prints_help_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Start with: python -m tune_cac search" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tune_cac {tune_cac.__version__}\n"
    # The one place for the number is the package: setuptools reads it from there.
    assert importlib.metadata.version("tune-cac") == tune_cac.__version__


@pytest.mark.slow
def test_the_console_script_is_the_module() -> None:
    for arguments, code in ((["--version"], 0), (["search", "--space", "no"], 2)):
        script, module = (
            subprocess.run([*start, *arguments], capture_output=True, text=True)
            for start in ([str(Path(sys.executable).parent / "tune-cac")], [sys.executable, "-m", "tune_cac"])
        )
        assert (script.returncode, script.stdout, script.stderr) == (code, module.stdout, module.stderr)
        assert module.returncode == code


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["search", "--trials", "abc"], "tune_cac search: error: --trials must be an integer, got 'abc'; "),
        (["search", "--spaces", "x"], "tune_cac search: error: unknown option '--spaces': did you mean --space?; "),
        (["search", "--space"], "tune_cac search: error: --space needs a value; "),
        (
            ["recommend", "--seeds", "5"],
            "tune_cac: error: command recommend is gone: it was off by more than the allowed",
        ),
        (
            ["search", "--prior", "mine"],
            "tune_cac search: error: option --prior is gone: a search from earlier studies ",
        ),
        (["lst"], "tune_cac: error: unknown command 'lst'; valid: search, trial, "),
        (["serach"], "tune_cac: error: unknown command 'serach': did you mean search?; valid: search, "),
        (["rank", "mine", "more"], "tune_cac rank: error: unknown argument 'more'"),
        (["tree"], "tune_cac tree: error: "),
    ],
)
def test_errors_of_parsing_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(line), err
    assert err.count("\n") == 1
