"""Processors that a process may use: those that it was given, not those of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainables.errors import UserError
from trainables.runtime.processors import processors

SEARCHED = "from tune_cac.study.search_options import SearchOptions; print(SearchOptions().trials_at_a_time)"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS assigns no processors to a process")
def test_a_batch_system_may_assign_fewer_than_the_machine_has() -> None:
    assigned = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    environment = {name: value for name, value in os.environ.items() if name != "LOKY_MAX_CPU_COUNT"}
    done = subprocess.run(
        [sys.executable, "-c", assigned + SEARCHED], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_a_limit_that_is_no_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "x")
    with pytest.raises(UserError, match="LOKY_MAX_CPU_COUNT must be an integer, got 'x': unset it"):
        processors()
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert processors() == 1
