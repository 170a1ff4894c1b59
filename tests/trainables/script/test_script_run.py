"""A trial trained by a command: real processes, and what is said of those that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import rows_to_the_end
from thorough import rest_thorough

from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.metrics import ROW
from trainables.script.run import (
    ERRORS_FILE,
    LOG_FILE,
    RUN_FACTS,
    ScriptFailed,
    ScriptRun,
    check_command,
    placeholders,
)
from trainables.workloads import build


def config(command: str, cwd: Path, **more: Any) -> TrialConfig:
    return TrialConfig(workload="script", workload_options=(f"command={command}", f"cwd={cwd}"), epochs=1, **more)


def rows_of(command: str, cwd: Path, **more: Any) -> list[dict[str, Any]]:
    return rows_to_the_end(ScriptRun(config(command, cwd, **more), cwd))


def test_lines_of_a_shell_script_become_rows(tmp_path: Path) -> None:
    command = (
        """echo training; echo '{"accuracy": 0.5, "step": 10, "loss": 2, "compute_saved": 0.25}'; echo noise >&2; """
        """echo '{"accuracy": 0.75, "step": 20, "test_accuracy": 0.7, "compute_saved": 0.5}'"""
    )
    rows = rows_of(command, tmp_path)
    assert [row["quality"] for row in rows] == [0.5, 0.75]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["step"] for row in rows] == [10, 20]
    assert [row["compute_saved"] for row in rows] == [0.25, 0.5]
    assert rows[0]["train_loss"] == 2
    assert rows[1]["test_quality"] == 0.7
    assert rows[1]["executed_flops"] is None
    assert {metric.name for metric in ROW} | {RUN_FACTS} == {*rows[0], "further_metrics"}
    assert json.loads(rows[1][RUN_FACTS])["total_steps"] == 20
    assert "training" in (tmp_path / LOG_FILE).read_text()
    assert (tmp_path / ERRORS_FILE).read_text() == "noise\n"


def test_a_second_report_at_a_step_is_no_epoch(tmp_path: Path) -> None:
    """As of a Trainer that predicts the test split in the end; without steps nothing tells them apart."""
    lines = [
        {"accuracy": 0.5, "step": 10},
        {"accuracy": 0.6, "step": 20},
        {"accuracy": 0.6, "test_accuracy": 0.7, "step": 20},
    ]
    for steps, epochs in ((True, [1, 2]), (False, [1, 2, 3])):
        shown = [{k: v for k, v in line.items() if steps or k != "step"} | {"compute_saved": 0.1} for line in lines]
        rows = rows_of("; ".join(f"echo '{json.dumps(line)}'" for line in shown), tmp_path)
        assert [row["epoch"] for row in rows] == epochs
        assert (rows[-1]["quality"], rows[-1]["test_quality"]) == (0.6, 0.7)


def test_flops_that_a_script_counted_itself(tmp_path: Path) -> None:
    row = rows_of("""echo '{"accuracy": 1, "executed_flops": 75, "dense_flops": 100}'""", tmp_path)[-1]
    assert (row["compute_saved"], row["executed_flops"], row["dense_flops"]) == (0.25, 75, 100)
    row = rows_of("""echo '{"accuracy": 1, "executed_flops": 75}'""", tmp_path)[-1]
    assert (row["executed_flops"], row["dense_flops"]) == (75, 75)  # against the baseline's, when that is known


def test_variables_and_placeholders_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAC_VAR_MT_THR", "0.1")  # of whoever started the search
    monkeypatch.setenv("TUNE_CAC_EPOCHS", "7")  # of an answer that they have sourced
    shown = tmp_path / "shown.json"
    (tmp_path / "show.py").write_text(
        "import json, os, sys\n"
        f"json.dump([dict(os.environ), sys.argv[1:], os.getcwd()], open({str(shown)!r}, 'w'))\n"
        """print('{"accuracy": 1, "compute_saved": 0}')\n"""
    )
    command = f"{sys.executable} show.py {{CAC_VAR_START_THR}} {{CAC_STOP_LAYER_NUM}} {{seed}} {{{{x}}}}"
    rows_of(command, tmp_path, seed=3, CAC_VAR_START_THR=0.97, CAC_VAR_START_ITR=7)
    environment, arguments, folder = json.loads(shown.read_text())
    assert arguments == ["0.97", "", "3", "{x}"]
    assert environment["CAC_VAR_START_THR"] == "0.97"
    assert "TUNE_CAC_EPOCHS" not in environment
    assert environment["CAC_VAR_START_ITR"] == "7"
    assert environment["CAC_VAR_MT_THR"] == "0.96"
    assert environment["TUNE_CAC_SEED"] == "3"
    assert environment["TUNE_CAC_TRIAL_DIR"] == str(tmp_path)
    assert folder == str(tmp_path)
    rows_of(command, tmp_path, method="none")
    environment, arguments, _ = json.loads(shown.read_text())
    assert environment["CAC_VAR_START_THR"] == arguments[0] == "-1"  # the baseline is switched off


@pytest.mark.thorough
@pytest.mark.slow
def test_a_script_with_our_optimizer_reports_what_it_saved(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch, tune_cac as cac\n"
        "torch.manual_seed(int(os.environ['TUNE_CAC_SEED']))\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))\n"
        "optimizer = cac.gradskip.SGD(net.parameters(), lr=0.1, model=net)\n"
        "for step in range(12):\n"
        "    optimizer.zero_grad()\n"
        "    torch.nn.functional.cross_entropy(net(torch.rand(5, 4)), torch.randint(0, 3, (5,))).backward()\n"
        "    optimizer.step()\n"
        "    if step % 6 == 5:\n"
        "        cac.report(accuracy=step / 100)\n"
    )
    rows = rows_of(f"{sys.executable} train.py", tmp_path, CAC_STOP_LAYER_NUM=(1,), CAC_STOP_LAYER_ITR=(3,))
    forward = 2 * 5 * (32 + 24)
    dense = forward + forward + 2 * 5 * 24  # the first layer's input needs no gradient
    stopped = forward + 2 * 5 * 24
    assert [row["quality"] for row in rows] == [0.05, 0.11]
    assert rows[-1]["dense_flops"] == 12 * dense
    assert rows[-1]["executed_flops"] == 4 * dense + 8 * stopped
    assert rows[-1]["compute_saved"] == pytest.approx(1 - (4 * dense + 8 * stopped) / (12 * dense))
    assert rows[-1]["stopped_through"] == 1
    assert json.loads(rows[-1]["stop_events"])[0]["iteration"] == 3
    facts = json.loads(rows[-1][RUN_FACTS])
    assert facts["total_steps"] == 12
    assert facts["layer_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert rows[-1]["peak_memory_bytes"] > 10**6


#: A training of 6 steps in 2 epochs, with a place before and within it.
TRAINING = """
import sys
import torch
from tune_cac import gradskip as cac_optimizers
import tune_cac as cac
model = torch.nn.Linear(4, 2)
{before}
optimizer = cac_optimizers.SGD(model.parameters(), lr=0.1)
{first}
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if step % 3 == 2:
        {within}
"""


def trained(
    folder: Path, *, before: str = "", first: str = "", within: str, **environment: str
) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(TRAINING.format(before=before, first=first, within=within))
    given = " ".join(f"{name}={value}" for name, value in environment.items())
    return rows_of(f"{given} {sys.executable} train.py", folder)


REPORT = "cac.report(accuracy=step / 10)"


@pytest.mark.thorough
@pytest.mark.slow
def test_an_evaluation_before_the_training_is_no_epoch(tmp_path: Path) -> None:
    """Nor where what is counted cannot be written; the next test reports as early where it can."""
    early = "cac.report(accuracy=0.05)"
    rows = trained(tmp_path, before=early, first=early, within=REPORT, TUNE_CAC_TRIAL_DIR="/nowhere")
    assert [(row["epoch"], row["step"], row["quality"]) for row in rows] == [(1, 3, 0.2), (2, 6, 0.5)]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_report_is_read_whatever_stands_on_its_line(tmp_path: Path) -> None:
    noise = "sys.stdout.write('evaluating ... '); sys.stdout.flush(); print({'accuracy': 0.3}, end='\\r50 %')"
    early = "cac.report(accuracy=0.05)"
    rows = trained(tmp_path, before=early, first=early, within=f"{noise}; {REPORT}; print('done')")
    assert [row["quality"] for row in rows] == [0.2, 0.5]
    assert 'tune_cac.report: {"accuracy": 0.2, ' in (tmp_path / LOG_FILE).read_text()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "within", "fails"),
    [(7, REPORT, True), (7, "cac.report(accuracy=step / 10, early_stopped=step == 5)", False)],
)
def test_a_trial_takes_the_steps_of_its_length_or_says_that_it_stopped_early(
    tmp_path: Path, steps: int, within: str, fails: bool
) -> None:
    (tmp_path / "train.py").write_text(TRAINING.format(before="", first="", within=within))
    run = ScriptRun(config(f"{sys.executable} train.py", tmp_path), tmp_path / "trial", steps=steps)
    if fails:
        with pytest.raises(ScriptFailed, match="took 6 optimizer steps where a run of its length takes 7: it "):
            rows_to_the_end(run)
    else:
        assert len(rows_to_the_end(run)) == 2


@pytest.mark.parametrize("method", rest_thorough(["gradskip", "none"]))
def test_an_exception_is_shown_from_its_traceback_on_and_a_stop_named_as_its_cause(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\nprint('epoch 1: 20 %', file=sys.stderr)\nweight = torch.nn.Linear(2, 2).weight\n"
        "norm = 1 + weight.grad.norm()\n"
    )
    with pytest.raises(ScriptFailed) as told:
        rows_of(f"{sys.executable} train.py", tmp_path, method=method)
    hint = ". A stopped parameter's grad is None: let the script pass over those" * (method != "none")
    assert str(told.value) == (
        "the script ended with exit code 1; its last lines: Traceback (most recent call last): | "
        f'File "{tmp_path}/train.py", line 4, in <module> | norm = 1 + weight.grad.norm() | '
        f"AttributeError: 'NoneType' object has no attribute 'norm'{hint}"
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo hello; echo bad >&2; exit 3", r"ended with exit code 3; its last lines: hello \| bad"),
        ("exit 3", "ended with exit code 3; it printed nothing"),
        ("kill -9 $$", "was ended by signal 9"),
        ("echo no metrics here", r"printed no metric: call tune_cac.report.*no metrics here"),
        ("""echo '{"accuracy": 0.5}'""", "tells nothing of what it computed"),
        ("""echo '{"accuracy": "high"}'""", "accuracy must be a number, got 'high'"),
        ("""echo '{"accuracy": 91, "compute_saved": 0}'""", "accuracy of a report must be a fraction.*got 91"),
        ("""echo '{"accuracy": 0.9, "compute_saved": 95}'""", "compute_saved of a report must be a fraction.*got 95"),
        ("""echo '{"accuracy": 0.9, "step": 0, "compute_saved": 0}'""", r"first optimizer step alone \(1 times\)"),
        ("""echo '{"accuracy": 0.9, "executed_flops": 1, "dense_flops": 0}'""", "dense_flops .* must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_a_failing_script_fails_with_its_last_lines(tmp_path: Path, command: str, message: str) -> None:
    import re

    with pytest.raises(ScriptFailed) as told:
        rows_of(command, tmp_path)
    assert re.search(message, str(told.value), re.DOTALL), str(told.value)


def test_a_baseline_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed, match=r"the baseline's compute_saved must be 0, .* got 0\.3"):
        rows_of("""echo '{"accuracy": 0.9, "compute_saved": 0.3}'""", tmp_path, method="none")


def test_a_diverged_script_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match="the accuracy is nan in report 1"):
        rows_of("""echo '{"accuracy": NaN, "compute_saved": 0}'""", tmp_path)


def test_what_a_script_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="workload script needs a command: give --script"):
        TrialConfig(workload="script")
    with pytest.raises(UserError, match="unknown option of workload script 'comand': did you mean 'command'"):
        TrialConfig(workload="script", workload_options=("comand=x", "command=y"))
    with pytest.raises(UserError, match="unknown placeholder 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'"):
        check_command(config("train {CAC_VAR_STRT_THR}", tmp_path))
    with pytest.raises(UserError, match="--workers-per-trial must be 1 with --script, got 2"):
        check_command(config("train", tmp_path, workers=2))
    with pytest.raises(UserError, match="workload script is a command of yours, which only a search runs"):
        build("script", ("command=x",))
    assert placeholders(config("x", tmp_path), tmp_path)["CAC_VAR_SAMPLES"] == 200
