"""The search: a study folder, Optuna's suggestions, trials on Ray, and the answer."""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.formatting import plural
from analysis.io.studies import read_journal
from analysis.io.study_files import Layout
from analysis.io.study_options import RESULTS, SEEDS, most_trainings
from search_spaces import SpaceContext
from search_spaces.grid import GridPoints
from trainables.config import TrialConfig, wrapped_seed
from trainables.errors import UserError
from trainables.registry import is_factory
from trainables.script.placeholders import names
from trainables.script.report_lines import asked_metric
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.workload_options import read_options
from tune_cac.messages import say
from tune_cac.study.decoded_images import keeps_decoded_images
from tune_cac.study.fixed_params import check_hold_on_run, points_of, shown_hold, trials_in_all, with_watch
from tune_cac.study.folder import (
    check_writable,
    find_study,
    locked,
    mend_journal,
    open_study,
    threads_in,
    trial_folder_name,
    written,
)
from tune_cac.study.object_storage import copied_to_storage, fetch_study
from tune_cac.study.script_files import check_unchanged, script_identity
from tune_cac.study.search_options import AUTO_LENGTHS, SearchOptions, with_options
from tune_cac.study.study_result import SearchResult, answer, write_answer
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.run_context import (
    baseline_config,
    check_gpus,
    check_measured,
    check_methods,
    check_processors,
    check_schedule,
    check_searched_options,
    own_code,
    own_metric,
    run_context,
    settle_device,
    share_only_if_repeatable,
)

if TYPE_CHECKING:
    from trainables.training.device_choice import DeviceChoice
    from tune_cac.tuning.progress import Budget, SearchProgress
    from tune_cac.tuning.searcher import StudySearch

#: Share of `--checkpoint-budget` that the checkpoints of an ended study may take.
KEPT_SHARE = 0.01


@keeps_decoded_images
@with_options(SearchOptions)
def search(**given: Any) -> SearchResult:
    """Search a space on a workload.

    The first trial is the baseline (method off), the next the space's starting point, as a rule the published
    defaults scaled to the run's length; both count among ``trials``. An existing study of that ``name``, space,
    workload, length, seed and ``hold`` gets ``trials`` more.

    Args:
        given: the options of `SearchOptions`.

    Returns:
        Trials, ranking and best setting as pandas objects, which are also written into the study's folder.

    Raises:
        UserError: wrong arguments; raised before any Ray process starts.
    """
    options = SearchOptions(**given)
    if options.is_script:
        if options.epochs is not None and "epochs" not in names(read_options(options.workload_options)["command"]):
            raise UserError(
                f"--epochs must be left out where the command has no {{epochs}} to take it, got {options.epochs}"
            )
        own = (*options.workload_options, *script_identity(options.workload_options))
        options = replace(options, script=None, workload_options=own)
    check_processors(options)
    check_gpus(options)
    check_searched_options(options.loaded_space, options.workload, options.workload_options)
    options = options.with_metric(own_metric(options))
    study = None if options.name is None else Layout(options.folder / options.name)
    begun = study if study is not None and study.journal.exists() else None
    options, context = _checked_on_run(options)
    options, device = settle_device(options, begun)
    grid = _grid(options, context)
    layout = open_study(options)
    if varied := options.loaded_space.options:
        say(f"no controls: cut dense runs would belong to one combination of {', '.join(varied)} alone")
    with locked(layout), copied_to_storage(layout):
        info = layout.read_info()
        mend_journal(layout.journal)
        layout.write_info(
            replace(
                info,
                trials=trials_in_all(info.trials, options.trials, grid),
                allowed_drop=options.drop,
                seeds=options.seeds,
                sharing=bool(options.sharing),
                fresh_processes=options.fresh_processes,
                controls=options.controls,
                lengths=options.lengths,
            )
        )
        found = _run(layout, options, device, context, grid)
    is_open = given.get("metric") is None and begun is None and not layout.read_info().storage
    if is_open and options.is_script and (asked := _trainers_metric(found)):
        say(f"the script's trainer chooses by {asked['metric']}: searching by that")
        shutil.rmtree(found.folder)
        return search(**{**given, **asked})
    return found


def _trainers_metric(found: SearchResult) -> dict[str, str]:
    """Return the metric that a script's trainer chooses by, where no trial has that of the search."""
    if len(found.ranking):
        return {}
    return next((asked for error in found.failures["error"] if (asked := asked_metric(str(error)))), {})


def _checked_on_run(options: SearchOptions) -> tuple[SearchOptions, SpaceContext | None]:
    """Check the user's code and values before the folder exists; return the context of the run if that took it."""
    base, context = baseline_config(options, device="cpu"), None
    own = is_factory(options.workload) or options.first_options
    if own or options.sampler == "grid" or options.fixed or options.compresses:
        context = run_context(base, caches=_caches(options))
    if options.estimates:
        check_methods(options)
    if options.is_script:
        return options, context
    if options.metric is not None:
        check_measured(base)
    if context is not None:
        options = share_only_if_repeatable(options)
        context = _as_searched(context, options)
        if options.fixed:
            check_hold_on_run(options.loaded_space, options.fixed, context)
        if options.compresses:
            check_schedule(options, context, None if options.schedule is None else Path(options.schedule))
    return options, context


def _caches(options: SearchOptions) -> bool:
    if not options.loaded_space.uses_forward_cache or options.is_script:
        return False
    if options.workers_per_trial > 1:
        say("no forward cache: with --workers-per-trial, the rows that one worker has change from epoch to epoch")
    return options.workers_per_trial == 1


@keeps_decoded_images
@with_options(SearchOptions, on_resume=True)
def resume(name: str, **given: Any) -> SearchResult:
    """Finish a study's remaining trials with its own space, workload, length, seed, allowed loss and fixed values.

    Args:
        name: the study's name under ``results``, or its path.
        given: the options of `SearchOptions` that a resumed study takes anew.

    Raises:
        UserError: no such study, one that another process is searching, or an option that the study has settled.
    """
    layout = find_study(given.get("results", RESULTS), name)
    check_writable(layout.root)
    if storage := layout.read_info().storage:
        fetch_study(storage, layout)  # it may have been searched on elsewhere
    if layout.read_info().candidates:
        raise UserError(f"{layout.root} is a confirmation: go on with python -m tune_cac confirm {layout.root.parent}")
    with locked(layout), copied_to_storage(layout):
        info = layout.read_info()
        here = {"gpus_per_trial": SearchOptions.gpus_per_trial, **given}  # the study's are taken with its device
        if here.get("sharing") is None:
            here["sharing"] = info.sharing
        wanted, settled = here.get("seeds"), info.seeds or 1
        if wanted and wanted < settled:
            say(f"settings of {layout.root} are compared over {plural(settled, 'seed')}: so are these")
        here["seeds"] = max(wanted or 1, settled)
        mend_journal(layout.journal)
        options = SearchOptions.of_study(info, trials=max(1, info.trials), **{**threads_in(layout.journal), **here})
        check_processors(options)
        options, device = settle_device(options, layout)
        check_gpus(options)
        if options.is_script:
            check_unchanged(options.workload_options)
        if options.seeds != settled:
            layout.write_info(replace(layout.read_info(), seeds=options.seeds))
        return _run(layout, options, device)


def _run(
    layout: Layout, options: SearchOptions, device: DeviceChoice, context: SpaceContext | None = None,
    grid: GridPoints | None = None,
) -> SearchResult:  # fmt: skip
    """Run the trials that the study still lacks; this process has locked the study.

    The context and a grid's points are given where they are known already.
    """
    info, begun = layout.read_info(), time.monotonic()
    at_a_time = f"{options.trials_at_a_time} at a time"
    if options.is_on_cluster and not options.concurrency:
        at_a_time = "as many at a time as the cluster has room for"
    size = f"{plural(info.trials, 'trial')} of {info.length_text}, {at_a_time}, {device}"
    if grid is not None:
        size += f", {plural(len(grid), 'grid point')}"
    if options.fixed:
        size += f", {shown_hold(options.fixed)} fixed"
    # Printed before Ray loads, which takes seconds; torch, too, unless it may see a GPU.
    say(f"{layout.root}: {options.space} on {options.workload}, {size}")
    base = baseline_config(options, device="cuda" if options.gpus_per_trial > 0 else "cpu")
    interrupted, used_up = False, ""
    with written(layout, f"search --resume {layout.root}"):
        with _session(layout, options):
            context = context or run_context(base, caches=_caches(options))
            searcher = _searcher(layout, options, context, base, grid or _grid(options, context))
            searches_lengths = searcher.lengths.searched or searcher.walk is not None
            if options.lengths != AUTO_LENGTHS and options.searched_lengths and not searches_lengths:
                say(
                    f"--lengths {options.lengths} has no effect: runs are cut where auto searches Gradient-Skip alone, "
                    "those of a script if its command takes {epochs}"
                )
            to_run = info.trials - searcher.trials.finished_count()
            if to_run > 0 or _lacks_beside(searcher, options):
                interrupted, used_up = _search(layout, options, searcher, max(0, to_run), begun)
            layout.write_info(replace(layout.read_info(), why_little=searcher.trials.why_little))
            choosers = (searcher.outcomes, searcher.walk, searcher.candidates)
            ended = [one for one in choosers if one is not None and one.ended]
            if searcher.race.is_spent and not (interrupted or used_up or searcher.trials.has_unfinished()):
                say(f"{searcher.race.why_spent}: python -m tune_cac search --resume {layout.root} --cost-budget 5")
            elif ended and not searcher.trials.has_unfinished():
                say(f"ended after {plural(searcher.trials.finished_count(), 'trial')}: {ended[0].why_ended}")
                layout.write_info(replace(layout.read_info(), trials=searcher.trials.finished_count()))
        reported = searcher.trials.baseline_row()
        if options.is_script and info.script_epochs is None and reported:  # the command may choose that number itself
            layout.write_info(replace(layout.read_info(), script_epochs=int(reported["epoch"])))
        found = replace(answer(layout, allowed_drop=options.drop, interrupted=interrupted), used_up=used_up)
        write_answer(layout, found)
        if not (interrupted or used_up or searcher.gave_up or searcher.trials.has_unfinished()):
            thin_checkpoints(layout, options)
        return found


def thin_checkpoints(layout: Layout, options: SearchOptions) -> None:
    """Leave of an ended study's checkpoints those that more trials of it would want first."""
    try:
        Checkpoints(_tree_of(layout), int(KEPT_SHARE * int(options.checkpoint_budget))).thin()
    except OSError as error:  # the answer is there
        say(f"checkpoints of {layout.root} were not thinned: {error}")


def _tree_of(layout: Layout) -> Path | str:
    return layout.shared_tree if layout.read_info().storage else layout.tree.resolve()


def _lacks_beside(searcher: StudySearch, options: SearchOptions) -> bool:
    """Return whether baselines, runs on further seeds or controls are missing."""
    missing = searcher.trials.missing_baselines() or searcher.race.next()
    return bool(missing or (options.controls and searcher.missing_controls()))


def _session(layout: Layout, options: SearchOptions) -> AbstractContextManager[None]:
    """Return an early Ray session for a new study; none for a resumed one, which may have nothing to train."""
    if layout.journal.exists():
        return nullcontext()
    from tune_cac.ray_backend.session import ray_session

    # An optimizer loads torch's compiler; torch is needed to learn from the baseline, of a script too.
    needed = ["torch"] if options.is_script else ["torch", "torch._dynamo"]
    return ray_session(**ray_needs(options), meanwhile=needed)


def plan_of(
    layout: Layout, options: SearchOptions, context: SpaceContext, base: TrialConfig, **more: Any
) -> SearchPlan:
    """Return the plan of a study's search, with ``more`` fields of its own."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    gpus = {"GPU": options.gpus_per_trial} if options.gpus_per_trial else {}
    info, skips_gradients = layout.read_info(), "gradskip" in options.loaded_space.method
    plan = SearchPlan(
        space=options.loaded_space,
        context=_as_searched(context, options),
        base=base,
        journal=layout.journal,
        allowed_drop=options.drop,
        seeds=options.seeds or SEEDS,
        seed=options.seed,
        sampler=options.sampler,
        lengths=options.searched_lengths,
        run_folder=f"{layout.ray.name}/run-{len(list(layout.ray.glob('run-*'))):03d}",
        checkpoint_every_s=options.checkpoint_every_s,
        trial_timeout_s=None if options.trial_timeout is None else float(options.trial_timeout),
        hold=with_watch(options.fixed, context) if skips_gradients else dict(options.fixed),
        tree=_tree_of(layout),
        sharing=bool(options.sharing),
        budget_bytes=int(options.checkpoint_budget),
        trials=info.trials,
        most_trainings=most_trainings(options.seeds or SEEDS) if options.cost_budget is None else inf,
        retries=options.retries,
        repeats=not options.fresh_processes,
        worker_resources={"CPU": options.cpus_per_trial, **gpus} if options.workers_per_trial > 1 else None,
    )
    return replace(plan, **more)


def _searcher(
    layout: Layout, options: SearchOptions, context: SpaceContext, base: TrialConfig, grid: GridPoints | None
) -> StudySearch:
    from tune_cac.tuning.scripts import ScriptSearch
    from tune_cac.tuning.searcher import StudySearch

    # A later search of the same study must not draw the same random start again.
    earlier = len(read_journal(layout.journal)) if layout.journal.exists() else 0
    plan = plan_of(layout, options, context, base, seed=wrapped_seed(options.seed + 7919 * earlier), grid=grid)
    searcher = ScriptSearch(plan) if options.is_script else StudySearch(plan)
    if not searcher.trials.all():
        searcher.begin()
    searcher.adopt_unfinished()
    searcher.restarts.retry_baseline()
    return searcher


def _grid(options: SearchOptions, context: SpaceContext | None) -> GridPoints | None:
    """Return the points of a grid search; None with another sampler."""
    if options.sampler != "grid":
        return None
    known = None if options.is_script or context is None else _as_searched(context, options)
    return points_of(options.loaded_space, known)


def _as_searched(context: SpaceContext, options: SearchOptions) -> SpaceContext:
    """Return the facts on a run with what its search fixes: the schedule and the options of the workload."""
    fixed = {name: value for name, value in options.fixed.items() if name in options.loaded_space.may_be_fixed}
    return replace(
        context, schedule=options.fixed.get("schedule"), workload_options=tuple(options.workload_options), fixed=fixed
    )


def _search(
    layout: Layout, options: SearchOptions, searcher: StudySearch, to_run: int, begun: float
) -> tuple[bool, str]:
    """Run trials and controls; return whether they were interrupted, and the line on the budget that ended them."""
    from tune_cac.tuning.progress import Budget, SearchProgress

    progress = SearchProgress(searcher, to_run=to_run)
    time_s = None if options.time_budget is None else float(options.time_budget)
    budget = Budget(searcher, progress, time_s=time_s, trainings=options.cost_budget, begun=begun)
    searcher.ask_for(to_run, controls=options.controls, seeds=True)
    train(layout, options, searcher, progress, budget)
    go_on = f"python -m tune_cac search --resume {layout.root}"
    if searcher.gave_up:
        way_on = f"fix that, then run {go_on}"
        if options.is_script:
            way_on = "fix the command and search under another --name"
        say(f"{searcher.gave_up}, so nothing else was tried: {way_on}")
        return False, ""
    missing = progress.ended < to_run and not searcher.nothing_left  # points that cannot be are not trained
    if not (missing or searcher.trials.has_unfinished() or _lacks_beside(searcher, options)):
        return False, ""
    reason = budget.reason()
    if not reason:
        return True, ""
    trained = f"{searcher.trials.finished_count()} of {plural(layout.read_info().trials, 'trial')} ended"
    return False, f"{reason}: {trained}. Go on with: {go_on}"


# --- One Ray Tune run over the trials that a searcher suggests --------------------------------------------------------


def ray_needs(options: SearchOptions) -> dict[str, Any]:
    """Return the arguments of `tune_cac.ray_backend.session.ray_session`."""
    modules: list[Path] = []  # of the user, which trials import
    if named := own_code(options):
        from trainables.workloads.user_code import own_modules

        modules = sorted({path for name in named for path in own_modules(name.partition(":")[0])})
    cpus = options.trials_at_a_time * options.processors_per_trial
    return {"cpus": cpus, "modules": modules, "address": options.address}


def train(
    layout: Layout, options: SearchOptions, searcher: StudySearch, progress: SearchProgress,
    budget: Budget | None = None,
) -> None:  # fmt: skip
    """Run on Ray the trials that the searcher suggests."""
    from ray import tune

    from tune_cac.ray_backend.loggers import loggers
    from tune_cac.ray_backend.session import check_seen_by_all, ends_with_head, ray_session
    from tune_cac.ray_backend.tensorboard import RowEvents
    from tune_cac.ray_backend.workers import memory_ends_trials

    go_on = f"python -m tune_cac search --resume {layout.root}"
    if layout.read_info().candidates:
        go_on = f"python -m tune_cac confirm {layout.root.parent}"

    def named(trial: Any) -> str:
        return trial_folder_name(trial.config["trial"])

    others = loggers(options.log, layout.root)
    with progress, ray_session(**ray_needs(options)), searcher.coordinated(), memory_ends_trials():
        at_a_time = trials_at_a_time(options)
        check_seen_by_all(layout)
        with ends_with_head(go_on):
            tune.Tuner(
                _trainable(options),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    num_samples=-1,  # the searcher ends the run
                    max_concurrent_trials=at_a_time,
                    reuse_actors=not options.fresh_processes,
                    trial_name_creator=named,
                    trial_dirname_creator=named,
                ),
                run_config=tune.RunConfig(
                    name=Path(searcher.plan.run_folder).name,
                    storage_path=str(layout.ray.resolve()),
                    verbose=0,
                    callbacks=[progress, RowEvents(), *others],
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


def trials_at_a_time(options: SearchOptions) -> int:
    """Return how many trials train at a time: as given, or what all nodes have room for; UserError for none."""
    import ray

    there, room = ray.cluster_resources(), []
    for kind, flag, wanted in (
        ("CPU", "--cpus-per-trial", options.cpus_per_trial),
        ("GPU", "--gpus-per-trial", options.gpus_per_trial),
    ):
        most = there.get(kind, 0) / options.workers_per_trial
        if wanted > most:
            each = "" if options.workers_per_trial == 1 else f" for each of {options.workers_per_trial} workers"
            raise UserError(f"{flag} must be at most {most:g}{each}, which is all that Ray has, got {wanted:g}")
        if wanted:
            room.append(int(most / wanted))
    return options.trials_at_a_time if options.concurrency or not options.is_on_cluster else min(room)
