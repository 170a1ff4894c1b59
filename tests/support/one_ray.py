"""One Ray for the searches of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tune_cac.ray_backend.session import ray_session


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One cluster for all searches in this process. Commands that are processes of their own start their own."""
    with ray_session(cpus=2):
        yield
