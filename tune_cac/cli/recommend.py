"""The command ``recommend``: settings for a run from earlier studies and the first quarter of its dense training."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import search_spaces
from analysis.formatting import LINE_WIDTH, percent, plural
from analysis.io.study_options import options_of, results_here
from trainables.config import TrialConfig, check_integer, wrapped_seed
from trainables.errors import UserError
from trainables.quality import Quality
from tune_cac.cli.options import add_options, add_results
from tune_cac.cli.workload_arguments import add_run, config_from_arguments
from tune_cac.messages import say
from tune_cac.study.options import SearchOptions

if TYPE_CHECKING:
    from search_spaces import Space
    from tune_cac.tuning.recommendation import Earlier, Errors

#: Share of the dense run that is trained.
TRAINED = 0.25
#: Beginning of the names of the studies that ``--seeds`` searches.
NAME = "recommend"
#: Said where thresholds alone can be handed out.
NO_LIST = (
    "# As thresholds, whatever their error: this model registers its layers in another order than it runs them in, so "
    "CAC_STOP_LAYER_NUM, whose numbers ascend, cannot say these stops."
)
#: Error of a saving, a fraction of the compute, up to which thresholds are recommended, and explicit stops beyond it.
TRUSTED = 0.05


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "recommend", parents=[debug], help="settings for a run from earlier studies and a quarter of its training",
        description="Train the first quarter of a run without a method and hand out the setting that earlier studies "
        "expect to save most within the allowed drop, as lines to source, with the error that leaving out each of "
        "these studies in turn gives. Thresholds where their savings can be predicted, else explicit stops; those of a "
        "shorter run where these promise more. With --seeds the earlier studies are searched first.",
    )  # fmt: skip
    add_run(parser)
    kept = ("prior", "space", "allowed_drop")
    add_options(parser, (found for found in options_of(SearchOptions) if found.name in kept))
    parser.add_argument(
        "--seeds", type=int, metavar="N",
        help="first search on N seeds, from --seed on, each from what those before have found; run again, it goes on "
        "where it was interrupted",
    )  # fmt: skip
    parser.add_argument("--name", help=f"with --seeds: beginning of its studies' names (default: {NAME})")
    add_results(parser)
    parser.set_defaults(run=run, space=SearchOptions.space)


def run(arguments: argparse.Namespace) -> int:
    """Train the first part of the dense run; print the recommended setting."""
    from analysis.presentation.env_file import environment_lines
    from analysis.presentation.length_text import shorter_lines
    from analysis.quality_words import value_text
    from tune_cac.tuning.recommendation import check_space, left_out, recommend, unit_of
    from tune_cac.tuning.run_context import baseline_config, own_metric

    if arguments.name is not None and arguments.seeds is None:
        raise UserError(
            f"--name must come with --seeds, whose studies it names, got --name {arguments.name} alone: add --seeds 5, "
            f"or name the studies to start from by --prior {arguments.name}"
        )
    space = search_spaces.load(arguments.space)
    check_space(space)
    given = config_from_arguments(arguments, method="none")
    options = SearchOptions(
        workload=given.workload, workload_options=given.workload_options or (), epochs=given.epochs, seed=given.seed,
        cpus_per_trial=given.threads, space=arguments.space, allowed_drop=arguments.allowed_drop,
    )  # fmt: skip
    options = options.with_metric(own_metric(options))
    config, quality, drop = baseline_config(options, device=given.device), options.quality, options.drop
    if arguments.seeds is not None and not _searched(arguments, given):
        return 130
    earlier = earlier_studies(arguments, space, quality, drop)
    epochs, number = math.ceil(TRAINED * config.epochs), count(1)

    def on_row(row: Mapping[str, Any]) -> None:
        say(f"dense epoch {next(number)} of {epochs}: {quality.name} {value_text(row[quality.key], quality)}")

    found = recommend(config, space, earlier, epochs, on_row)
    if found is None:
        say(f"no setting of space {space.name} stops anything on this run: try --space manual_layers")
        return 1
    errors = left_out(earlier, epochs / config.epochs) if len(earlier) > 1 else None
    trusted = found.stops is None or (errors is not None and errors.saved <= TRUSTED and found.shorter is None)
    names = ", ".join(one.prior.study for one in earlier)
    how = f"a setting of {space.name}" if trusted else "explicit stops, whose saving is exact"
    print(f"# tune_cac recommend: {config.workload}, {plural(config.epochs, 'epoch')}, {how}, seed {config.seed}")
    print(f"# From {names} and the first {epochs} dense epochs: trained {epochs / config.epochs:.2f} full trainings.")
    setting = found.thresholds if trusted or found.stops is None else found.shorter or found.stops
    told = comments(
        setting.outcome.saved, setting.loss, setting.spread, errors, quality, drop, unit_of(earlier, drop),
        trusted=trusted, listed=found.stops is not None,
    )  # fmt: skip
    for line in told:
        print("\n".join(textwrap.wrap(line, LINE_WIDTH, subsequent_indent="#   ")))
    is_cut = setting.outcome.epochs < config.epochs
    if is_cut:
        print(*shorter_lines(setting.outcome.epochs, config.epochs), sep="\n")
    print("# Iterations are those of a run of this length.")
    own = TrialConfig.from_mapping(setting.outcome.config)
    print(*environment_lines(own, schedule="", is_cut=is_cut), sep="\n")
    return 0


def _searched(arguments: argparse.Namespace, given: TrialConfig) -> bool:
    """Search on the seeds that are asked for, and take them as the earlier studies; return whether all have ended."""
    from analysis.metrics.accounting import search_cost
    from tune_cac.tuning.seeds import search_seeds, study_name

    check_integer("--seeds", arguments.seeds, 2)
    seeds = [wrapped_seed(given.seed + n) for n in range(arguments.seeds)]
    prior = list(arguments.prior or ())
    on_gpu = {"gpus_per_trial": 1.0} if given.device == "cuda" else {}
    name = arguments.name or NAME
    found = search_seeds(
        name, seeds,
        {
            "workload": given.workload, "workload_options": given.workload_options or (), "epochs": given.epochs,
            "space": arguments.space, "cpus_per_trial": given.threads, "results": arguments.results, "prior": prior,
            **on_gpu, **({} if arguments.allowed_drop is None else {"allowed_drop": arguments.allowed_drop}),
        },
    )  # fmt: skip
    executed = sum(search_cost(one.trials).dense_equivalents for one in found)
    say(f"searched {plural(len(found), 'seed')} for {executed:.1f} full trainings")
    if len(found) < len(seeds) or found[-1].interrupted:
        say("Interrupted. The same command goes on with what is missing.")
        return False
    arguments.prior = [*prior, *(study_name(name, seed) for seed in seeds)]
    return True


def earlier_studies(arguments: argparse.Namespace, space: Space, quality: Quality, drop: float | str) -> list[Earlier]:
    """Return the studies that are given, or all those in the results that can be a prior."""
    from tune_cac.study.folder import find_study
    from tune_cac.tuning.outcomes.prior_reading import thinned
    from tune_cac.tuning.recommendation import read_earlier

    folder = results_here(arguments.results)
    names = arguments.prior or sorted(path.parent.name for path in folder.glob("*/study.json"))
    found = {}
    for name in names:
        try:
            layout = find_study(arguments.results, name)
            found[layout.root.resolve()] = read_earlier(layout, space, quality, drop)
        except UserError as error:
            if arguments.prior:
                raise
            say(f"left out {name}: {error}")
    if not found:
        raise UserError(
            f"recommend needs an earlier study, and {folder} has none that can be used: run python -m tune_cac search, "
            "or give its folder by --prior"
        )
    return [replace(one, prior=thinned(one.prior, len(found))) for one in found.values()]


def comments(
    saved: float, loss: float, spread: float, errors: Errors | None, quality: Quality, drop: float | str, unit: float,
    *, trusted: bool, listed: bool = True,
) -> list[str]:  # fmt: skip
    """Return comments for a shell on what is expected of a setting, and how far that was off.

    Args:
        saved: compute that it saves, a fraction.
        loss: expected loss, in units.
        spread: its standard deviation.
        errors: over studies; None if there are none.
        quality: the metric.
        drop: that may be lost of it.
        unit: of losses (`recommendation.unit_of`).
        trusted: whether the setting are thresholds, not explicit stops.
        listed: whether a list of stops could say it.
    """
    from analysis.quality_words import allowed_text, drop_text, drop_words

    def words(losses: float) -> str:
        if isinstance(drop, str):
            return f"{losses * unit:.2g} % of the baseline's"
        return drop_text(losses * unit, quality, allowed=drop)

    lines = [
        f"# Expected: compute saved {percent(saved)}, {drop_words(quality)} {words(loss)}, give or "
        f"take {words(spread)} (allowed {allowed_text(drop, quality)}). Not trained, not confirmed."
    ]
    if not listed:
        lines.append(NO_LIST)
    if errors is None:
        lines.append("# No error can be given with fewer than two earlier studies that this can be tried on.")
    else:
        error, of = (errors.loss, "thresholds") if trusted else (errors.loss_of_stops, "stops")
        saving = f"{100 * errors.saved:.1f} points of the compute"
        lines.append(
            f"# Left out in turn, {errors.studies} of these studies had the saving of thresholds predicted with "
            f"a mean error of {saving}, the {drop_words(quality)} of {of} with one of {words(error)}."
        )
    return lines
