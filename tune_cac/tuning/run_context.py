"""The run that a study searches on: its baseline's configuration, steps and layers."""

from __future__ import annotations

from dataclasses import replace

from search_spaces import SpaceContext
from trainables.config import TrialConfig
from trainables.gradients.fields import estimator_in
from trainables.gradients.variance_fields import OF_ANY_METHOD
from trainables.quality import ACCURACY, Quality
from trainables.registry import SCRIPT, WORKLOADS, is_factory
from tune_cac.study.options import SearchOptions


def run_context(config: TrialConfig) -> SpaceContext:
    """Return the facts on a run for search spaces: steps and layers; builds the model once and checks user code."""
    from trainables.compression.measures.sizes import weight_layers
    from trainables.gradskip.layers import unit_ends, watch_needed
    from trainables.runtime.isolation import isolated
    from trainables.workloads import build

    workload = build(config.workload, config.options)
    workload.check(config.seed)
    with isolated(seed=config.seed, threads=config.threads):
        model = workload.make_model()  # no optimizer: torch would load its compiler
    return SpaceContext(
        total_steps=workload.steps_per_epoch * config.epochs,
        layer_names=tuple(name for name, _ in model.named_parameters()),
        unit_ends=unit_ends(model),
        watch=watch_needed(list(model.parameters()), model),
        epochs=config.epochs,
        weight_names=tuple(weight_layers(model)),
    )


def context_of(base: TrialConfig) -> SpaceContext:
    """Return the facts on a run for search spaces before any training; nothing is known of a script."""
    if base.workload == SCRIPT:
        from trainables.script.run import check_command
        from tune_cac.tuning.script_search import UNKNOWN_RUN

        check_command(base)
        return UNKNOWN_RUN
    return run_context(replace(base, device="cpu", workers=1))


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
        # Measurements are no part of a method, and trials share what was measured with the baseline.
        **{name: options.fixed[name] for name in OF_ANY_METHOD if name in options.fixed},
    )


def own_metric(options: SearchOptions) -> Quality:
    """Return the metric that the workload itself names; a factory is called for it."""
    if options.workload in WORKLOADS:
        return WORKLOADS[options.workload].quality
    if not is_factory(options.workload):
        return ACCURACY
    from trainables.workloads import build

    return build(options.workload, options.first_options).quality


def check_estimated(options: SearchOptions) -> None:
    """Raise UserError for a model that the space's gradient estimator cannot train."""
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
    from trainables.workloads import build
    from trainables.workloads.base import VALIDATION_LOSS

    workload, name = build(config.workload, config.options), config.quality.name
    if name == VALIDATION_LOSS and workload.evaluation_batches("validation") is not None:
        return
    with isolated(seed=config.seed, threads=config.threads), torch.no_grad():
        found = workload.evaluate_a_little(workload.make_model().eval(), torch.device("cpu"))
    workload.named_metrics(found, name)
