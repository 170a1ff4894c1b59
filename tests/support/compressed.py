"""Studies of compression written by hand: a baseline, and trials that save compute of inference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from studies import result_row, write_study

from analysis.io.studies import to_frame
from analysis.io.study_files import Layout
from trainables.config import TrialConfig

#: Of three layers, the last of which is not pruned.
SENSITIVITIES = ("conv1.weight=0.5", "conv2.weight=0.25", "fc.weight=0")
#: Multiply-adds of a sample through the model as it was built.
MACS = 1_000_000


def pruned(
    accuracy: float,
    inference: float,
    training: float = 0.0,
    *,
    saving: str = "inference",
    method: str = "compression",
    columns: Mapping[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A trial that saves so much of both; by default one sensitivity a layer."""
    settings = config or {"pruning_sensitivities": SENSITIVITIES}
    layers = {"conv1.weight": 0.4, "conv2.weight": 0.2, "fc.weight": 0.0}
    row = result_row(
        accuracy, training, sparsity=0.3, structured_sparsity=0.1, inference_saved=inference,
        sparse_inference_saved=inference, dense_macs=MACS, effective_macs=round(MACS * (1 - inference)),
        parameters=18_482, layer_sparsity=json.dumps(layers),
    )  # fmt: skip
    return {
        "row": row | dict(columns or {}),
        "config": TrialConfig(method=method, saving=saving, **settings).to_dict(),
    }


def dense(accuracy: float = 0.97, *, saving: str = "inference") -> dict[str, Any]:
    """The baseline of such a study."""
    row = result_row(accuracy, dense_macs=MACS, effective_macs=MACS, parameters=18_482)
    return {"row": row, "config": TrialConfig(method="none", saving=saving).to_dict()}


def write_compressed(folder: Path, trials: Sequence[Mapping[str, Any]], *, saving: str = "inference") -> Layout:
    """A study that ranks by that, with a baseline before the trials."""
    layout = write_study(folder, [dense(saving=saving), *trials])
    layout.write_info(replace(layout.read_info(), saving=saving, space="pruning_sensitivities", method="compression"))
    return layout


def frame_of(*trials: Mapping[str, Any], saving: str = "inference") -> pd.DataFrame:
    """The same as `analysis.load` gives it, without a folder."""
    records = [
        {"trial": number, "role": "search" if number else "baseline", "status": "completed", "error": None, **trial}
        for number, trial in enumerate([dense(saving=saving), *trials])
    ]
    return to_frame(records)
