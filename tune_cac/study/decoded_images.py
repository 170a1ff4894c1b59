"""Where images are kept once they are decoded: beside the results, so that every study under them finds them there."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from trainables.workload_options import CACHE_VARIABLE

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def kept_beside(results: str | Path) -> Iterator[None]:
    """Decoded images are kept under this folder of results, unless the environment says where."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ.setdefault(CACHE_VARIABLE, str(Path(results).absolute() / ".images"))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CACHE_VARIABLE, None)


def keeps_decoded_images(function: Callable[P, R]) -> Callable[P, R]:
    """For a function with an argument ``results``: inside it, decoded images are kept there."""

    @functools.wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        results: Any = kwargs.get("results", "results")
        with kept_beside(results):
            return function(*args, **kwargs)

    return keeping
