"""What each choice of the recipe brought, on trials whose effects are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.metrics.recipe_effects import recipe_effects
from analysis.presentation.settings_text import recipe_lines, recipe_table, recipe_text

TIME = {"precision": 0.5, "fused_optimizer": 0.9, "batch_size": 1.3}
MEMORY = {"precision": 0.7, "fused_optimizer": 1.0, "batch_size": 0.8}
ACCURACY = {"precision": -0.02, "fused_optimizer": 0.0, "batch_size": 0.01}
VALUES = {"precision": "bfloat16", "fused_optimizer": True, "batch_size": 32}


def trials(combinations: list[tuple[str, ...]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "trial": number,
                "role": "baseline" if number == 0 else "search",
                "status": "completed",
                **{name: VALUES[name] if name in names else None for name in VALUES},
                "train_time_s": 10 * float(np.prod([TIME[name] for name in names])),
                "peak_memory_bytes": 1e9 * float(np.prod([MEMORY[name] for name in names])),
                "accuracy": 0.9 + sum(ACCURACY[name] for name in names),
            }
            for number, names in enumerate(combinations)
        ]
    )


ALONE: list[tuple[str, ...]] = [(), ("precision",), ("fused_optimizer",), ("batch_size",)]


@pytest.mark.parametrize("more", [[], [("precision", "batch_size"), ("precision", "fused_optimizer", "batch_size")]])
def test_factors_are_found_whatever_was_tried_together(more: list[tuple[str, ...]]) -> None:
    found = recipe_effects(trials([*ALONE, *more])).set_index("field")
    for name in VALUES:
        assert found.loc[name, "time_saved"] == pytest.approx(1 - TIME[name])
        assert found.loc[name, "memory_saved"] == pytest.approx(1 - MEMORY[name])
        assert found.loc[name, "quality_change"] == pytest.approx(ACCURACY[name], abs=1e-12)
    assert found.loc["precision", "trials"] == 1 + len(more)


def test_what_was_always_tried_together_is_not_told_apart() -> None:
    found = recipe_effects(trials([(), ("precision", "fused_optimizer"), ("batch_size",)])).set_index("field")
    assert found.loc[["precision", "fused_optimizer"], "time_saved"].isna().all()
    assert found.loc["batch_size", "time_saved"] == pytest.approx(-0.3)


def test_a_table_of_it() -> None:
    table = recipe_table(trials(ALONE))
    assert table[0] == ["choice", "trials", "time saved", "memory saved", "change of accuracy"]
    assert ["precision=bfloat16", "1", "50.0 %", "30.0 %", "-0.0200"] in table
    assert ["batch_size=32", "1", "-30.0 %", "20.0 %", "+0.0100"] in table


def test_lines_to_paste_are_python() -> None:
    every = {
        "precision": "float16", "batch_size": 32, "clip_grad_norm": 1.5, "activation_checkpointing": "blocks",
        "channels_last": True, "fused_optimizer": True, "compile_mode": "default", "loader_workers": 2,
        "pin_memory": True, "cudnn_benchmark": True, "deterministic": True,
    }  # fmt: skip
    for values in ({name: value} for name, value in every.items()):
        lines = recipe_lines(values)
        assert lines, values
        for line in lines:
            compile(f"{line}\n    pass" if line.startswith("with") else line, "recipe", "exec")
    assert "optimizer = torch.optim.SGD(..., fused=True)" in recipe_lines(every)
    assert recipe_text(every).startswith("precision=float16 batch_size=32 clip_grad_norm=1.5 ")
    assert recipe_lines({}) == []
