"""The run that a study searches on: its baseline's configuration, steps and layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from search_spaces import SpaceContext
from trainables.config import TrialConfig
from trainables.gradients.fields import OF_ANY_METHOD, estimator_in
from trainables.quality import ACCURACY, Quality
from trainables.registry import SCRIPT, WORKLOADS, is_factory
from trainables.savings import TIME
from trainables.training.recipe.fields import BFLOAT16, CHECKPOINTING, COMPILE_MODES, FLOAT16, RECIPE_FIELDS, recipe_of
from tune_cac.study.options import SearchOptions

if TYPE_CHECKING:
    from torch import nn

    from trainables.workloads.base import Workload


def run_context(config: TrialConfig) -> SpaceContext:
    """Return the facts on a run for search spaces: steps and layers; builds the model once and checks user code.

    The device is not touched.
    """
    from trainables.compression.measures.sizes import weight_layers
    from trainables.gradskip.layers import unit_ends, watch_needed
    from trainables.runtime.isolation import isolated
    from trainables.workloads import build_for

    workload = build_for(config)
    workload.check(config.seed)
    with isolated(seed=config.seed, threads=config.threads):
        model = workload.make_model()
    return SpaceContext(
        total_steps=workload.steps_per_epoch * config.epochs,
        layer_names=tuple(name for name, _ in model.named_parameters()),
        unit_ends=unit_ends(model),
        watch=watch_needed(list(model.parameters()), model),
        epochs=config.epochs,
        weight_names=tuple(weight_layers(model)),
        # The optimizer is made only for this: torch loads its compiler with it.
        recipe=recipe_choices(config, workload, model) if config.saving == TIME else {},
    )


def recipe_choices(config: TrialConfig, workload: Workload, model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the values of the recipe's fields that make a difference on a run, the default first."""
    from torch import nn

    from trainables.training.recipe.recipe import blocks_of, has_kernels

    on_gpu = config.device == "cuda"
    optimizer = workload.make_optimizer(model.named_parameters())
    convolves = any(isinstance(module, (nn.Conv2d, nn.Conv3d)) for module in model.modules())
    size = workload.batch_size
    found: dict[str, tuple[Any, ...]] = {"precision": (None, BFLOAT16, *((FLOAT16,) if on_gpu else ()))}
    if size is not None:
        found["batch_size"] = (None, *sorted({max(1, size // 2), 2 * size, 4 * size} - {size}))
    if has_kernels(optimizer):
        found["fused_optimizer"] = (None, True)
    if convolves:
        found["channels_last"] = (None, True)
    if blocks_of(model):
        found["activation_checkpointing"] = (None, *CHECKPOINTING)
    found["compile_mode"] = (None, *(COMPILE_MODES if on_gpu else COMPILE_MODES[:1]))
    if workload.by_step:
        found["loader_workers"] = (None, *sorted({0, 1, 2} - {workload.loader_workers}))
    if on_gpu:
        found |= {"cudnn_benchmark": (None, True), "pin_memory": (None, False)}
    fixed = {*recipe_of(config)}
    if fixed & {"compile_mode", "activation_checkpointing"}:  # one excludes the other
        fixed |= {"compile_mode", "activation_checkpointing"}
    return {name: values for name, values in found.items() if name not in fixed}


def context_of(base: TrialConfig) -> SpaceContext:
    """Return the facts on a run for search spaces before any training; nothing is known of a script."""
    if base.workload == SCRIPT:
        from trainables.script.run import check_command
        from tune_cac.tuning.script_search import UNKNOWN_RUN

        check_command(base)
        return UNKNOWN_RUN
    return run_context(replace(base, workers=1))


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
    from trainables.gradients.method import check_run
    from trainables.runtime.isolation import isolated
    from trainables.workloads import build

    with isolated(seed=options.seed, threads=options.cpus_per_trial):
        workload = build(options.workload, options.first_options)
        model = workload.make_model()
        for method in options.loaded_space.methods:
            if estimator := estimator_in(method):
                check_run(estimator, workload, model, options.fixed.get("gradient_layers"))


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
