"""Checks before a search has a folder or a Ray process: schedule, processors, GPUs, repeatable training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.io.layout import Layout
from analysis.io.studies import read_journal
from search_spaces import Space, SpaceContext
from search_spaces.own_space import settable_fields
from search_spaces.space import ANY_RUN, corners
from trainables.config import TrialConfig
from trainables.errors import UserError, unknown_name
from trainables.registry import SCRIPT, is_factory
from trainables.runtime.processors import processors
from trainables.script.placeholders import names
from trainables.workload_options import PLACES, read_options
from tune_cac.messages import say
from tune_cac.study.options import SearchOptions
from tune_cac.tuning.run_context import baseline_config

if TYPE_CHECKING:
    from trainables.training.device_choice import DeviceChoice


def share_only_if_repeatable(options: SearchOptions) -> SearchOptions:
    """Train a few steps of the user's own code twice; return options without sharing if the results differ.

    With a counter in the model, a data set with its own generator or an evaluation that draws at random, the result of
    a run depends on what its process has trained before.
    """
    if not own_code(options):
        return options
    from trainables.training.doctor.determinism import why_not_repeatable

    reason = why_not_repeatable(baseline_config(options, device="cpu"))
    if not reason:
        return options
    say(
        f"training {options.workload} does not repeat: {reason}; so trials share nothing, and each has a process "
        "of its own"
    )
    return replace(options, fresh_processes=True)


def check_schedule(options: SearchOptions, context: SpaceContext, file: Path | None) -> None:
    """Raise UserError for a schedule that does not fit the model, before there is a study.

    Args:
        options: of the search.
        context: of the run.
        file: the schedule's file, or None.
    """
    import optuna

    from trainables.compression.scheduler import check_on_model
    from trainables.compression.trial.from_config import schedule_of
    from trainables.compression.trial.replay import late_policies, timing_of
    from trainables.compression.trial.with_gradskip import check_together

    space = options.loaded_space
    base = baseline_config(options, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a starting point may lie off a grid
        suggested = space.suggest(optuna.trial.FixedTrial(dict(space.start(context))), context)
    values = {"method": space.method, **suggested, **options.fixed}
    config = TrialConfig.from_mapping({**base.to_dict(), **values})
    schedule = schedule_of(config)
    check_on_model(schedule, base, file, compatible=bool(config.schedule_compatible), every_mark=True)
    if config.skips_gradients:
        check_together(config, schedule)
    late = late_policies(schedule, config.epochs)
    if late:
        what = f"the last epoch of a trial is {config.epochs - 1}: begin earlier, or give more --epochs"
        if len(late) == len(schedule["policies"]):
            begins = min(timing_of(policy).starting_epoch for policy in schedule["policies"])
            raise UserError(f"the schedule never acts, for it begins in epoch {begins} and {what}")
        warnings.warn(f"policies {', '.join(map(str, late))} of the schedule never act, for {what}", stacklevel=2)


def check_searched_options(space: Space, workload: str, given: Iterable[str]) -> None:
    """Raise UserError for an option of the workload that a space searches and the workload does not take.

    Args:
        space: what is searched.
        workload: its name.
        given: the options that are the same in all trials, as NAME=VALUE texts.
    """
    from trainables.workloads import check_call, option_names

    if not space.options:
        return
    if workload == SCRIPT:
        command = read_options(given)["command"]
        for name in space.options:
            if name not in names(command):
                raise UserError(
                    f"key {name} of space {space.name} is no variable, so the command must have the placeholder "
                    f"{{{name}}}, got {command}"
                )
        return
    known = option_names(workload)
    for name in space.options:
        if name in PLACES.get(workload, ()):
            raise UserError(f"space {space.name} can't search {name}, which says where something is stored")
        if known is not None and name not in known:
            raise unknown_name(f"key of space {space.name}", name, [*settable_fields(), *known])
    for corner in corners(space, replace(ANY_RUN, workload_options=tuple(given))):
        check_call(workload, corner.get("workload_options", given))


def check_processors(options: SearchOptions) -> None:
    """Raise UserError for more threads than there are processors here, which would slow each other down."""
    there = processors()
    if options.cpus_per_trial > there and not options.is_on_cluster:
        raise UserError(
            f"--cpus-per-trial must be at most {there}, which is all that this process may use, got "
            f"{options.cpus_per_trial}; give --address to search on a cluster"
        )


def check_gpus(options: SearchOptions) -> None:
    """Raise UserError for more GPUs than torch sees, before any Ray process starts; a cluster is checked later."""
    if options.gpus_per_trial == 0 or options.is_on_cluster:
        return
    import torch

    there, each, workers = torch.cuda.device_count(), options.gpus_per_trial, options.workers_per_trial
    if each * workers > there:
        times = f"{workers} times " if workers > 1 else ""
        raise UserError(
            f"{'--workers-per-trial times ' if times else ''}--gpus-per-trial must be at most {there}, which is all "
            f"that torch sees here, got {times}{each:g}; give --address to search on a cluster"
        )


def settle_device(options: SearchOptions, layout: Layout | None = None) -> tuple[SearchOptions, DeviceChoice]:
    """Return options with the device settled, and why it is this one.

    Args:
        options: of the search.
        layout: of a study that is searched further, whose device is kept; None for a new one.

    Raises:
        UserError: GPUs for trials on the CPU, or a device that is not there.
    """
    from trainables.training.device_choice import DeviceChoice, choose_device, sees_gpu

    device, gpus, why = options.device, options.gpus_per_trial, f"--device {options.device}"
    if device == "cpu" and gpus:
        raise UserError(f"--gpus-per-trial must be 0 with --device cpu, got {gpus:g}")
    if device == "auto" and gpus:
        device, why = "cuda", f"--gpus-per-trial {gpus:g}"
    trained = [] if layout is None or not layout.journal.exists() else read_journal(layout.journal)
    if device == "auto" and (earlier := next((one["config"].get("device") for one in trained if one["config"]), None)):
        device, why = earlier, "as the study so far"
        if layout is not None and device == "cuda":
            gpus = layout.read_info().gpus_per_trial
    if device == "auto" and options.is_on_cluster:
        device, why = "cpu", "those of a cluster need --gpus-per-trial"
    if device == "auto":
        found = choose_device(baseline_config(options, device="cpu"), at_a_time=options.trials_at_a_time)
    elif device == "cuda" and not options.is_on_cluster and not sees_gpu():
        raise UserError(f"device cuda ({why}) needs a GPU, and torch sees none here: give --device cpu")
    else:
        found = DeviceChoice(device, why, (gpus or 1.0) if device == "cuda" else 0.0)
    options = replace(options, device=found.device, gpus_per_trial=found.gpus_per_trial, script=None)
    if found.gpus_per_trial and not (options.concurrency or options.is_on_cluster):
        import torch

        room = int(torch.cuda.device_count() / found.gpus_per_trial) // options.workers_per_trial
        options = replace(options, concurrency=max(1, min(room, options.trials_at_a_time)))
    return options, found


def own_code(options: SearchOptions) -> list[str]:
    """Return the user's functions: the workload, and options such as ``model=package:function``."""
    values = [options.workload, *(text.partition("=")[2] for text in options.workload_options)]
    return [value for value in values if not options.is_script and is_factory(value)]
