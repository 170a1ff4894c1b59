"""Searches of one run on several seeds, each from what those before it have found.

One seed does not tell which setting holds on another (docs/findings.md); a recommendation from several does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.io.layout import Layout
from trainables.errors import UserError
from tune_cac.messages import say
from tune_cac.study.folder import check_same, threads_in, wanted_info
from tune_cac.study.object_storage import fetch_study
from tune_cac.study.options import SearchOptions
from tune_cac.study.study_result import SearchResult
from tune_cac.tuning.outcomes.run_lengths import SHORTEST
from tune_cac.tuning.run_context import own_metric
from tune_cac.tuning.study_search import resume, search

#: Lengths of the runs, as shares of the full one: those with which a search begins by itself, and the full run.
LENGTHS = f"1.0,{SHORTEST}"


def study_name(name: str, seed: int) -> str:
    """Return the name of one seed's study."""
    return f"{name}-seed{seed}"


def search_seeds(name: str, seeds: Sequence[int], given: Mapping[str, Any]) -> list[SearchResult]:
    """Search on every seed, without controls; what an earlier call has finished is not searched again.

    Args:
        name: beginning of the studies' names.
        seeds: of the searches.
        given: the options of all searches (`SearchOptions`); the first one starts from their ``prior``, too.

    Returns:
        The studies' results in order, up to the first one that was interrupted.

    Raises:
        UserError: wrong options, a study of one of the names that searched something else, or a baseline that failed.
    """
    found: list[SearchResult] = []
    for seed in seeds:
        earlier = [*given.get("prior", ()), *(study_name(name, one) for one in seeds[: len(found)])]
        own = {"name": study_name(name, seed), "seed": seed, "prior": earlier, "lengths": LENGTHS, "controls": False}
        options = SearchOptions(**{**given, **own})
        options = options.with_metric(own_metric(options))
        if (layout := _begun(options)) is None:
            one = search(**{**given, **own})
        else:
            threads = {"cpus_per_trial": options.cpus_per_trial, **threads_in(layout.journal)}
            one = resume(str(layout.root), gpus_per_trial=options.gpus_per_trial, **threads)
        found.append(one)
        say(f"seed {seed}: {one.headline}")
        if one.interrupted:
            break
        if not (one.trials.loc[one.trials["role"] == "baseline", "status"] == "completed").any():
            raise UserError(
                f"the baseline failed on seed {seed}, so nothing can be recommended: mend what {one.folder} tells, "
                "then run the same command, which goes on"
            )
    return found


def _begun(options: SearchOptions) -> Layout | None:
    """Return the folder of a search that was begun before; None if there is none.

    Raises:
        UserError: it searched something else.
    """
    layout = Layout(options.folder / str(options.name))
    wanted = wanted_info(options, layout)
    if wanted.storage:
        fetch_study(wanted.storage, layout)
    if not layout.info.exists():
        return None
    check_same(layout, wanted)
    allowed = layout.read_info().allowed_drop
    if allowed != options.drop:
        raise UserError(
            f"{layout.root} holds a study with --allowed-drop {allowed}, not {options.drop}: choose another --name"
        )
    return layout
