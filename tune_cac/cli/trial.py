"""The command ``trial``: train one configuration in this process, without Ray."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.compression.distillation_flags import distillation_fields
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.fields import estimator_in, estimator_of
from trainables.gradskip.nothing_stops import too_late, why_nothing_stopped
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, VARIABLES, ratio_name
from trainables.script.placeholders import CACHE_VARIABLE, EPOCHS_VARIABLE
from trainables.training.recipe.fields import RECIPE_FIELDS
from tune_cac.cli.arguments import ASSIGNMENTS, COMPATIBLE, RUN, config_from_arguments
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import check_asked, write_asked
from tune_cac.messages import say
from tune_cac.study.fixed_params import read_assignments, read_value, with_schedule

if TYPE_CHECKING:
    from trainables.training.run import TrainingRun


@command(
    *RUN,
    argument("--method", help="method (default: gradskip, with --schedule compression); none is the baseline"),
    ASSIGNMENTS,
    argument("--schedule", metavar="FILE", help="a compression schedule to train with"),
    COMPATIBLE,
    argument("--save", metavar="FILE", help="write the trained weights, such as for a teacher"),
    help="train one configuration here, without Ray",
    description="Train one configuration in this process. What a sourced best.env sets counts; options win.",
)
def run(arguments: argparse.Namespace) -> int:
    """Train one configuration in this process and print one row per epoch."""
    distilled = distillation_fields(arguments)
    values = distilled | read_assignments(arguments.assignments)
    if arguments.epochs is None and (epochs := os.environ.get(EPOCHS_VARIABLE)):
        if not epochs.isdecimal():
            raise UserError(f"{EPOCHS_VARIABLE} must be a number of epochs, got {epochs!r}: unset it, or give --epochs")
        arguments.epochs = int(epochs)
    estimator = estimator_of(set(values))
    plain = "gradskip" if arguments.schedule is None and not distilled else "compression"
    method = arguments.method or estimator or plain
    if estimator is not None and not estimator_in(method):
        raise UserError(f"settings of method {estimator} need it, got --method {method}: leave that out")
    if method == "none" and (set(values) - {*RECIPE_FIELDS} or arguments.schedule):
        raise UserError("--set and --schedule need a method that heeds them, got --method none")
    if arguments.schedule is not None and "compression" not in method.split("+"):
        raise UserError(f"--schedule needs --method compression or gradskip+compression, got --method {method}")
    if distilled and "compression" not in method.split("+"):
        raise UserError(f"--kd-* flags need --method compression or gradskip+compression, got --method {method}")
    values |= with_schedule({}, arguments.schedule, compatible=arguments.compatible)
    if "gradskip" in method.split("+"):
        settings = Settings.from_environment(**{name: value for name, value in values.items() if name in BY_NAME})
        values |= {v.name: getattr(settings, v.field) for v in VARIABLES}
        if budget := os.environ.get(CACHE_VARIABLE):
            values.setdefault("forward_cache_mb", read_value("forward_cache_mb", budget))
    config = config_from_arguments(arguments, method=method, **values)
    if arguments.save is not None:
        check_asked(Path(arguments.save), "the weights to", "choose another --save")
    import torch

    from trainables.gradients.method import check_model
    from trainables.training.run import TrainingRun

    if config.compresses:
        _check_compression(config, None if arguments.schedule is None else Path(arguments.schedule))
    with TrainingRun(config) as run:
        if estimator := estimator_in(method):
            check_model(estimator, run.model, config.gradient_layers)
        try:
            row = _train(run, config)
        except TrainingDiverged as error:
            say(f"tune_cac: the trial failed: {error}")
            return 1
        if arguments.save is not None:
            weights, state = io.BytesIO(), run.model.state_dict()
            # An attribute, so that the file stays tensors by name; `export-model` builds the model by it.
            built_by = {"config": config.to_dict(), "method": run.method.state_dict().get("training_state", {})}
            state.trained_with = built_by  # type: ignore[attr-defined]
            torch.save(state, weights)
            write_asked(Path(arguments.save), weights.getvalue(), "the weights to", "choose another --save")
    print("\n".join(_results(run, config, row)))
    return 0


def _train(run: TrainingRun, config: TrialConfig) -> dict[str, Any]:
    """Train to the end, print one line an epoch, and return the last row."""
    from analysis.formatting import percent, value_text

    quality = run.quality
    width = max(9, len(quality.name))
    if config.skips_gradients:
        print("  ".join(f"{k}={v}" for k, v in config.gradskip_settings().to_environment().items()))
        if reason := too_late(config.gradskip_settings(), run.total_steps):
            say(f"warning: nothing will stop: {reason}")
    pruned = f" {'sparsity':>9}" if config.compresses else ""
    print(f"{'epoch':>6} {'loss':>9} {quality.name:>{width}} {'saved':>8} {'stopped':>8} {'time s':>8}{pruned}")
    row: dict[str, Any] = {}
    while not run.finished:
        row = run.train_epoch()
        print(
            f"{row['epoch']:>6} {row['train_loss']:>9.4f} {value_text(row['quality'], quality):>{width}} "
            f"{percent(row['compute_saved']):>8} {row['stopped_through']:>8} {row['train_time_s']:>8.2f}"
            + (f" {percent(row['sparsity']):>9}" if config.compresses else "")
        )
    return row


def _results(run: TrainingRun, config: TrialConfig, row: Mapping[str, Any]) -> list[str]:
    import pandas as pd

    from analysis.formatting import metric_words, percent, value_text
    from analysis.presentation.markdown_report import sums

    quality, tested = run.quality, row["test_quality"]
    lines = [
        f"\n{metric_words(quality)} {value_text(row['quality'], quality)}"
        + ("" if tested is None else f", test {quality.name} {value_text(tested, quality)}"),
        f"compute saved {percent(row['compute_saved'])} (backward {percent(row['backward_saved'])}): "
        f"{row['executed_flops'] / 1e9:.2f} of {row['dense_flops'] / 1e9:.2f} GFLOPs executed",
    ]
    if config.compresses:
        lines += [f"{name} {value}" for name, value in sums(pd.Series(row))]
    events = run.method.events()
    if config.skips_gradients and not events:
        lines.append(f"nothing stopped: {why_nothing_stopped(config.gradskip_settings(), run.total_steps)}")
    for event in events:
        ratio = "" if event["ratio"] is None else f" at {ratio_name(event['rule'])} {event['ratio']:.4f}"
        where = f"stopped through {event['layer']} ({event['name']})"
        lines.append(f"iteration {event['iteration']}: {where}, {event['rule']}{ratio}")
    return lines


def _check_compression(config: TrialConfig, file: Path | None) -> None:
    """Raise UserError for a schedule that a trial cannot use; print the values that replace search marks."""
    from trainables.compression.schedule import read_marks
    from trainables.compression.scheduler import check_on_model
    from trainables.compression.trial.from_config import schedule_of
    from trainables.compression.trial.replay import late_policies

    schedule = schedule_of(config)
    if not schedule["policies"]:
        way = (
            "give --schedule FILE" if file is None else f"{file} is for a trained model: export-model --quantize {file}"
        )
        raise UserError(f"method {config.method} has nothing to compress with: {way}")
    check_on_model(schedule, config, file, compatible=bool(config.schedule_compatible))
    if late := late_policies(schedule, config.epochs):
        raise UserError(
            f"policies[{late[0]}] of the schedule never acts: the last epoch of the run is {config.epochs - 1}; begin "
            "earlier, or give more --epochs"
        )
    if file is not None and (marks := read_marks(file).middles()):
        taken = ", ".join(f"{name} {value}" for name, value in marks.items())
        say(f"marked values take the middle of their ranges: {taken}")
