"""benchmarks/gpu.py on a CPU with tiny sizes: its parts run to their end and check what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_the_script_for_a_lent_card_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    parts = ("steps", "host", "sync", "correct")
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--tiny", "--parts", *parts], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("ResNet-50  75% stopped", "GPT-2      75% by hand", "stopped weights still", "bit for bit"):
        assert said in done.stdout
    assert "replayed savings equal executed ones: 0." in done.stdout
