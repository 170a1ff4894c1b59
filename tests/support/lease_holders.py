"""Who holds a stage, found by claiming it."""

from __future__ import annotations

import copy

from trainables.stage_tree.leases import Leases

HOLDERS = ("first", "second", "third")


def holder_of(claims: Leases, stage: str) -> str | None:
    """The holder, among these three, of a live lease on the stage; None where a stranger gets it. Changes nothing."""
    if copy.deepcopy(claims).claim(stage, "a stranger", 1.0):
        return None
    (holder,) = (name for name in HOLDERS if copy.deepcopy(claims).claim(stage, name, 1.0))
    return holder
