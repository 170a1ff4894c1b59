"""A trial whose values are given instead of suggested: a control of a search, or a run of a confirmation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PredefinedTrial:
    """Values of a trial, and the attributes recorded for it."""

    attrs: Mapping[str, Any]
    """User attributes of its Optuna trial, the role among them."""
    values: Mapping[str, Any]
    """Fields of the config that differ from the baseline's, in plain types."""

    @property
    def key(self) -> str:
        """Return a text that is equal for runs of equal values."""
        return as_key(self.values)


def as_key(values: Any) -> str:
    """Return given values as a text that can be compared."""
    return json.dumps(values, sort_keys=True)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in types that JSON preserves, so that Ray, the journal and a resumed search see the same config."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
