"""Cases of which the first stands for all in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_thorough(cases: Iterable[Any], *, of_several: bool = False) -> list[Any]:
    """Return cases of a parametrized test, of which all but the first one are marked ``thorough``, and so ``slow``.

    Those of ``of_several`` parameters are tuples with a value for each.
    """
    first, *others = cases
    values = others if of_several else [(case,) for case in others]
    return [first, *(pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.thorough)) for case in values)]
