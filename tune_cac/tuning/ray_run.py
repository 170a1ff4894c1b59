"""One Ray Tune run over the trials that a searcher suggests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.layout import Layout
from trainables.errors import UserError
from tune_cac.study.folder import trial_folder_name
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning.run_context import own_code

if TYPE_CHECKING:
    from tune_cac.tuning.progress import Budget, SearchProgress
    from tune_cac.tuning.searcher import StudySearch


def ray_needs(options: SearchOptions) -> dict[str, Any]:
    """Return the arguments of `tune_cac.ray_backend.session.ray_session`."""
    modules: list[Path] = []  # of the user, which trials import
    if named := own_code(options):
        from trainables.workloads.user_code import own_modules

        modules = sorted({path for name in named for path in own_modules(name.partition(":")[0])})
    cpus = options.trials_at_a_time * options.processors_per_trial
    return {"cpus": cpus, "modules": modules, "address": options.address}


def train(
    layout: Layout, options: SearchOptions, searcher: StudySearch, progress: SearchProgress, most: int,
    budget: Budget | None = None,
) -> None:  # fmt: skip
    """Run on Ray the trials that the searcher suggests, at most ``most``, restarts not counted."""
    from ray import tune

    from tune_cac.ray_backend.session import check_seen_by_all, ends_with_head, ray_session
    from tune_cac.ray_backend.tensorboard import RowEvents
    from tune_cac.ray_backend.workers import memory_ends_trials

    go_on = f"python -m tune_cac search --resume {layout.root}"
    if layout.read_info().candidates:
        go_on = f"python -m tune_cac confirm {layout.root.parent}"

    def named(trial: Any) -> str:
        return trial_folder_name(trial.config["trial"])

    with progress, ray_session(**ray_needs(options)), searcher.coordinated(), memory_ends_trials():
        _check_resources(options)
        at_a_time = trials_at_a_time(options)
        check_seen_by_all(layout)
        with ends_with_head(go_on):
            tune.Tuner(
                _trainable(options),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    # An upper bound: the searcher ends the run. Restarts because memory ran out halve those at a time.
                    num_samples=most * (1 + options.retries) + 2 * at_a_time,
                    max_concurrent_trials=at_a_time,
                    reuse_actors=not options.fresh_processes,
                    trial_name_creator=named,
                    trial_dirname_creator=named,
                ),
                run_config=tune.RunConfig(
                    name=Path(searcher.plan.run_folder).name,
                    storage_path=str(layout.ray.resolve()),
                    verbose=0,
                    callbacks=[progress, RowEvents()],
                    stop=budget,
                    # A finished trial needs no checkpoint, and with one at its end Ray would send every row separately.
                    checkpoint_config=tune.CheckpointConfig(num_to_keep=1, checkpoint_at_end=False),
                ),
            ).fit()
        if searcher.unwritten is not None:
            raise searcher.unwritten


def _trainable(options: SearchOptions) -> Any:
    """Return what Ray runs, with its resources; with several workers the trial itself only receives their rows."""
    from ray import tune

    if options.workers_per_trial > 1:
        from tune_cac.ray_backend.workers import ParallelTrial

        # One byte of memory: Ray requires a resource for a trial, and the workers may need every processor.
        return tune.with_resources(ParallelTrial, {"memory": 1})
    from tune_cac.ray_backend.worker_classes import SearchTrial

    return tune.with_resources(SearchTrial, {"cpu": options.cpus_per_trial, "gpu": options.gpus_per_trial})


def _check_resources(options: SearchOptions) -> None:
    import ray

    there = ray.cluster_resources()
    for kind, flag, wanted in (
        ("CPU", "--cpus-per-trial", options.cpus_per_trial),
        ("GPU", "--gpus-per-trial", options.gpus_per_trial),
    ):
        most = there.get(kind, 0) / options.workers_per_trial
        if wanted > most:
            each = "" if options.workers_per_trial == 1 else f" for each of {options.workers_per_trial} workers"
            raise UserError(f"{flag} must be at most {most:g}{each}, which is all that Ray has, got {wanted:g}")


def trials_at_a_time(options: SearchOptions) -> int:
    """Return how many trials train at a time: as given, or what the processors and GPUs of all nodes allow."""
    if options.concurrency or not options.is_on_cluster:
        return options.trials_at_a_time
    import ray

    there = ray.cluster_resources()
    room = [there.get("CPU", 0) / options.cpus_per_trial]
    if options.gpus_per_trial:
        room.append(there.get("GPU", 0) / options.gpus_per_trial)
    return max(1, int(min(room)) // options.workers_per_trial)
