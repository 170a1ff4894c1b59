"""Cases of which the first stands for all in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_thorough(cases: Iterable[Any]) -> list[Any]:
    """Return cases of a parametrized test, of which all but the first one are marked ``thorough``."""
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.thorough) for case in others)]
