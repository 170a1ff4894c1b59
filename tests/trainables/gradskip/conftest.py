"""Fixtures of the tests of Gradient-Skip."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ignore warnings; a test that is about one asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
