"""The file in which a script's run without a method leaves what replay needs of it. Without torch.

Shapes: T steps of the optimizer, K signals.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Variables of scripts that a search runs: the trial's folder, and the metric by which the search compares.
TRIAL_FOLDER, METRIC_VARIABLE = "TUNE_CAC_TRIAL_DIR", "TUNE_CAC_METRIC"
#: The file, in that folder.
TRACE_FILE = "trace.npz"
#: Variable that asks a script for it: the ``CAC_WATCH`` of the study's trials, or `DEFAULT_WATCH`.
TRACE_VARIABLE = "TUNE_CAC_TRACE"
DEFAULT_WATCH = "default"


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Facts about a script's model and the costs of its steps."""

    signals: Sequence[str]  # (K,) names of the signals (`replay.variance_name`)
    layer_names: Sequence[str]  # names of the parameters by number
    trains: str  # text with ``1`` or ``0`` for each parameter by number: whether it trains at the start
    weight_decays: Sequence[float] | None  # as of `nothing_stops.weight_decays`
    blueprints: Sequence[tuple[Any, Any]]
    """(`replay.layers_key`, `Blueprint.to_dict`) of the variance rule and of the others."""
    forward_flops: int  # of one step
    backward_flops: dict[str, int]  # of one step by the set of training parameters, in the form of ``trains``


def to_bytes(facts: ScriptFacts, values: NDArray[np.float32]) -> bytes:
    """Return the file's content; ``values`` are the (T, K) signals at the beginning of every step."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, values=values, facts=np.array(json.dumps(asdict(facts))))
    return buffer.getvalue()


def from_bytes(content: bytes) -> tuple[ScriptFacts, NDArray[np.float32]]:
    """Return facts and (T, K) signals; another file raises any exception, and no pickle is loaded."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        values = found["values"]
        return ScriptFacts(**json.loads(str(found["facts"]))), values
