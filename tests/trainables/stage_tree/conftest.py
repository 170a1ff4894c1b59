"""Fixtures of the tests of the stage tree."""

from __future__ import annotations

import pytest

from trainables.stage_tree import checkpoints


@pytest.fixture
def each_test_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the warnings that come once a process."""
    monkeypatch.setattr(checkpoints, "_warned", set())
