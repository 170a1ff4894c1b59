"""Every message of the command line: one line with the rule, the value and the way out, exit code 2."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands_run import Run

import tune_cac
from analysis.io.study_files import Layout, StudyInfo
from tune_cac.cli.main import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def a_study(root: Path, **changes: object) -> Layout:
    layout = Layout(root)
    root.mkdir(parents=True)
    values = {
        "space": "auto_thresholds", "workload": "digits", "epochs": 30, "seed": 0, "trials": 2,
        "allowed_drop": 0.005, "versions": {},
    }  # fmt: skip
    layout.write_info(StudyInfo(**(values | changes)))  # type: ignore[arg-type]
    return layout


#: Arguments that are refused, each with the line that says so, or its beginning.
REFUSED = r"""
search --space auto_treshold
    unknown space 'auto_treshold': did you mean 'auto_thresholds'? Valid: agp, auto_thresholds, braking_distance, centr
search --workload digit
    unknown workload 'digit': did you mean 'digits'? Valid: binary_mlp, digits, gan_digits, images, package.module:func
search --workload text_classification --data texts.csv
    workload text_classification needs --model NAME
search --trials 0
    --trials must be an integer >= 1, got 0
search --allowed-drop 1.5
    the allowed accuracy loss must be a fraction in [0, 1), such as 0.005 for half a point, or such as 2% of the baseli
search --name a/b
    --name must be letters, digits, '.', '_' and '-', beginning with a letter or digit, got 'a/b'
search --resume nothing
    no study 'nothing' in results: there is no study there yet
search --resume x --trials 3 --space y
    --resume finishes a study as it was begun, so it takes no --space, --trials: leave that out, or use --name without
search --set CAC_VAR_START_THR
    --set takes VARIABLE=VALUE, such as CAC_VAR_START_THR=0.97, got 'CAC_VAR_START_THR'
search --set CAC_VAR_STRT_THR=0.9
    unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'? Valid: CAC_BRAKING_DISTANCE, CAC_LR_FACTOR,
search --set forward_cache=1
    unknown setting 'forward_cache': did you mean 'forward_cache_mb'? Valid: CAC_
search --set method=none
    method has an option of its own, so it can't be set by name: use --method of a trial; in a search the space says it
search --space auto_thresholds_by_network
    space auto_thresholds_by_network is gone: settings for each network
search --space manual_layers --set CAC_STOP_LAYER_NUM=3,9
    CAC_STOP_LAYER_NUM is searched by space manual_layers, so it can't be fixed, got CAC_STOP_LAYER_NUM=3,9: leave it o
search --cpus-per-trial 9999
    --cpus-per-trial must be at most
search --script train.sh --workload digits
    --script trains with a command of yours, so it takes no --workload, got digits
search --script train.sh --epochs 3
    --epochs must be left out where the command has no {epochs} to take it, got
search --set CAC_STOP_LAYER_ITR=3
    CAC_STOP_LAYER_ITR=3 can't be fixed in space auto_thresholds: CAC_STOP_LAYER_NUM and CAC_STOP_LAYER_ITR must
search --space stop_rules --epochs 10 --set CAC_RULE_END_ITR=40
    CAC_RULE_END_ITR=40 can't be fixed in space stop_rules: CAC_RULE_END_ITR must be after CAC_RULE_START_ITR (50), got
trial --set CAC_VAR_START_THR=1.2
    CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 1.2
trial --set CAC_STOP_LAYER_NUM=1,2 --set CAC_STOP_LAYER_ITR=5
    CAC_STOP_LAYER_NUM and CAC_STOP_LAYER_ITR must have one entry for each stop, got 2 layers ('1,2') and 1 iterations
trial --set CAC_STOP_LAYER_NUM=20 --set CAC_STOP_LAYER_ITR=5
    CAC_STOP_LAYER_NUM must be at most 19 (this optimizer has 20 parameters, numbered from 0), got 20
trial --method none --set CAC_VAR_SAMPLES=2
    --set and --schedule need a method that heeds them, got --method none
trial --method compression
    method compression has nothing to compress with: give --schedule FILE
search --compatible
    --compatible is about a schedule: give --schedule FILE, too
trial --epochs 2 --kd-teacher resnet20 --kd-start-epoch 5
    distill_start_epoch must be below the 2 epochs of the run, got 5
trial --kd-resume t.pt --kd-dw 0.7
    --kd-distill-wt and --kd-student-wt must be 1 together, --kd-teacher-wt, a constant in the loss, 0, got
doctor --option depth
    a workload option must be NAME=VALUE
doctor --script torchrun\ train.py
    --script of doctor must be 'python FILE ...' or 'python -m MODULE ...', got 'torchrun train.py'
doctor --script python\ absent.py
    --script of doctor must name a file that is there, got absent.py
submit
    submit needs a command after --, such as: submit -- search --space auto_thresholds
submit -- dashboard s
    command of a job dashboard is gone: optuna-dashboard results/NAME/optuna.journal
submit -- submit
    unknown command of a job 'submit': Valid: confirm, doctor, export, export-model, replay, report, schedule, search,
submit -- report s --results here
    --results of a job must be an absolute folder of the cluster or a URI, got here: a job's own folder is removed;
submit --env RAY_AUTH_TOKEN -- report s
    --env must not pass RAY_AUTH_TOKEN, which a job gets from Ray itself: leave it out
submit --env NOT_SET_HERE -- report s
    --env must name a variable that is set here, or NAME=VALUE, got NOT_SET_HERE
submit --pip none.txt -- report s
    --pip must be a requirements file, got none.txt: there is no such file
report nothing --results elsewhere
    no study 'nothing' in elsewhere: there is no study there yet
"""


@pytest.mark.parametrize(("arguments", "message"), re.findall(r"^(\w.*)\n    (.*)$", REFUSED, re.MULTILINE))
def test_wrong_arguments(arguments: str, message: str, refused: Callable[..., str]) -> None:
    assert refused(*shlex.split(arguments)).startswith(message)


#: More of what people type, several lines a command.
WRONG = r"""
best
plot x
list
search --spce auto_thresholds
search --epochs -1
search --epochs three
search --seed x
search --seeds 17
search --trials
search --allowed-drop half
search --allowed-drop -0.1
search --metric
search --direction up
search --sampler grid2
search --lengths 2
search --lengths a,b
search --time-budget soon
search --cost-budget -3
search --device tpu
search --concurrency 0
search --gpus-per-trial -1
search --checkpoint-budget much
search --workload images
search --workload images --data nowhere --model resnet18
search --workload no.such.module:make
search --workload my_module
search --script
search --script 'python {nothing}.py'
search --schedule none.yaml --space schedule
search --space none.yaml
search --space auto_thresholds+auto_thresholds
search --study none.yaml
search --resume
search more words
trial --epochs 0
trial --set
trial --workload digits --option
trial --schedule none.yaml
trial --method gradskp
trial --save /nowhere/at/all.pt --epochs x
trial --save .
trial --save /dev/null/weights.pt
trial --device gpu
confirm
confirm nothing
confirm nothing --seeds 1
confirm nothing --top none
report
report nothing
report nothing --al
report nothing --output
export
export nothing
export nothing --as torch
export nothing --trial one
export-model
export-model nothing --to onx
export-model nothing --output model.pt
export-model nothing --int8 --to torch
export-model nothing
studies
studies list
studies delete
studies delete nothing
tree
tree nothing
tree nothing --depth x
replay
replay nothing
replay nothing --set CAC_VAR_START_THR
spaces auto_treshold
spaces auto_thresholds more
spaces --epochs 0
doctor --workload digit
doctor --script
doctor --epochs x
schedule
schedule check
schedule look none.yaml
sensitivity --workload digit
sensitivity --checkpoint none.pt
sensitivity --set CAC_VAR_START_THR
shim
shim nowhere
shim a b
workloads digits
workloads --all
workloads --debug more
submit report
submit --address
submit --pip
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_what_people_type_wrongly_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(shlex.split(line))
    except SystemExit as ended:  # of the parser
        code = ended.code
    out, said = capsys.readouterr()
    assert (code, out, said.count("\n")) == (2, "", 1), said
    assert said.startswith("tune_cac")
    assert len(said) < 400


@pytest.mark.parametrize(
    ("held", "given", "message"),
    [
        ({"space": "other_space"}, [], "a study with space 'other_space', not 'auto_thresholds'"),
        (
            {"hold": {"CAC_WATCH": ["linear"], "CAC_WHOLE_UNITS": True}},
            ["--set", "CAC_WATCH=conv,linear"],
            "a study with CAC_WATCH=linear CAC_WHOLE_UNITS=1 fixed, not CAC_WATCH=conv,linear",
        ),
    ],
)
def test_a_study_of_other_settings_under_the_same_name(
    held: dict[str, Any], given: list[str], message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    a_study(tmp_path / "results" / "mine", **held)
    said = refused("search", "--name", "mine", *given)
    assert said.startswith(f"results/mine holds {message}: choose another --name, or the same ")
    assert said.endswith("to add trials to it")


def test_folders_that_cannot_hold_a_new_study(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "results" / "mine").mkdir(parents=True)
    (tmp_path / "results" / "mine" / "thesis.tex").touch()
    assert refused("search", "--name", "mine") == (
        "results/mine is not empty and holds no study: choose another --name"
    )
    (tmp_path / "file").touch()
    assert refused("search", "--results", "file", "--name", "s") == (
        "cannot write results to file/s: Not a directory; choose another --results"
    )


def test_studies_that_cannot_be_read(tmp_path: Path, refused: Callable[..., str]) -> None:
    layout = a_study(tmp_path / "results" / "one")
    assert refused("report", "one").endswith("its search never began; delete the folder and search anew")
    for text, message in (
        ("{", "study.json cannot be read: "),
        (json.dumps({"format": 99}), "has format 99, this version reads 1"),
    ):
        layout.info.write_text(text)
        assert message in refused("report", "one")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="--trials must be"):
        main(["search", "--trials", "0", "--debug"])


def test_wrong_arguments_end_before_torch_or_ray_is_loaded(tune_cac_command: Run) -> None:
    done = tune_cac_command("search", "--trials", "0", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "tune_cac.study.search_options" in loaded
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
        (["confirm", "nothing", "--top", "x"], "tune_cac confirm: error: --top must be an integer, got 'x'; "),
        (
            ["report", "nothing", "--top", "3"],
            "tune_cac report: error: option --top is gone: report NAME --all prints ",
        ),
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
        (["xyz"], "tune_cac: error: unknown command 'xyz': Valid: confirm, doctor, "),
        (["serach"], "tune_cac: error: unknown command 'serach': did you mean 'search'? Valid: confirm, "),
        (["report", "mine", "more"], "tune_cac report: error: unknown argument 'more'"),
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
