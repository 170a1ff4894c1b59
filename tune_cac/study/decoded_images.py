"""Folder of decoded images: beside the results, so that all studies there share them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from analysis.io.study_options import RESULTS, results_here
from trainables.workload_options import CACHE_VARIABLE

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def kept_beside(results: str | Path) -> Iterator[None]:
    """Keep decoded images under this folder of results, unless the environment names a folder."""
    if CACHE_VARIABLE in os.environ:
        yield
        return
    os.environ[CACHE_VARIABLE] = str(results_here(results).absolute() / ".images")
    try:
        yield
    finally:
        os.environ.pop(CACHE_VARIABLE, None)


def keeps_decoded_images(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with an argument ``results`` so that decoded images are kept there while it runs."""

    @functools.wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        results: Any = kwargs.get("results", RESULTS)
        with kept_beside(results):
            return function(*args, **kwargs)

    return keeping
