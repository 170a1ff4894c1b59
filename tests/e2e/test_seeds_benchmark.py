"""benchmarks/seeds.py: what it replays on a table of qualities without noise."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_without_noise_every_interval_has_the_loss_and_no_answer_loses_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from seeds import SAMPLES, Table, replayed

    rows, lost, allowed = pd.read_csv(BENCHMARKS / "seeds_digits.csv"), 10, 0.0085
    for split in ("validation", "test"):
        rows[split] = 590 - (lost * rows["saved"]).round().astype(int)
    rows.to_csv(tmp_path / "table.csv", index=False)
    row = replayed(Table(tmp_path / "table.csv"), allowed, "3 seeds", draw=0)
    assert row["answered"] == row["within"] == row["covered"] == 1
    assert row["true loss"] == pytest.approx(100 * round(lost * row["saved"]) / SAMPLES)
    most = rows.loc[(lost * rows["saved"]).round() <= allowed * SAMPLES, "saved"].max()
    assert most - 0.05 < row["saved"] <= most
