"""What is exported reads back: in a shell, as YAML and as JSON."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from compressed import pruned, write_compressed
from studies import result_row, write_study
from thorough import rest_thorough

import analysis
from analysis.io.study_files import Layout
from analysis.presentation.best_env import best_env
from analysis.presentation.export import export_trial
from analysis.presentation.settings_text import EPOCHS_VARIABLE
from analysis.presentation.thawing import stop_of_schedule
from analysis.trace_replay.traces import RunTrace, facts_key
from trainables.compression.schedule import read_schedule
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip import wrap
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME

CONFIGS = {
    "auto": TrialConfig(
        CAC_VAR_START_ITR=3, CAC_VAR_START_THR=0.1 + 0.2, CAC_VAR_SAMPLES=7, CAC_BRAKING_DISTANCE=2, epochs=12, seed=4
    ),
    "manual": TrialConfig(CAC_STOP_LAYER_NUM=(2, 10), CAC_STOP_LAYER_ITR=(0, 1_000_000)),
    "rule": TrialConfig(
        CAC_RULE="freezeout", CAC_RULE_START_ITR=5, CAC_RULE_END_ITR=50, CAC_RULE_CUBIC=True, CAC_RULE_SCALED=False,
        CAC_WATCH=("conv", "linear"), CAC_WHOLE_UNITS=True, CAC_NORM_STATISTICS="hold",
    ),
    "tolerance": TrialConfig(CAC_RULE="plasticity", CAC_RULE_TOLERANCE=1e-5, CAC_RULE_INTERVAL=9, forward_cache_mb=50),
    "off": TrialConfig(method="none"),
}  # fmt: skip


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """A baseline, a trial of each configuration, and one that failed."""
    trials = [
        {"row": result_row(0.97, saved, backward_saved=1.5 * saved), "config": config.to_dict()}
        for saved, config in zip((0.1, 0.2, 0.3, 0.0, -0.1), CONFIGS.values(), strict=True)
    ]
    return write_study(tmp_path / "s", [{"row": result_row()}, *trials, {"error": "it broke\nrm -rf /"}])


def row_of(layout: Layout, trial: int) -> pd.Series:
    return analysis.load(layout.root).iloc[trial]


def export(layout: Layout, trial: int, format: str) -> str:
    return export_trial(row_of(layout, trial), layout.read_info(), format)


def environment_after(text: str, folder: Path, **before: str) -> dict[str, str]:
    """The variables of a real POSIX shell that has sourced a file with this text."""
    (folder / "trial.env").write_text(text)
    done = subprocess.run(
        ["sh", "-eu", "-c", f". {folder / 'trial.env'} && env"], env={"PATH": "/usr/bin:/bin", **before},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name.startswith("CAC_") or name == EPOCHS_VARIABLE}


# --- one trial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 6))
def test_every_format_has_exactly_the_settings(number: int, study: Layout, tmp_path: Path) -> None:
    config = list(CONFIGS.values())[number - 1]
    found = Settings.from_environment(
        environment_after(export(study, number, "env"), tmp_path, **dict.fromkeys(BY_NAME, "1"))
    )
    expected = config.gradskip_settings() if config.method == "gradskip" else Settings(start_thr=-1)
    assert found == Settings.from_environment(expected.to_environment())  # an unset interval is written out
    text = export(study, number, "yaml")
    assert TrialConfig.from_mapping(yaml.safe_load(text)) == config
    assert "!!" not in text  # plain types alone
    assert TrialConfig.from_mapping(json.loads(export(study, number, "json"))) == config


@pytest.mark.parametrize("cut", [True, False])
def test_epochs_of_an_answer_that_was_sourced_before_are_not_left(cut: bool, study: Layout, tmp_path: Path) -> None:
    row = row_of(study, 1)
    if cut:
        row = row.copy()
        row["epochs"], row["of_epochs"] = 12, 30
    info = study.read_info()
    for text in (export_trial(row, info, "env"), best_env(info, row, 0.9)):
        left = environment_after(text, tmp_path, **{EPOCHS_VARIABLE: "7"}).get(EPOCHS_VARIABLE)
        assert left == ("12" if cut else None)


def test_comments_are_true_and_text_from_elsewhere_stays_in_them(study: Layout, tmp_path: Path) -> None:
    lines = export(study, 4, "env").splitlines()
    assert lines[:2] == [
        "# tune_cac: digits, 30 epochs, space auto_thresholds, seed 0",
        "# trial 4: compute saved 0.0 %, validation accuracy 0.9700, accuracy loss 0.00 points",
    ]
    assert "export TUNE_CAC_FORWARD_CACHE_MB=50" in lines
    assert max(map(len, lines)) <= 120
    info = replace(
        study.read_info(), space="a\nexport CAC_VAR_START_THR=0.1", workload="w\r\nexit 7; `touch x` $(exit 3)"
    )
    row = row_of(study, 2)
    assert "CAC_VAR_START_THR" not in environment_after(export_trial(row, info, "env"), tmp_path)
    assert yaml.safe_load(export_trial(row, info, "yaml"))["CAC_STOP_LAYER_NUM"] == [2, 10]


def test_a_trial_without_a_result_and_a_wrong_format_are_refused(study: Layout) -> None:
    with pytest.raises(UserError) as caught:
        export(study, 6, "env")
    assert str(caught.value) == (
        "only a completed trial can be exported, trial 6 is failed (it broke rm -rf /): choose another"
    )
    with pytest.raises(UserError, match="unknown --as 'jsn': did you mean 'json'"):
        export(study, 1, "jsn")


# --- trials that compress -------------------------------------------------------------------------------------------

MARKED = """version: 1
pruners: {one: {class: SparsityLevelParameterPruner, levels: {fc.weight: !search {low: 0.1, high: 0.9}}}}
policies: [{pruner: {instance_name: one}, epochs: [2]}]
"""


def test_schedules_are_exported_plain(tmp_path: Path) -> None:
    together = {"CAC_VAR_START_THR": 0.97, "agp_final_sparsity": 0.8, "agp_weights": ("fc.weight",)}
    marked = {"schedule": MARKED, "schedule_values": ("pruners.one.levels.fc.weight=0.25",)}
    trials = [
        pruned(0.968, 0.5, 0.1),
        pruned(0.967, 0.4, method="gradskip+compression", **together),
        pruned(0.966, 0.3, **marked),
    ]
    compressed = write_compressed(tmp_path / "c", trials)
    text = export(compressed, 3, "schedule")
    assert text.startswith("# tune_cac: digits, 30 epochs, space pruning_sensitivities, seed 0\n# trial 3: inference")
    assert "!search" not in text
    assert yaml.safe_load(text)["pruners"]["one"]["levels"] == {"fc.weight": 0.25}
    assert [len(read_schedule(export(compressed, n, "schedule")).policies) for n in (1, 2, 3)] == [1, 1, 1]


STOPS = {
    "published": {},
    "braking": {"CAC_BRAKING_DISTANCE": 1},
    "units in evaluation mode": {"CAC_WHOLE_UNITS": True, "CAC_PREFIX_MODE": "eval"},
    "units with held norms": {"CAC_WHOLE_UNITS": True, "CAC_NORM_STATISTICS": "hold"},
    "all norms held": {"CAC_NORM_STATISTICS": "hold_all"},
}


def blocks() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 2))


def trained(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, lines: str = "") -> list[torch.Tensor]:
    """Weights and statistics after eight steps, before each of which the lines are run."""
    torch.manual_seed(1)
    code = compile(lines, "lines", "exec")
    model.train()
    for step in range(8):
        exec(code, {"model": model, "step": step, "torch": torch})
        optimizer.zero_grad()
        model(torch.randn(4, 2, 4, 4)).square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", STOPS)
def test_lines_of_plain_torch_train_as_the_settings_do(name: str, recorded: bool, tmp_path: Path) -> None:
    config = TrialConfig(CAC_STOP_LAYER_NUM=(0, 5), CAC_STOP_LAYER_ITR=(1, 3), **STOPS[name])
    if name in ("units in evaluation mode", "braking"):
        config = replace(config, CAC_STOP_LAYER_ITR=(-1, 3))
    model = blocks()
    optimizer = wrap(
        torch.optim.AdamW(model.parameters()), config.gradskip_settings(), model=model,
        example_inputs=torch.zeros(2, 2, 4, 4),
    )  # fmt: skip
    wanted, skip = trained(model, optimizer), optimizer.gradskip  # type: ignore[attr-defined]
    events = [{"iteration": one.iteration, "layer": one.layer, "name": one.name} for one in skip.events]
    row = result_row(0.97, 0.2, stop_events=json.dumps(events))
    layout = write_study(tmp_path / "s", [{"row": result_row()}, {"row": row, "config": config.to_dict()}])
    names = tuple(name for name, _ in model.named_parameters())
    trace = RunTrace(
        root="", run={}, total_steps=8, steps_per_epoch=8, layer_names=names, trains="1" * len(names), stages=(),
        facts={facts_key(config): skip.blueprint},
    )  # fmt: skip
    if not recorded and config.gradskip_settings().whole_units:
        with pytest.raises(UserError, match="the layers that trial 1 stops must be known by name, and no training"):
            export_trial(row_of(layout, 1), layout.read_info(), "torch")
        return
    lines = export_trial(row_of(layout, 1), layout.read_info(), "torch", trace if recorded else None)
    plain = blocks()
    found = trained(plain, torch.optim.AdamW(plain.parameters()), lines)
    assert all(map(torch.equal, found, wanted))
    resumed = blocks()
    exec(lines, {"model": resumed, "step": 7, "torch": torch})  # behind all stops
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in plain.parameters()]
    with pytest.raises((AttributeError, ValueError), match=r"weight|bias|has no attribute"):  # of a wrapper
        exec(lines, {"model": torch.nn.ModuleDict({"module": blocks()}), "step": 7, "torch": torch})


def test_a_frozen_prefix_as_a_schedule_of_finetuning_scheduler(tmp_path: Path) -> None:
    """Its phase 0 names what trains; what stops later cannot be told."""
    model, text = blocks(), {}
    for at in (-1, 3):
        config = TrialConfig(CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(at,))
        events = [{"iteration": at, "layer": 5, "name": "4.bias"}]
        row = result_row(0.97, 0.2, stop_events=json.dumps(events))
        layout = write_study(tmp_path / f"s{at}", [{"row": result_row()}, {"row": row, "config": config.to_dict()}])
        skip = wrap(torch.optim.SGD(model.parameters()), config.gradskip_settings(), model=model).gradskip  # type: ignore[attr-defined]
        names = tuple(name for name, _ in model.named_parameters())
        text[at] = (row_of(layout, 1), layout.read_info(), "finetuning-scheduler", RunTrace(
            root="", run={}, total_steps=8, steps_per_epoch=8, layer_names=names, trains="1" * len(names), stages=(),
            facts={facts_key(config): skip.blueprint},
        ))  # fmt: skip
    exported = export_trial(*text[-1])
    assert yaml.safe_load(exported) == {0: {"params": list(names[6:])}}
    assert TrialConfig(**stop_of_schedule(exported, names, skip.blueprint.plan.order)) == TrialConfig(
        CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(-1,)
    )
    with pytest.raises(UserError, match="must come before step 0, got 4: choose a trial of --space frozen_prefix"):
        export_trial(*text[3])


@pytest.mark.parametrize(
    ("schedule", "stop"),
    [
        ("0: {params: [head.weight, head.bias]}", 3),
        ("0: {params: ['head.*', 'blocks.1.bias']}", 2),
        ("'0': {params: ['blocks.1.(weight|bias)', 'head']}", 1),  # Names that begin so; keys as text.
        ("0: {params: [.*], lr: 1.0e-03}", None),
        (
            "0: {params: [head.*], max_transition_epoch: 1}\n1: {params: [blocks.1.*]}",
            "never thaws .* in phase 1: move",
        ),
        ("0: {params: [head.*, blocks.0.*]}", "blocks.1.weight is frozen behind blocks.0.weight, which trains"),
        (
            "0: {params: [model.head.*]}",
            "'model.head.\\*' matches none: they are blocks.0.weight to head.bias in 6 names",
        ),
        ("0: {params: ['(']}", "must be phases from 0 on"),
        ("1: {params: [head.*]}", "must be phases from 0 on"),
        ("- head", "must be phases from 0 on"),
        ("pruners: {a: {class: X}}", "must be phases from 0 on"),
    ],
)
def test_a_schedule_of_finetuning_scheduler_is_read_as_a_stop(schedule: str, stop: int | str | None) -> None:
    """The last parameter before those that it trains, in the order of stops; what cannot be said so is refused."""
    names = ("head.weight", "head.bias", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias")
    order = (2, 3, 4, 5, 0, 1)
    if isinstance(stop, str):
        with pytest.raises(UserError, match=stop):
            stop_of_schedule(schedule, names, order)
    else:
        at = {"CAC_VAR_START_THR": -1} if stop is None else {
            "CAC_STOP_LAYER_NUM": (order[stop],), "CAC_STOP_LAYER_ITR": (-1,)
        }  # fmt: skip
        assert stop_of_schedule(schedule, names, order) == at


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"CAC_RULE": "freezeout", "CAC_RULE_END_ITR": 8}, "a learning rate of each layer"),
        ({"CAC_PREFIX_AUTOGRAD": False}, "CAC_PREFIX_AUTOGRAD=0"),
    ],
)
def test_what_lines_that_freeze_cannot_express_is_refused(settings: dict[str, Any], what: str, tmp_path: Path) -> None:
    row = result_row(0.97, 0.2, stop_events='[{"iteration": 3, "layer": 5, "name": "4.bias"}]')
    layout = write_study(tmp_path / "s", [{"row": row, "config": TrialConfig(**settings).to_dict()}])
    with pytest.raises(UserError, match=f"trial 0 has {what}, which lines that freeze cannot express: choose env"):
        export(layout, 0, "torch")


def test_many_names_have_a_line_each(tmp_path: Path) -> None:
    """Those of adapters on all layers fill 5,000 characters."""
    names = tuple(f"base_model.model.bert.encoder.layer.{n}.output.dense.lora_A.weight" for n in range(6))
    config = TrialConfig(CAC_STOP_LAYER_NUM=(4,), CAC_STOP_LAYER_ITR=(-1,))
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in names])
    skip: Any = wrap(torch.optim.SGD(model.parameters()), config.gradskip_settings(), model=model)
    row = result_row(0.97, 0.2, stop_events=json.dumps([{"iteration": -1, "layer": 4, "name": names[4]}]))
    layout = write_study(tmp_path / "s", [{"row": row, "config": config.to_dict()}])
    trace = RunTrace(
        root="", run={}, total_steps=8, steps_per_epoch=8, layer_names=names, trains="1" * 6, stages=(),
        facts={facts_key(config): skip.gradskip.blueprint},
    )  # fmt: skip
    lines = export_trial(row_of(layout, 0), layout.read_info(), "torch", trace)
    assert max(map(len, lines.splitlines())) <= 110
    assert ast.literal_eval(lines[lines.index("{") : lines.index("}") + 1]) == {0: names[:5]}


@pytest.mark.parametrize(
    ("config", "said"),
    rest_thorough(
        [
            (
                TrialConfig(method="none"),
                "trial 0 must stop a layer, and trains all of them to its end: choose another",
            ),
            (
                TrialConfig(method="compression", agp_final_sparsity=0.5),
                "must be one of Gradient-Skip alone, got compress",
            ),
        ],
        of_several=True,
    ),
)
def test_what_freezes_nothing_has_no_lines_that_freeze(config: TrialConfig, said: str, tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row(), "config": config.to_dict()}])
    for format in ("torch", "finetuning-scheduler"):
        with pytest.raises(UserError, match=said):
            export(layout, 0, format)
