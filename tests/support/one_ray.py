"""One Ray for the searches of a group of files."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

#: Holds the session that `one_ray` has started; tests/conftest.py closes it behind the last test of a group.
RAY = ExitStack()


@pytest.fixture(scope="module")
def one_ray() -> None:
    """One cluster for all searches in this process. Commands that are processes of their own start their own."""
    import ray  # most processes of a test run need none

    from tune_cac.ray_backend.session import ray_session

    if not ray.is_initialized():
        RAY.enter_context(ray_session(cpus=2))
