"""The run that a study searches on: its baseline's configuration, steps and layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.studies import read_journal
from analysis.io.study_files import Layout
from search_spaces import Space, SpaceContext
from search_spaces.own_space import settable_fields
from search_spaces.space import ANY_RUN, corners
from trainables.config import TrialConfig
from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import OF_ANY_METHOD, estimator_in
from trainables.quality import ACCURACY, Quality
from trainables.registry import SCRIPT, WORKLOADS, is_factory
from trainables.runtime.processors import processors
from trainables.savings import TIME
from trainables.script.placeholders import names
from trainables.training.recipe.fields import BFLOAT16, CHECKPOINTING, COMPILE_MODES, FLOAT16, RECIPE_FIELDS, recipe_of
from trainables.workload_options import PLACES, read_options
from tune_cac.messages import say
from tune_cac.study.search_options import SearchOptions

if TYPE_CHECKING:
    from torch import nn

    from trainables.training.device_choice import DeviceChoice
    from trainables.workloads.base import Workload


#: Placeholder until the baseline has reported its run; no space is evaluated with it.
UNKNOWN_RUN = SpaceContext(total_steps=1, layer_names=(), unit_ends=())


def run_context(config: TrialConfig, *, caches: bool = False) -> SpaceContext:
    """Return the facts on a run before any training: builds the model once, on the CPU, and checks user code.

    ``caches`` finds out whether a forward cache is possible, for a space that uses it.

    Nothing is known of a script but that its command may be one.
    """
    if config.workload == SCRIPT:
        from trainables.script.run import check_command

        check_command(config)
        return UNKNOWN_RUN
    import psutil

    from trainables.compression.measures import layer_weights
    from trainables.gradskip.layers import has_trained_statistics, unit_ends, watch_needed
    from trainables.runtime.isolation import isolated
    from trainables.workloads import build_for

    config = replace(config, workers=1)
    workload = build_for(config)
    workload.check(config.seed)
    with isolated(seed=config.seed, threads=config.threads):
        model = workload.make_model()
    ends = unit_ends(list(model.parameters()), model)
    kept = kept_ends(workload, model, ends, config.seed) if caches else ()
    return SpaceContext(
        total_steps=workload.steps_per_epoch * config.epochs,
        layer_names=tuple(name for name, _ in model.named_parameters()),
        unit_ends=ends,
        watch=watch_needed(list(model.parameters()), model),
        epochs=config.epochs,
        weight_names=tuple(layer_weights(model)),
        # The optimizer is made only for this: torch loads its compiler with it.
        recipe=recipe_choices(config, workload, model) if config.saving == TIME else {},
        batch_size=workload.batch_size,
        has_norms=any(map(has_trained_statistics, model.modules())),
        kept_ends=kept,
        forward_cache_mb=psutil.virtual_memory().total // 5 // 10**6 if kept else 0,
    )


def kept_ends(workload: Workload, model: nn.Module, unit_ends: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the ends of units up to which outputs can be kept; none, with the reason said, where they cannot."""
    from trainables.gradskip.prefix_cuts import recorded_cuts

    why = f"{workload.name}, {workload.why_inputs_vary}" if workload.different_inputs is None else ""
    if not why:
        batch = next(iter(workload.train_batches(0, seed)))
        number_of = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        try:
            cuts = recorded_cuts(model, lambda copied: workload.loss(copied, batch))
            read = [{number_of[id(parameter)] for parameter in cut.all_parameters()} for cut in cuts]
            ends = {len(numbers) - 1 for numbers in read if numbers == set(range(len(numbers)))}
            if found := tuple(end for end in unit_ends if end in ends):
                return found
            why = f"no outputs of {type(model).__name__} can be kept where layers may stop"
        except UserError as error:
            why = str(error).removeprefix("forward cache: ")
    say(f"no forward cache: {why}")
    return ()


def recipe_choices(config: TrialConfig, workload: Workload, model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the values of the recipe's fields that make a difference on a run, the default first."""
    from torch import nn

    from trainables.training.recipe.recipe import blocks_of, has_kernels

    on_gpu = config.device == "cuda"
    optimizer = workload.make_optimizer(model.named_parameters())
    convolves = any(isinstance(module, (nn.Conv2d, nn.Conv3d)) for module in model.modules())
    size = workload.batch_size
    found: dict[str, tuple[Any, ...]] = {
        "precision": (None, BFLOAT16, *((FLOAT16,) if on_gpu else ())),
        "batch_size": () if size is None else (None, *sorted({max(1, size // 2), 2 * size, 4 * size} - {size})),
        "fused_optimizer": (None, True) if has_kernels(optimizer) else (),
        "channels_last": (None, True) if convolves else (),
        "activation_checkpointing": (None, *CHECKPOINTING) if blocks_of(model) else (),
        "compile_mode": (None, *(COMPILE_MODES if on_gpu else COMPILE_MODES[:1])),
        "loader_workers": (None, *sorted({0, 1, 2} - {workload.loader_workers})) if workload.by_step else (),
        "cudnn_benchmark": (None, True) if on_gpu else (),
        "pin_memory": (None, False) if on_gpu else (),
    }
    fixed = {*recipe_of(config)}
    if fixed & {"compile_mode", "activation_checkpointing"}:  # one excludes the other
        fixed |= {"compile_mode", "activation_checkpointing"}
    return {name: values for name, values in found.items() if values and name not in fixed}


def baseline_config(options: SearchOptions, *, device: str) -> TrialConfig:
    """Return the configuration of the run without the method and without fixed values."""
    return TrialConfig(
        workload=options.workload,
        workload_options=options.first_options,
        epochs=options.trial_epochs,
        seed=options.seed,
        method="none",
        device=device,
        threads=options.cpus_per_trial,
        workers=options.workers_per_trial,
        saving=None if options.ranked_by == "training" else options.ranked_by,
        metric=options.metric,
        direction=options.direction,
        metric_unit=options.metric_unit,
        # Measurements and the recipe are no part of a method: trials share them with the baseline.
        **{name: options.fixed[name] for name in (*OF_ANY_METHOD, *RECIPE_FIELDS) if name in options.fixed},
    )


def own_metric(options: SearchOptions) -> Quality:
    """Return the metric that the workload itself names; a factory is called for it."""
    if options.workload in WORKLOADS:
        return WORKLOADS[options.workload].quality
    if not is_factory(options.workload):
        return ACCURACY
    from trainables.workloads import build

    return build(options.workload, options.first_options).quality


def check_methods(options: SearchOptions) -> None:
    """Raise UserError for a model that the space's estimator cannot train."""
    from trainables.gradients.method import check_model
    from trainables.runtime.isolation import isolated
    from trainables.workloads import build

    with isolated(seed=options.seed, threads=options.cpus_per_trial):
        workload = build(options.workload, options.first_options)
        model = workload.make_model()
        for method in options.loaded_space.methods:
            if estimator := estimator_in(method):
                check_model(estimator, model, options.fixed.get("gradient_layers"))


def check_measured(config: TrialConfig) -> None:
    """Raise UserError unless the workload measures the config's metric, tried on an untrained model."""
    import torch

    from trainables.runtime.isolation import isolated
    from trainables.workloads import build_for
    from trainables.workloads.base import VALIDATION_LOSS

    workload, name = build_for(config), config.quality.name
    if name == VALIDATION_LOSS and workload.evaluation_batches("validation") is not None:
        return
    with isolated(seed=config.seed, threads=config.threads), torch.no_grad():
        found = workload.evaluate_a_little(workload.make_model().eval(), torch.device("cpu"))
    workload.named_metrics(found, name)


# --- Checks before a search has a folder or a Ray process: schedule, processors, GPUs, repeatable training ------------


def share_only_if_repeatable(options: SearchOptions) -> SearchOptions:
    """Train a few steps of the user's own code twice; return options without sharing if the results differ.

    With a counter in the model, or a data set with its own generator, a run depends on what its process trained before.
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
    """Raise UserError for a schedule that does not fit the model, before there is a study."""
    import optuna

    from trainables.compression.scheduler import check_on_model
    from trainables.compression.trial.from_config import schedule_of
    from trainables.compression.trial.method import check_together
    from trainables.compression.trial.replay import late_policies, timing_of

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
    """Raise UserError for an option that a space searches and the workload, beside those given, does not take."""
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

    there, needed = torch.cuda.device_count(), options.gpus_per_trial * options.workers_per_trial
    if needed > there:
        raise UserError(
            f"--gpus-per-trial times --workers-per-trial must be at most {there}, which is all that torch sees here, "
            f"got {needed:g}; give --address to search on a cluster"
        )


def settle_device(options: SearchOptions, layout: Layout | None = None) -> tuple[SearchOptions, DeviceChoice]:
    """Return options with the device settled, and why it is this one; a study that is searched further keeps its own.

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
