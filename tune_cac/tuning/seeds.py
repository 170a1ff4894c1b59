"""Searches of one run on several seeds, each from what those before it have found.

One seed does not tell which setting holds on another (docs/findings.md); a recommendation from several does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.io.layout import Layout
from tune_cac.messages import say
from tune_cac.study.folder import check_same
from tune_cac.study.options import SearchOptions
from tune_cac.study.study_result import SearchResult
from tune_cac.tuning.outcomes.run_lengths import SHORTEST
from tune_cac.tuning.run_context import own_metric
from tune_cac.tuning.study_search import resume, search

#: Lengths of the runs, as shares of the full one: that with which a search begins by itself, and the full run.
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
        The studies' results in order, up to the first one that was interrupted or whose baseline failed.

    Raises:
        UserError: wrong options, or a study of one of the names that searched something else.
    """
    found: list[SearchResult] = []
    for seed in seeds:
        earlier = [*given.get("prior", ()), *(study_name(name, one) for one in seeds[: len(found)])]
        own = {"name": study_name(name, seed), "seed": seed, "prior": earlier, "lengths": LENGTHS, "controls": False}
        options = SearchOptions(**{**given, **own})
        options = options.with_metric(own_metric(options))
        layout = Layout(options.folder / str(options.name))
        if layout.info.exists():
            check_same(layout, options)
            one = resume(str(layout.root))
        else:
            one = search(**{**given, **own})
        found.append(one)
        say(f"seed {seed}: {one.headline}")
        trained = one.trials.loc[one.trials["role"] == "baseline", "status"]
        if one.interrupted or not (trained == "completed").all():
            break
    return found
