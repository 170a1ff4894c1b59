"""The formulas of savings by hand, and that they stand nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from trainables.savings import share_of_budget, share_saved

ROOT = Path(__file__).parents[2]
#: One minus a share of a dense cost, or a difference of costs over one.
COST = re.compile(r"(1(\.0)? - |\().*/ \S*(dense|budget|whole|macs|flops|bytes)\S*( if .*)?")


def test_by_hand() -> None:
    assert share_saved(25, 100) == 0.75
    assert share_saved(150, 100) == -0.5
    assert share_saved(0, 0) == 0.0
    of_frame = share_saved(pd.Series([25.0, 1.0]), pd.Series([100.0, np.nan]))
    assert of_frame.isna().tolist() == [False, True]
    assert of_frame[0] == 0.75


def test_a_complete_run_saves_the_same_of_its_budget() -> None:
    for executed, dense in ((10**15 + 1, 3 * 10**15), (0, 7), (9, 7)):
        assert share_of_budget(dense - executed, dense) == pytest.approx(share_saved(executed, dense), abs=1e-15)
    assert share_of_budget(np.array([10, 0]), 40).tolist() == [0.25, 0.0]
    assert share_of_budget(np.array([0, 0]), 0).tolist() == [0.0, 0.0]


def test_the_formula_stands_in_no_other_file() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in ("tune_cac", "search_spaces", "trainables", "analysis")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "savings.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.BinOp) and COST.fullmatch(ast.unparse(node))
    ]
    assert not found
    assert COST.fullmatch("1 - executed / counted['dense_flops']")
    assert COST.fullmatch("(counts['dense_flops'] - executed) / budget")
