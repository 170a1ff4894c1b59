"""The schedule that a configuration's fields mean, and what they cannot mean."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from compression_schedules import SCHEDULES, text

from trainables.compression.schedule import read_schedule
from trainables.compression.trial.from_config import filled_schedule, pruning_epochs, schedule_of
from trainables.config import TrialConfig
from trainables.errors import UserError

MARKED = """
version: 1
pruners:
  p: {class: SparsityLevelParameterPruner, levels: {conv1.weight: !search {low: 0.1, high: 0.9, name: level}}}
lr_schedulers:
  l: {class: StepLR, step_size: !search {low: 2, high: 8}, gamma: !search {choices: [0.1, 1.0, 0.25]}}
policies:
- {pruner: {instance_name: p}, epochs: [!search {low: 0, high: 6, step: 2}]}
- {lr_scheduler: {instance_name: l}, starting_epoch: 0, ending_epoch: 9}
"""


def config(epochs: int = 10, **values: Any) -> TrialConfig:
    return TrialConfig(epochs=epochs, method="compression", **values)


def test_sensitivities() -> None:
    found = schedule_of(config(pruning_sensitivities=("conv1.weight=0.5", "a=b.weight=1", "conv2.weight=0")))
    assert found == {
        "version": 1,
        "pruners": {
            "sensitivity_pruner": {
                "class": "SensitivityPruner",
                "sensitivities": {"conv1.weight": 0.5, "a=b.weight": 1.0},  # of names with an = the last one counts
            }
        },
        "policies": [
            {"pruner": {"instance_name": "sensitivity_pruner"}, "starting_epoch": 2, "ending_epoch": 6, "frequency": 1}
        ],
    }


def test_gradual_pruning() -> None:
    found = schedule_of(
        config(
            agp_weights=("conv1.weight", "classifier.weight"), agp_initial_sparsity=0.05, agp_final_sparsity=0.8,
            pruning_start_epoch=1, pruning_end_epoch=9, pruning_frequency=3,
        )
    )  # fmt: skip
    assert found == {
        "version": 1,
        "pruners": {
            "gradual_pruner": {
                "class": "AutomatedGradualPruner", "initial_sparsity": 0.05, "final_sparsity": 0.8,
                "weights": ["conv1.weight", "classifier.weight"],
            }
        },
        "policies": [
            {"pruner": {"instance_name": "gradual_pruner"}, "starting_epoch": 1, "ending_epoch": 9, "frequency": 3}
        ],
    }  # fmt: skip
    # An initial share that is none below the final one: nothing rises.
    assert schedule_of(config(agp_weights=("a",), agp_initial_sparsity=0.9, agp_final_sparsity=0.5))["policies"] == []


def test_distillation() -> None:
    found = schedule_of(
        config(
            distill_teacher="resnet56", distill_checkpoint="t.pt", distill_temperature=4.0, distill_weight=0.3,
            distill_start_epoch=2,
        )
    )  # fmt: skip
    assert found == {
        "version": 1,
        "distillers": {
            "distiller": {
                "class": "KnowledgeDistillation", "temperature": 4.0, "distill_weight": 0.3, "student_weight": 0.7,
                "teacher": "resnet56", "checkpoint": "t.pt",
            }
        },
        "policies": [
            {"distiller": {"instance_name": "distiller"}, "starting_epoch": 2, "ending_epoch": 10, "frequency": 1}
        ],
    }  # fmt: skip


def test_all_of_them_add_up_behind_a_schedule() -> None:
    found = schedule_of(
        config(
            schedule=text(SCHEDULES["agp"]), pruning_sensitivities=("conv1.weight=0.5",), agp_weights=("conv2.weight",),
            agp_final_sparsity=0.5, distill_teacher="resnet20",
        )
    )  # fmt: skip
    assert [next(iter(policy.values()))["instance_name"] for policy in found["policies"]] == [
        "p", "sensitivity_pruner", "gradual_pruner", "distiller",
    ]  # fmt: skip
    assert set(found["pruners"]) == {"p", "sensitivity_pruner", "gradual_pruner"}
    assert len(read_schedule(found).policies) == 4


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 7, 30, 90])
def test_pruning_takes_place_from_a_fifth_to_three_fifths_of_the_run(epochs: int) -> None:
    start, end = pruning_epochs(config(epochs))
    assert 0 <= start < end <= max(epochs, 1)
    assert abs(start - 0.2 * epochs) < 1
    assert abs(end - 0.6 * epochs) <= 1
    assert pruning_epochs(config(epochs, pruning_sensitivities=("a=1",), pruning_end_epoch=1)) == (0, 1)
    assert pruning_epochs(config(epochs, pruning_sensitivities=("a=1",), pruning_start_epoch=40))[0] == 40


# --- marks ----------------------------------------------------------------------------------------------------------


def test_marks_take_values_and_what_has_none_its_middle() -> None:
    found = filled_schedule(MARKED, ("level=0.7", "lr_schedulers.l.gamma=1.0"))
    assert found["pruners"]["p"]["levels"] == {"conv1.weight": 0.7}
    assert found["lr_schedulers"]["l"] == {"class": "StepLR", "step_size": 5, "gamma": 1.0}
    assert found["policies"][0]["epochs"] == [2]
    assert isinstance(found["lr_schedulers"]["l"]["step_size"], int)
    found = filled_schedule(MARKED, ("lr_schedulers.l.step_size=8", "policies.0.epochs.0=6"))
    assert (found["lr_schedulers"]["l"]["step_size"], found["policies"][0]["epochs"]) == (8, [6])
    # A schedule without marks is itself.
    plain = SCHEDULES["learning rates"]
    assert filled_schedule(text(plain), ()) == yaml.safe_load(text(plain))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agp_final_sparsity": 0.8}, "agp_final_sparsity needs agp_weights, the parameters to prune, got none"),
        (
            {"agp_weights": ("a",), "agp_final_sparsity": 0.8, "pruning_start_epoch": 2, "pruning_end_epoch": 4,
             "pruning_frequency": 2},
            "needs two active epochs: .* got 2 to 4 with frequency 2",
        ),
        (
            {"pruning_sensitivities": ("a=1",), "pruning_start_epoch": 4, "pruning_end_epoch": 4},
            r"pruning_end_epoch must be above pruning_start_epoch 4 \(the end is exclusive\), got 4",
        ),
        (
            {"pruning_sensitivities": ("b=1", "a=1"), "agp_weights": ("a",), "agp_final_sparsity": 0.5},
            "a is pruned by pruning_sensitivities and by agp_weights in the same epochs",
        ),
        ({"pruning_frequency": 2}, "frequency has no effect without pruning_sensitivities or agp_final_sparsity"),
        (
            {"schedule": text({**SCHEDULES["agp"], "pruners": {"sensitivity_pruner": {"class": "X"}}}),
             "pruning_sensitivities": ("a=1",)},
            r"the schedule has pruners\.sensitivity_pruner already: rename it",
        ),
    ],
)  # fmt: skip
def test_fields_that_mean_nothing_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule_of(config(**values))
