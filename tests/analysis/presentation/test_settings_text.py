"""Settings of compression in a line; no schedule is ever shown whole."""

from __future__ import annotations

from typing import Any

import pytest
from compressed import SENSITIVITIES

from analysis.presentation.settings_text import (
    compression_text,
    marks_text,
    without_files,
)

SCHEDULE = "version: 1\npruners:\n  a: {class: LevelPruner}\npolicies: []\n"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"pruning_sensitivities": SENSITIVITIES}, "s: conv1 0.5, conv2 0.25"),
        ({"pruning_sensitivities": ("a.weight=0", "b.weight=0.0")}, "s: none"),
        (
            {
                "pruning_sensitivities": ("layer1.0.conv1.weight=0.05",), "pruning_start_epoch": 2,
                "pruning_end_epoch": 9, "pruning_frequency": 3,
            },
            "s: layer1.0.conv1 0.05 epochs 2-9 every 3",
        ),
        ({"pruning_sensitivities": ("a.weight=1",), "pruning_end_epoch": 9}, "s: a 1 to epoch 9"),
        (
            {"agp_final_sparsity": 0.8, "pruning_start_epoch": 0, "pruning_end_epoch": 18, "pruning_frequency": 1,
             "agp_initial_sparsity": 0.0, "agp_weights": ("a.weight", "b.weight")},
            "agp 0.8 epochs 0-18 every 1",
        ),
        ({"agp_final_sparsity": 0.8, "agp_initial_sparsity": 0.05}, "agp 0.05 to 0.8"),
        ({"distill_temperature": 4.0, "distill_weight": 0.5, "distill_start_epoch": 0}, "T=4 w=0.5 from 0"),
        ({"distill_teacher": "resnet56"}, "T=1 w=0.5 from 0 teacher resnet56"),
        ({"schedule": SCHEDULE}, "as scheduled"),
        ({"schedule": SCHEDULE, "schedule_values": ("pruners.agp.final_sparsity=0.7",)}, "final_sparsity=0.7"),
        (
            {"schedule_values": ("p.s=1",), "pruning_sensitivities": ("a.weight=1",), "distill_weight": 0.25},
            "s=1; s: a 1; T=1 w=0.25 from 0",
        ),
        ({"epochs": 30}, ""),
    ],
)  # fmt: skip
def test_fields_in_short(values: dict[str, Any], text: str) -> None:
    assert compression_text(values) == text


def test_marks_say_as_much_of_their_paths_as_tells_them_apart() -> None:
    texts = ["pruners.one.sensitivities.conv1.weight=0.5", "pruners.two.sensitivities.conv1.weight=0.7",
             "policies.0.ending_epoch=20", "policies.1.epochs.3=4", "name without a path=5"]  # fmt: skip
    assert marks_text(texts) == (
        "one.sensitivities.conv1=0.5 two.sensitivities.conv1=0.7 ending_epoch=20 epochs.3=4 name without a path=5"
    )


def test_a_schedule_is_counted_and_never_shown() -> None:
    assert without_files({"schedule": SCHEDULE, "CAC_VAR_SAMPLES": 5}) == {
        "schedule": "YAML of 4 lines", "CAC_VAR_SAMPLES": 5,
    }  # fmt: skip
