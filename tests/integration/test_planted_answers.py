"""Searches of a training whose qualities are known, from the command line to the answer, on a real Ray."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import planted_factory
import pytest
from planted_factory import LAYERS, STEPS, lost

import tune_cac

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize(
    ("first", "last", "allowed", "said"),
    [
        # Stopped layers lose nothing, fewer epochs do.
        (0.0, 0.04, 0.005, ": -2.* points; the setting is ahead of that"),
        # The first layer loses, and stopping it saves less than training all of them for fewer epochs.
        (
            0.04,
            0.0,
            0.025,
            " saves .* and is within the allowed loss, too: .* points; the setting (is behind|cannot)",
        ),
        # Nothing loses.
        (0.0, 0.0, 0.005, " saves .* and is within the allowed loss, too: .* points; the setting cannot be told from"),
    ],
)
def test_the_answer_and_what_it_says_of_simply_training_shorter_are_true(
    first: float, last: float, allowed: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(planted_factory.__file__, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = tune_cac.search(
        workload="planted_factory:make", workload_options=[f"first={first}", f"last={last}"], space="manual_layers",
        name="s", concurrency=1, seeds=4, allowed_drop=allowed,
    )  # fmt: skip
    answer = json.loads((found.folder / "study.json").read_text())["answer"]
    best = found.trials.set_index("trial").loc[answer["trial"]]
    steps, braking = [int(best["step"])] * LAYERS, max(1, int(best["CAC_BRAKING_DISTANCE"]))
    for event in json.loads(best["stop_events"]):
        steps[: event["layer"] + 1] = [min(n, event["iteration"] + braking) for n in steps[: event["layer"] + 1]]
    true = lost(steps, first, last)
    assert answer["seeds"] == 3
    assert true <= allowed + 0.001
    assert answer["low"] - 0.001 <= true <= answer["high"] + 0.001
    # Forward, gradients of weights, gradients of inputs where something below trains; the chain's input has none.
    executed = LAYERS * int(best["step"]) + sum(steps) + sum(steps[:-1])
    assert answer["saved"] == pytest.approx(1 - executed / ((3 * LAYERS - 1) * STEPS))
    assert re.search(f"Simply training \\d epochs?{said}", (found.folder / "report.md").read_text())
