"""What each command of the command line does. A function takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import search_spaces
from analysis.io.layout import Layout
from search_spaces.space import Range, Space, describe
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError, cannot_write
from trainables.gradskip.advice.why_nothing import too_late, why_nothing_stopped
from trainables.gradskip.settings import BY_NAME, VARIABLES, Settings
from trainables.registry import METHODS, WORKLOADS
from trainables.workloads import default_epochs
from tune_cac.cli.compare import compare as compare
from tune_cac.cli.confirm import confirm as confirm
from tune_cac.cli.console import answer_of, print_table
from tune_cac.cli.dashboard import dashboard as dashboard
from tune_cac.cli.doctor import doctor as doctor
from tune_cac.cli.export import export as export
from tune_cac.cli.replay import replay as replay
from tune_cac.cli.report import report as report
from tune_cac.cli.schedule import schedule_check as schedule_check
from tune_cac.cli.sensitivity import sensitivity as sensitivity
from tune_cac.cli.tree import tree as tree
from tune_cac.cli.workload_arguments import take_script, workload_options
from tune_cac.messages import say
from tune_cac.tuning.fixed_params import read_assignments, with_schedule


def search(arguments: argparse.Namespace) -> int:
    """Search, or resume; print the ranked table."""
    from tune_cac.study.options import SearchOptions

    how = {
        "results": Path(arguments.results),
        "concurrency": arguments.concurrency,
        "cpus_per_trial": arguments.cpus_per_trial,
        "gpus_per_trial": arguments.gpus_per_trial,
        "checkpoint_every_s": arguments.checkpoint_every,
        "checkpoint_budget": arguments.checkpoint_budget,
        "retries": arguments.retries,
    }
    take_script(arguments)
    given = {
        name: getattr(arguments, name)
        for name in ("space", "workload", "trials", "epochs", "seed", "allowed_drop", "name")
        if getattr(arguments, name) is not None
    }
    options = workload_options(arguments)
    if options is not None:
        given["workload_options"] = options
    if arguments.workers_per_trial is not None:
        given["workers_per_trial"] = arguments.workers_per_trial
    if arguments.no_sharing:
        how["sharing"] = False
    if arguments.controls is not None:
        given["controls"] = arguments.controls
    if arguments.set is not None:
        given["hold"] = read_assignments(arguments.set)
    if arguments.saving is not None:
        given["saving"] = arguments.saving
    hold = with_schedule(given.get("hold", {}), arguments.schedule, compatible=bool(arguments.compatible))
    SearchOptions(**how, **{**given, "hold": hold})  # wrong arguments end here, before torch or ray is loaded
    from tune_cac.tuning.study_search import resume as resume_study
    from tune_cac.tuning.study_search import search as search_study

    resuming = arguments.resume is not None
    if resuming:
        found = resume_study(arguments.resume, **how)
    else:
        found = search_study(**how, **given, schedule=arguments.schedule, compatible=bool(arguments.compatible))
    if sys.stdout.isatty():
        print()
    if len(found.ranking):
        print_table(found.table(top=15))
        print()
    print(found.headline)
    print(found.cost_line)
    kept = [file.name for file in (Layout(found.folder).best_schedule, Layout(found.folder).best) if file.exists()]
    if kept:
        print(f"Settings: {found.folder / kept[0]}   report: python -m tune_cac report {found.folder}")
    failures = found.failures
    for _, failure in failures.iterrows():
        say(f"trial {failure['trial']} failed: {failure['error']}")
    if len(failures):
        say(f"{len(failures)} of {len(found.trials)} trials failed")
    if found.interrupted:
        say(f"Interrupted. Finish the remaining trials with: {_resume_line(found.folder, arguments)}")
        return 130
    return 1 if len(failures) or len(found.ranking) == 0 else 0


def _resume_line(folder: Path, arguments: argparse.Namespace) -> str:
    results = "" if arguments.results == "results" else f" --results {arguments.results}"
    name = folder.name if folder.parent == Path(arguments.results) else str(folder)
    return f"python -m tune_cac search --resume {name}{results}"


def trial(arguments: argparse.Namespace) -> int:
    """Train one configuration in this process and print a row an epoch."""
    values: dict[str, Any] = {}
    method = arguments.method or ("gradskip" if arguments.schedule is None else "compression")
    values = read_assignments(arguments.assignments)
    if method == "none" and (values or arguments.schedule):
        raise UserError("--set and --schedule need a method that heeds them, got --method none")
    if arguments.schedule is not None and "compression" not in method.split("+"):
        raise UserError(f"--schedule needs --method compression or gradskip+compression, got --method {method}")
    if arguments.schedule is not None:
        values |= with_schedule({}, arguments.schedule, compatible=arguments.compatible)
    elif arguments.compatible:
        with_schedule({}, None, compatible=True)
    if "gradskip" in method.split("+"):
        settings = Settings.from_environment(**{name: value for name, value in values.items() if name in BY_NAME})
        values |= {v.name: getattr(settings, v.field) for v in VARIABLES}
    options = workload_options(arguments) or ()
    config = TrialConfig(
        workload=arguments.workload,
        workload_options=options,
        epochs=default_epochs(arguments.workload, options) if arguments.epochs is None else arguments.epochs,
        seed=arguments.seed,
        method=method,
        device=arguments.device,
        threads=arguments.threads,
        **values,
    )
    from analysis.formatting import percent
    from trainables.training.run import TrainingRun

    if config.compresses:
        _check_compression(config, None if arguments.schedule is None else Path(arguments.schedule))
    with TrainingRun(config) as run:
        if config.skips_gradients:
            print("  ".join(f"{k}={v}" for k, v in config.gradskip_settings().to_environment().items()))
            if reason := too_late(config.gradskip_settings(), run.total_steps):
                say(f"warning: nothing will stop: {reason}")
        pruned = f" {'sparsity':>9}" if config.compresses else ""
        print(f"{'epoch':>6} {'loss':>9} {'accuracy':>9} {'saved':>8} {'stopped':>8} {'time s':>8}{pruned}")
        try:
            while not run.finished:
                row = run.train_epoch()
                print(
                    f"{row['epoch']:>6} {row['train_loss']:>9.4f} {row['accuracy']:>9.4f} "
                    f"{percent(row['compute_saved']):>8} {row['stopped_through']:>8} {row['train_time_s']:>8.2f}"
                    + (f" {percent(row['sparsity']):>9}" if config.compresses else "")
                )
        except TrainingDiverged as error:
            say(f"tune_cac: the trial failed: {error}")
            return 1
        if arguments.save is not None:
            _save_weights(run, Path(arguments.save))
    print(
        f"\nvalidation accuracy {row['accuracy']:.4f}"
        + ("\n" if row["test_accuracy"] is None else f", test accuracy {row['test_accuracy']:.4f}\n")
        + f"compute saved {percent(row['compute_saved'])} (backward {percent(row['backward_saved'])}): "
        f"{row['executed_flops'] / 1e9:.2f} of {row['dense_flops'] / 1e9:.2f} GFLOPs executed"
    )
    if config.compresses:
        for line in _compressed(row):
            print(line)
    events = run.method.events()
    if config.skips_gradients and not events:
        print(f"nothing stopped: {why_nothing_stopped(config.gradskip_settings(), run.total_steps)}")
    for event in events:
        ratio = "" if event["ratio"] is None else f" at variance/peak {event['ratio']:.4f}"
        where = f"stopped through {event['layer']} ({event['name']})"
        print(f"iteration {event['iteration']}: {where}, {event['rule']}{ratio}")
    return 0


def _check_compression(config: TrialConfig, file: Path | None) -> None:
    """UserError for what a trial cannot be compressed by; marked values take the middle of their ranges, and say so."""
    from trainables.compression.model_check import check_on_model
    from trainables.compression.schedule import read_marks
    from trainables.compression.trial.from_config import schedule_of
    from trainables.compression.trial.replay import late_policies

    schedule = schedule_of(config)
    if not schedule["policies"]:
        raise UserError(f"method {config.method} has nothing to compress with: give --schedule FILE")
    check_on_model(schedule, config, file, compatible=bool(config.schedule_compatible))
    late = late_policies(schedule, config.epochs)
    if late:
        raise UserError(
            f"policies[{late[0]}] of the schedule never acts: the last epoch of the run is {config.epochs - 1}; begin "
            "earlier, or give more --epochs"
        )
    marks = {} if file is None else read_marks(file).middles()
    if marks:
        taken = ", ".join(f"{name} {value}" for name, value in marks.items())
        say(f"marked values take the middle of their ranges: {taken}")


def _compressed(row: Mapping[str, Any]) -> list[str]:
    """What compression left, in words."""
    from analysis.formatting import percent

    lines = [
        f"sparsity {percent(row['sparsity'])} (in whole structures {percent(row['structured_sparsity'])}), inference "
        f"compute saved {percent(row['inference_saved'])}"
    ]
    if row["dense_macs"] is not None:
        lines.append(
            f"multiply-adds of a sample: {row['effective_macs'] / 1e6:.3f} of {row['dense_macs'] / 1e6:.3f} million "
            f"with weights that are not zero; {row['parameters']} parameters"
        )
    if row["latency_s"] is not None:
        lines.append(f"latency of a sample {1000 * row['latency_s']:.2f} ms")
    return lines


def _save_weights(run: Any, file: Path) -> None:
    import torch

    try:
        torch.save(run.model.state_dict(), file)
    except OSError as error:
        raise cannot_write(f"the weights to {file}", error, "choose another --save") from None
    except RuntimeError as error:  # torch's writer does not say what the disk said
        raise UserError(f"cannot write the weights to {file}: {error}; choose another --save") from None


def rank(arguments: argparse.Namespace) -> int:
    """Print a study's ranked table."""
    found, _, _ = answer_of(arguments)
    print_table(found.table(top=arguments.top))
    print()
    print(found.headline)
    print(found.cost_line)
    return 0 if len(found.ranking) else 1


def spaces(arguments: argparse.Namespace) -> int:
    """List the spaces, or show one: ranges on a run, published defaults, meanings."""
    if arguments.space is None:
        _print_list(search_spaces.SPACES)
        print("\nRanges and meanings of one: python -m tune_cac spaces NAME")
        return 0
    space = search_spaces.load(arguments.space)
    if arguments.epochs is not None and arguments.epochs < 1:
        raise UserError(f"--epochs must be an integer >= 1, got {arguments.epochs}")
    options = workload_options(arguments) or ()
    epochs = arguments.epochs or default_epochs(arguments.workload, options)
    config = TrialConfig(workload=arguments.workload, workload_options=options, epochs=epochs, method="none")
    from tune_cac.tuning.study_search import run_context

    context = run_context(config)
    print(f"{space.name}: {'; '.join(search_spaces.SPACES[part] for part in search_spaces.parts_of(space.name))}")
    print(f"method {space.method}: {METHODS[space.method].description}; ranked by {space.saving} compute")
    print(f"on {config.workload} for {config.epochs} epochs, {context.total_steps} steps\n")
    notes = space.notes(context)
    if notes:
        print("\n".join(notes) + "\n")
    start, ranges = space.start(context), describe(space, context)
    if ranges:
        print_table(_ranges_table(space, ranges, start))
    return 0


def _ranges_table(space: Space, ranges: list[Range], start: Mapping[str, Any]) -> list[list[str]]:
    """One row a parameter; the column "when" only where some are asked for under a condition."""
    conditional = any(found.condition for found in ranges)
    table = [["variable", "searched", *(["when"] if conditional else []), "default", "starts at", "meaning"]]
    for found in ranges:
        variable = BY_NAME.get(found.base_name)
        table.append(
            [
                found.name,
                str(found),
                *([found.condition or "always"] if conditional else []),
                variable.default if variable else "",
                str(start.get(found.name, "")),
                variable.meaning if variable else space.meaning(found.base_name) or "",
            ]
        )
    return table


def workloads(arguments: argparse.Namespace) -> int:
    """List the workloads."""
    listed = {name: f"{entry.description}; {entry.default_epochs} epochs" for name, entry in WORKLOADS.items()}
    listed["module:function"] = "what a function of yours returns: a dict of model, train, validation, ..."
    listed["--script 'COMMAND'"] = "a training script of yours; it prints its metrics, with tune_cac.report or as JSON"
    _print_list(listed)
    return 0


def _print_list(entries: dict[str, str]) -> None:
    width = max(map(len, entries))
    for name, text in entries.items():
        print(textwrap.fill(text, width=110, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2)))
