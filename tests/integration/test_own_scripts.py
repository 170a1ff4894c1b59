"""Scripts of one's own, from the command line to the answer, on a real Ray."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import analysis
import tune_cac
from analysis.io.journal import read_study
from analysis.io.study_files import Layout
from analysis.metrics.ranking import CUT, SHORTER
from analysis.presentation.settings_text import EPOCHS_VARIABLE
from analysis.presentation.summary_text import config_of
from search_spaces import SpaceContext
from search_spaces.auto_thresholds import SPACE
from trainables.config import TrialConfig
from trainables.errors import UserError
from tune_cac.cli.main import main
from tune_cac.tuning.scripts import NOT_RECORDED, START_DOES_NOTHING
from tune_cac.tuning.trials import PREDICTED

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, torch, tune_cac as cac
torch.manual_seed(int(os.environ["TUNE_CAC_SEED"]))
generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (60,), generator=generator)
images = torch.randn(60, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1)
layers = []
for inside, outside in ((1, 4), (4, 4), (4, 6)):
    layers += [torch.nn.Conv2d(inside, outside, 3, padding=1), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(216, 3))
optimizer = cac.gradskip.SGD(net.parameters(), lr=float(sys.argv[1]), weight_decay=0.02, model=net)
for epoch in range(4):
    for part in torch.randperm(60).split(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images[part]), labels[part]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean()
    print("epoch", epoch, "done")
    cac.report(accuracy=accuracy, step=optimizer.gradskip.iteration)
"""


@pytest.mark.usefixtures("one_ray")
def test_a_script_with_our_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAC_VAR_START_THR", "0.5")  # what the shell has set is no trial's
    (tmp_path / "train.py").write_text(TRAIN)
    given: dict[str, Any] = {"script": f"{sys.executable} train.py 0.1", "name": "s", "concurrency": 2}
    found = tune_cac.search(**given, trials=4)
    trials = found.trials
    assert trials["status"].tolist() == ["completed"] * 4
    assert trials["role"].tolist() == ["baseline", "published"] + ["search"] * 2
    assert trials["epoch"].tolist() == [4] * 4
    assert trials["step"].tolist() == [24] * 4
    assert trials.loc[0, "compute_saved"] == 0
    assert trials["dense_flops"].nunique() == 1
    # Ranges are those of a run of 24 steps, which the baseline told.
    assert trials["CAC_VAR_START_ITR"].dropna().max() <= 12
    study = tmp_path / "results" / "s"
    folders = sorted((study / "ray" / "run-000").glob("trial-*"))
    assert "epoch 3 done" in (folders[0] / "output.log").read_text()
    rows = [json.loads(line) for line in (folders[1] / "result.json").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    # Its epochs are its own: nobody told it how many.
    assert "4 trials of the script's own epochs, 2 at a time" in capsys.readouterr().err
    for file in ("best.env", "report.md"):
        assert "4 epochs of the script, " in (study / file).read_text()

    # What settings stop is known before they are trained.
    trained = trials[trials["role"] == "search"]
    recorded = analysis.load_trace(study)
    with pytest.raises(UserError, match="search the script anew with --set CAC_WATCH=linear"):
        analysis.replay(recorded, TrialConfig(method="gradskip", CAC_WATCH=("linear",)))
    predicted = analysis.replay(recorded, [config_of(t) for _, t in trained.iterrows()])
    exact = 0
    for (_, one), (_, known) in zip(trained.iterrows(), predicted.iterrows(), strict=True):
        stops, foreseen = (
            [(event["iteration"], event["layer"]) for event in json.loads(row["stop_events"])] for row in (one, known)
        )
        assert bool(one["compute_saved"] > 0) == bool(stops)
        assert stops[:1] == foreseen[:1]  # what comes later depends on it, too
        if stops == foreseen:
            exact += 1
            assert one["compute_saved"] == pytest.approx(known["compute_saved"], abs=2e-3)
    assert exact > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_search_that_has_lost_its_tree_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    given: dict[str, Any] = {"script": f"{sys.executable} train.py 0.1", "name": "s", "concurrency": 2}
    tune_cac.search(**given, trials=2)
    shutil.rmtree(tmp_path / "results" / "s" / "tree")
    with pytest.warns(UserWarning, match="nothing was learned from the baseline: root.json"):
        again = tune_cac.search(**given, trials=1)
    assert len(again.trials) == 3
    assert "3 trials of 4 epochs of the script, 2 at a time" in capsys.readouterr().err


@pytest.mark.usefixtures("one_ray")
@pytest.mark.thorough
def test_a_starting_point_that_stops_nothing_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    found = tune_cac.search(script=f"{sys.executable} train.py 0.02", name="s", concurrency=1, trials=3)
    assert found.trials["role"].tolist() == ["baseline", "search", "search"]
    assert START_DOES_NOTHING in capsys.readouterr().err
    published = {"method": "gradskip", **SPACE.start(SpaceContext(total_steps=24))}
    (known,) = analysis.replay(analysis.load_trace(tmp_path / "results" / "s"), [published]).to_dict("records")
    assert (known["stops"], known["exact"]) == (0, True)


PARTIAL = """
from search_spaces import Space

def suggest(trial, context):
    rest = {name: trial.suggest_float(name, 0.98, 1.0) for name in ("CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR")}
    return {"CAC_VAR_START_THR": trial.suggest_float("CAC_VAR_START_THR", 0.9, 1.0), "CAC_VAR_START_ITR": 0,
            "CAC_VAR_SAMPLES": 1, **rest}

SPACE = Space(name="partial", method="gradskip", suggest=suggest, start=lambda context: {"CAC_VAR_START_THR": 0.95})
"""


FINE_TUNING = """
import os, torch, tune_cac as cac
generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (400,), generator=generator)
inputs = torch.randn(400, 12, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 12)
def epoch_of(optimizer):
    for part in torch.randperm(200).split(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[part]), labels[part]).backward()
        optimizer.step()
torch.manual_seed(0)
blocks = (m for _ in range(4) for m in (torch.nn.Linear(12, 12), torch.nn.Tanh()))
net = torch.nn.Sequential(*blocks, torch.nn.Linear(12, 3))
pretraining = torch.optim.AdamW(net.parameters(), lr=3e-3)
for _ in range(30):
    epoch_of(pretraining)
torch.manual_seed(int(os.environ["TUNE_CAC_SEED"]))
optimizer = cac.gradskip.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0, model=net)
for epoch in range(3):
    epoch_of(optimizer)
    with torch.no_grad():
        cac.report(accuracy=(net(inputs[200:]).argmax(1) == labels[200:]).float().mean())
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_fine_tuning_without_weight_decay_is_searched_by_frozen_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No threshold fires there, and the optimizer knows the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FINE_TUNING)
    found = tune_cac.search(script=f"{sys.executable} train.py", trials=4, name="s", concurrency=1, seeds=1)
    assert "a frozen prefix is searched instead (--space frozen_prefix)" in capsys.readouterr().err
    trained = found.trials[found.trials["role"] == "search"]
    assert (trained["CAC_PREFIX_MODE"] == "eval").all()
    assert trained["CAC_STOP_LAYER_ITR"].iloc[0] == "[-1]"
    assert found.headline.startswith("Freeze all up to ")


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_without_a_model_it_is_searched_by_explicit_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Depths and times of stops are the answer, and nothing is trained twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FINE_TUNING.replace(", model=net", ""))
    found = tune_cac.search(script=f"{sys.executable} train.py", trials=4, name="s", concurrency=1)
    assert "explicit stops of whole units are searched instead (--space manual_layers)" in capsys.readouterr().err
    trained = found.trials[found.trials["role"] != "baseline"]
    assert len(trained) >= 2
    assert trained["CAC_STOP_LAYER_NUM"].notna().all()
    assert (trained["compute_saved"] > 0).all()
    assert not trained.duplicated(["stop_events", "CAC_BRAKING_DISTANCE"]).any()
    best = found.best
    assert best is not None
    text = (tmp_path / "results" / "s" / "best.env").read_text()
    assert f"export CAC_STOP_LAYER_NUM={','.join(map(str, config_of(best).CAC_STOP_LAYER_NUM))}" in text
    assert ": saves " in found.headline
    resumed = tune_cac.search(script=f"{sys.executable} train.py", trials=1, name="s", concurrency=1)
    assert resumed.trials["CAC_STOP_LAYER_NUM"].notna().sum() == len(resumed.trials) - 1
    assert "explicit stops" not in capsys.readouterr().err  # it was said


RESUMING = (
    TRAIN.replace(
        "for epoch in range(4):\n",
        "place, first = os.path.join(sys.argv[2], 'checkpoint.pt'), 0\n"
        "if os.path.exists(place):\n"
        "    found = torch.load(place, weights_only=True)\n"
        "    net.load_state_dict(found['net'])\n"
        "    optimizer.load_state_dict(found['optimizer'])\n"
        "    first = found['epoch']\n"
        "for epoch in range(first, 4):\n",
    )
    + "    if epoch < int(sys.argv[3]):\n"
    "        torch.save({'net': net.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': epoch + 1}, place)\n"
)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("", "the state to load is of mode=off and the settings ask for auto"),
        (
            "    optimizer.load_state_dict(found['optimizer'])\n",
            "took 12 optimizer steps where a run of its length takes 24",
        ),
    ],
)
def test_a_script_that_resumes_from_another_trials_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, said: str
) -> None:
    """Its trials are no outcomes, and are told what went wrong; with folders of their own they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RESUMING.replace(left_out, ""))
    given: dict[str, Any] = {"concurrency": 1, "trials": 2}
    shared = tune_cac.search(script=f"{sys.executable} train.py 0.1 . 2", name="shared", **given)
    assert shared.trials["status"].tolist() == ["completed", "failed"]
    error = shared.trials["error"][1]
    assert said in error
    assert "an earlier trial left. Give each trial a folder of its own for its checkpoints, {trial_dir} in" in error
    own = tune_cac.search(script=f"{sys.executable} train.py 0.1 {{trial_dir}} 2", name="own", **given)
    assert own.trials["status"].tolist() == ["completed"] * 2
    assert own.trials["step"].tolist() == [24, 24]


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_starting_point_of_some_parameters_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "partial_start.py").write_text(PARTIAL)
    found = tune_cac.search(
        script=f"{sys.executable} train.py 0.02", space="partial_start:SPACE", name="s", concurrency=1, trials=3
    )
    assert found.trials["status"].tolist() == ["completed"] * 3
    assert found.trials["CAC_VAR_START_THR"][1] == 0.95


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_stops_are_searched_on_shorter_runs_of_a_script_that_takes_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN.replace("range(4)", "range(int(sys.argv[2]))"))
    given: dict[str, Any] = {"script": f"{sys.executable} train.py 0.1 {{epochs}}", "name": "s", "concurrency": 2}
    found = tune_cac.search(**given, epochs=5, trials=5, allowed_drop=0.5)
    assert "5 trials of 5 epochs of the script, 2 at a time" in capsys.readouterr().err
    trials = found.trials
    assert set(trials["status"]) == {"completed"}
    assert trials.loc[trials["role"] == CUT, ["epochs", "epoch", "step"]].to_numpy().tolist()[0] == [2, 2, 12]
    assert trials.loc[trials["role"] == CUT, "compute_saved"].iloc[0] == pytest.approx(0.6)
    short = trials[(trials["role"] == "search") & (trials["epochs"] < 5)]
    assert len(short) > 0
    assert (short["compute_saved"] > 1 - short["epochs"] / 5).all()
    study = Layout(tmp_path / "results" / "s")
    kept = read_study(study.journal)
    foreseen = [kept[number].user_attrs[PREDICTED] for number in short["trial"]]
    off = np.abs(short["compute_saved"].to_numpy() - foreseen)  # a stop after the first depends on it, too
    assert off.min() < 2e-3
    assert off.max() < 0.05
    best = found.best
    assert best is not None
    assert best["epochs"] < 5
    assert found.headline.startswith(f"Train {best['epochs']} of 5 epochs and ")
    assert f"export {EPOCHS_VARIABLE}={best['epochs']}\n" in (study.root / "best.env").read_text()
    beside = trials[(trials["control"] == SHORTER) & (trials["epochs"] < 2)]  # of the best setting's compute
    assert (beside["role"] == "control").all()
    assert (1 - beside["epochs"] / 5 >= best["compute_saved"] - 1e-9).any()
    again = tune_cac.search(**given, epochs=5, trials=1, allowed_drop=0.5)
    assert (again.trials["role"] == CUT).sum() == (trials["role"] == CUT).sum()


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_shell_script_with_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        'awk -v t="$1" -v i="$2" \'BEGIN { s = t < 0 ? 0 : 1 - t; '
        'printf "{\\"accuracy\\": %g, \\"step\\": 90, \\"executed_flops\\": %d}\\n", 0.9 - s / 10, 1000 * (1 - s) }\'\n'
    )
    command = "sh train.sh {CAC_VAR_START_THR} {CAC_VAR_START_ITR}"
    found = tune_cac.search(script=command, trials=4, name="s", concurrency=1, allowed_drop=0.1)
    trials = found.trials
    assert trials["status"].tolist() == ["completed"] * 4
    search = trials[trials["role"] != "baseline"]
    # Restated against the baseline's 1000.
    assert search["compute_saved"].tolist() == pytest.approx((1 - search["CAC_VAR_START_THR"]).tolist(), abs=1e-3)
    assert found.best is not None
    assert found.best["compute_saved"] == search["compute_saved"].max()


@pytest.mark.thorough
@pytest.mark.parametrize(("told", "lengths"), [("executed_flops", [5]), ("compute_saved", [9, 8, 7, 6, 5])])
@pytest.mark.usefixtures("one_ray")
def test_a_cut_run_of_a_script_may_end_before_its_baseline_and_is_an_answer_if_its_flops_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, lengths: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import json, sys, time\nepochs = int(sys.argv[1])\ntime.sleep(2 * (epochs == 10))\n"
        "for epoch in range(1, epochs + 1):\n"
        "    cost = {'executed_flops': 100 * epoch} if sys.argv[2] == 'executed_flops' else {'compute_saved': 0.0}\n"
        "    print(json.dumps({'accuracy': 0.9, 'step': 9 * epoch, 'epoch': epoch, **cost}))\n"
    )
    found = tune_cac.search(
        script=f"{sys.executable} train.py {{epochs}} {told} {{CAC_VAR_START_THR}}",
        epochs=10,
        trials=2,
        name="s",
        concurrency=2,
    )
    trials = found.trials
    assert set(trials["status"]) == {"completed"}
    assert sorted(trials.loc[trials["control"] == SHORTER, "epoch"], reverse=True) == lengths
    assert found.best is not None
    answer = (10, 0.0) if told == "compute_saved" else (5, pytest.approx(0.5))
    assert (found.best["epochs"], found.best["compute_saved"]) == answer


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_script_is_told_why_nothing_stops_or_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN.replace("weight_decay=0.02", "weight_decay=0"))
    hold = {"CAC_VAR_START_THR": 0.5, "CAC_VAR_MT_THR": 0.5, "CAC_VAR_SLOPE_THR": 0.5}
    found = tune_cac.search(
        script=f"{sys.executable} train.py 0.1", trials=2, name="s", concurrency=1, space="braking_distance", hold=hold
    )
    assert "Space braking_distance does nothing on this run: no layer stops with the values that it" in found.headline
    layout = Layout(tmp_path / "results" / "s")
    assert layout.read_info().why_little.startswith("space braking_distance does nothing on this run")
    assert found.headline in layout.report.read_text()
    assert NOT_RECORDED not in capsys.readouterr().err
    second = "\ncac.gradskip.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)\nfor epoch"
    (tmp_path / "two.py").write_text(TRAIN.replace("\nfor epoch", second))
    tune_cac.search(script=f"{sys.executable} two.py 0.1", trials=1, name="t", concurrency=1)
    assert NOT_RECORDED in capsys.readouterr().err


#: A frozen network behind a prompt that PEFT registers after the head: a stopped head leaves all of the backward pass.
PROMPT = """
import torch, tune_cac as cac
torch.manual_seed(0)
body, head = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.nn.Linear(4, 2)
net = torch.nn.Module()
net.body, net.head = body.requires_grad_(False), head
net.prompts = torch.nn.ParameterList([torch.zeros(1, 4)])
optimizer = cac.gradskip.SGD([w for w in net.parameters() if w.requires_grad], lr=0.1, model=net)
for _ in range(8):
    optimizer.zero_grad()
    net.head(net.body(torch.randn(3, 4) + net.prompts[0])).sum().backward()
    optimizer.step()
cac.report(accuracy=0.5)
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_nothing_is_searched_where_no_stop_shortens_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROMPT)
    found = tune_cac.search(script=f"{sys.executable} train.py", trials=3, name="s", concurrency=1)
    assert "the baseline reported no layers that could stop, so nothing else was tried" in capsys.readouterr().err
    assert [*found.trials["role"]] == ["baseline"]
    assert "saves compute" in found.headline


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_script_that_tells_no_steps_ends_with_a_message_though_a_cut_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import json\nprint(json.dumps({'accuracy': 0.9, 'executed_flops': 100}))\n")
    found = tune_cac.search(script=f"{sys.executable} train.py {{epochs}}", epochs=4, trials=2, name="s", concurrency=2)
    assert "the baseline reported no step, so nothing else was tried" in capsys.readouterr().err
    assert set(found.trials["role"]) <= {"baseline", CUT}


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_script_that_knows_only_the_share_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        'awk -v t="$1" \'BEGIN { s = t < 0 ? 0 : 1 - t; '
        'printf "{\\"accuracy\\": 0.9, \\"step\\": 90, \\"compute_saved\\": %g}\\n", s }\'\n'
    )
    command = "sh train.sh {CAC_VAR_START_THR}"
    found = tune_cac.search(script=command, trials=3, name="s", concurrency=1)
    assert found.failures.empty
    trials = found.trials
    assert trials["status"].tolist() == ["completed"] * 3
    assert trials["dense_flops"].isna().all()
    search = trials[trials["role"] != "baseline"]
    assert search["compute_saved"].tolist() == pytest.approx((1 - search["CAC_VAR_START_THR"]).tolist(), abs=1e-3)
    again = tune_cac.confirm("s", top=1, seeds=3, concurrency=1)
    assert again.confirmation is not None
    assert again.confirmation["seeds"].tolist() == [3]
    assert again.confirmation["compared"].tolist() == ["validation accuracy"]  # the script told of no test split
    assert "validation accuracy 0.00 points on average over 3 seeds" in again.headline
    (tmp_path / "train.sh").write_text("exit 1\n")
    for changed in (
        lambda: tune_cac.search(script=command, trials=1, name="s"),
        lambda: tune_cac.tuning.run.resume("s"),
        lambda: tune_cac.confirm("s"),
    ):
        with pytest.raises(UserError, match=r"train\.sh .*has changed"):
            changed()


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_script_that_crashes_at_each_stop_is_not_tried_on_and_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that logs the norm of every gradient."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch, tune_cac as cac\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))\n"
        "optimizer = cac.gradskip.SGD(net.parameters(), lr=0.1, model=net)\n"
        "for step in range(8):\n"
        "    optimizer.zero_grad()\n"
        "    net(torch.ones(3, 4)).square().sum().backward()\n"
        "    norm = sum(p.grad.norm() for p in net.parameters())\n"
        "    optimizer.step()\n"
        "cac.report(accuracy=0.5)\n"
    )
    given = ["--space", "manual_layers", "--trials", "8", "--seeds", "1", "--concurrency", "1"]
    assert main(["search", "--script", f"{sys.executable} train.py", *given, "--name", "s"]) == 1
    err = capsys.readouterr().err
    assert "all 3 settings failed alike, so nothing else was tried" in err
    assert "trials 1, 2, 3 failed: ScriptFailed: " in err
    assert "3 of 4 trials failed" in err


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_script_that_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fails = "echo loading; echo out of data >&2; exit 7"
    assert main(["search", "--script", fails, "--trials", "3", "--name", "s"]) == 1
    err = capsys.readouterr().err
    failed = "ScriptFailed: the script ended with exit code 7; its last lines: loading | out of data"
    assert f"trial 0 failed: {failed}" in err
    assert "the baseline failed, so nothing else was tried: fix the command" in err
    assert "begun again" not in err  # it would fail again
    assert "1 of 1 trials failed" in err
    # Nobody knows how long a run is, so nothing else was tried.
    assert len(analysis.load(tmp_path / "results" / "s")) == 1
