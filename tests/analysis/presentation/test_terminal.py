"""The ranked table at the widths of terminals."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from studies import result_row

import analysis
from analysis.io.studies import to_frame
from analysis.metrics.over_seeds import SEED_COLUMNS
from analysis.presentation.terminal import ROWS, terminal_table
from trainables.config import TrialConfig

LONG = "bert.encoder.layer.3.output.LayerNorm.bias"


def record(
    number: int, accuracy: float, saved: float, *, stop: str = "", role: str = "search", epochs: int = 30
) -> Any:
    row = result_row(accuracy, saved)
    if stop:
        row["stop_events"] = json.dumps([{"iteration": 24, "layer": 3, "name": stop, "ratio": None, "rule": "manual"}])
    method = "none" if role == "baseline" or not stop else "gradskip"
    return {
        "trial": number, "role": role, "status": "completed", "error": None, "row": row,
        "config": TrialConfig(method=method, epochs=epochs).to_dict(), **({"of_epochs": 30} if epochs < 30 else {}),
    }  # fmt: skip


def ranking(*more: Any) -> pd.DataFrame:
    found = to_frame([
        record(0, 0.97, 0.0, role="baseline"), record(1, 0.968, 0.31, stop="conv6.weight", epochs=24),
        record(2, 0.967, 0.5, stop=LONG), record(3, 0.94, 0.6, epochs=12), *more,
    ])  # fmt: skip
    ranked = analysis.rank(found, allowed_drop=0.005)
    known = {1: (3, 0.002, -0.001, 0.00501, 0.004, None, True), 2: (3, 0.0055, -0.001, 0.012, 0.02, None, False)}
    rows = {number: (*row, None, None) for number, row in known.items()}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(SEED_COLUMNS)).reindex(ranked["trial"])
    ranked["within_drop"] &= ranked["trial"] != 2  # as ranked with its seeds
    return ranked.join(table.astype({"seeds": "Int64", "within_over_seeds": "boolean"}).set_axis(ranked.index))


SHOWN = {
    140: """\
trial  setting                      saved            points (95 %)     time  shorter
   2   ….3.output.LayerNorm by 24  50.0 %   -0.55 (-1.20 to +0.10)!  50.0 %   behind
   1*  24 ep, conv6 by 24          31.0 %  -0.20 (-0.501 to +0.10)   31.0 %    ahead
   0   baseline                     0.0 %                     0.00    0.0 %
   3   12 ep, dense                60.0 %                    -3.00!  60.0 %
* the answer; ! loses more than is allowed""",
    80: """\
trial  setting                saved            points (95 %)     time  shorter
   2   ….3….LayerNorm by 24  50.0 %   -0.55 (-1.20 to +0.10)!  50.0 %   behind
   1*  24 ep, conv6 by 24    31.0 %  -0.20 (-0.501 to +0.10)   31.0 %    ahead
   0   baseline               0.0 %                     0.00    0.0 %
   3   12 ep, dense          60.0 %                    -3.00!  60.0 %
* the answer; ! loses more than is allowed""",
    40: """\
trial   saved            points (95 %)
   2   50.0 %   -0.55 (-1.20 to +0.10)!
   1*  31.0 %  -0.20 (-0.501 to +0.10)
   0    0.0 %                     0.00
   3   60.0 %                    -3.00!
* the answer; ! loses more than is
allowed""",
}


@pytest.mark.parametrize("width", [140, 80, 40])
def test_a_trial_is_one_line_of_whole_numbers(width: int) -> None:
    found = ranking()
    beats = found["trial"].map({1: "ahead", 2: "behind"})
    text = terminal_table(found, width=width, allowed_drop=0.005, answer=1, beats=beats)
    assert text == SHOWN[width]
    assert max(map(len, text.splitlines())) <= width


def test_the_baseline_is_one_of_at_most_twelve_rows() -> None:
    many = ranking(*(record(n, 0.97, n / 100, stop="conv6.weight") for n in range(4, 30)))
    lines = terminal_table(many, width=80, allowed_drop=0.005).splitlines()
    assert len(lines) == 1 + ROWS + 1
    assert lines[ROWS].split()[:2] == ["0", "baseline"]
    assert "18 trials more: report --all" in lines[-1]
    assert "time" in lines[0]
    assert "shorter" not in lines[0]


def test_the_answer_is_always_shown_and_an_unknown_loss_is_not_too_large() -> None:
    many = ranking(*(record(n, 0.97, n / 100, stop="a!\nb.weight") for n in range(4, 30)))
    text = terminal_table(many, width=80, allowed_drop=0.005, answer=4)
    assert "   4*  a!?b by 24" in text
    assert len(text.splitlines()) == 1 + ROWS + 1
    alone = analysis.rank(to_frame([record(1, 0.97, 0.3, stop="conv6.weight")]), allowed_drop=0.005)
    assert "!" not in terminal_table(alone, width=80, allowed_drop=0.005)


@pytest.mark.parametrize(
    ("layer", "shown"),
    [("attention", "….{}.blocks.{}.attention"), ("output.LayerNorm", "s.e.l.{}.b.{}.o.LayerNorm")],
)
def test_two_layers_are_never_shortened_alike(layer: str, shown: str) -> None:
    """As those of a Swin transformer's stages, of which each numbers its blocks from 0."""
    places = [(stage, block) for stage in (0, 1) for block in (0, 1)]
    names = [f"swin.encoder.layers.{stage}.blocks.{block}.{layer}.weight" for stage, block in places]
    found = ranking(*(record(4 + n, 0.97, n / 100, stop=name) for n, name in enumerate(names)))
    table = terminal_table(found, width=80, allowed_drop=0.005)
    assert [table.count(f"   {shown.format(*place)} by 24 ") for place in places] == [1] * 4


def test_all_rows_where_they_are_asked_for() -> None:
    many = ranking(*(record(n, 0.97, n / 100, stop="conv6.weight") for n in range(4, 30)))
    lines = terminal_table(many, width=80, allowed_drop=0.005, most=len(many)).splitlines()
    assert sorted(int(line.split()[0]) for line in lines[1:31]) == list(range(30))
    assert "report --all" not in lines[-1]
