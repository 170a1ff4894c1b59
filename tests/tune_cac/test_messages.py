"""Messages on standard error: a warning of ours in one line, others as Python prints them."""

from __future__ import annotations

import subprocess
import sys
import warnings

from tune_cac.messages import warnings_as_messages


def test_a_warning_is_one_line_without_a_place_in_the_code() -> None:
    usual = warnings.formatwarning
    with warnings_as_messages():
        assert warnings.formatwarning("no numbers", UserWarning, "a.py", 3) == "warning: no numbers\n"
        assert "a.py:3: DeprecationWarning: old" in warnings.formatwarning("old", DeprecationWarning, "a.py", 3)
    assert warnings.formatwarning is usual


def test_a_command_prints_its_warnings_so() -> None:
    code = """
import dataclasses, warnings
from tune_cac.cli import main, spaces
spaces.run = dataclasses.replace(spaces.run, function=lambda arguments: warnings.warn("of a space") or 0)
main.main(["spaces"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: of a space\n"
