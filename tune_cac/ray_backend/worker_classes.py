"""The trial of `trainables` under a name of `tune_cac`, for Ray's workers; `worker_leases` has the leases.

A worker imports a class by the name that it was pickled with. By these names it imports `tune_cac` first, whose finder
(`tune_cac.own_packages`) is then in place before `trainables` is imported, whatever is in the working folder. Ray's own
way, a setup hook in the runtime environment, starts every worker through one more process.
"""

from __future__ import annotations

from trainables.trial import Trial


class SearchTrial(Trial):
    """The trial of a search."""
