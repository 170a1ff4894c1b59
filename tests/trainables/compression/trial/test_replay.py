"""When a schedule first acts, and what trials share because of it, to the step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_schedules import EPOCHS, SCHEDULES, ranked, sections, span, text
from runs import NOT_THE_RUNS, finish, without
from tiny_workload import STEPS_PER_EPOCH, Tiny, tiny  # noqa: F401 - a fixture

from trainables.compression.pruners import CLASSES
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Timing
from trainables.compression.trial.replay import interventions_of, looks_from
from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

CLOCKS = NOT_THE_RUNS | {"latency_s"}
TOTAL = EPOCHS * STEPS_PER_EPOCH
#: Only checkpoints at forks are asked for in these tests, and there always is one.
OFTEN = 10**9


def config_of(schedule: dict[str, Any] | str, **more: Any) -> TrialConfig:
    given = schedule if isinstance(schedule, str) else text(schedule)
    return TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", schedule=given, **more)


def assert_equals_alone(config: TrialConfig, sharing: Sharing) -> SharedRun:
    with TrainingRun(config) as run:
        rows = without(finish(run), CLOCKS)
        trained = {name: value.clone() for name, value in run.model.state_dict().items()}
    with SharedRun(config, sharing) as trial:
        assert without(finish(trial), CLOCKS) == rows
        if trial.run is not None:
            shared = trial.run.model.state_dict()
            assert list(shared) == list(trained)
            assert all(torch.equal(value, trained[name]) for name, value in shared.items())
    return trial


# --- when -----------------------------------------------------------------------------------------------------------


def test_only_rankings_by_what_is_seen_look_before_they_act() -> None:
    timing = Timing(starting_epoch=5, ending_epoch=9)
    for name in PRUNERS:
        before = CLASSES[name.removesuffix("_AGP")].epochs_before
        assert looks_from("pruner", name, timing) == 5 - before, name
        assert looks_from("pruner", name, Timing(starting_epoch=0, ending_epoch=2)) == 0


def test_the_interventions_of_a_schedule() -> None:
    schedule = sections(
        [
            span("pruner", "s", 2, 4),
            span("pruner", "a", 3, 4),
            span("pruner", "s", 9, 10),
            {"lr_scheduler": {"instance_name": "l"}, "epochs": [1, 3]},
        ],
        pruners={"s": {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}},
                 "a": ranked("ActivationAPoZRankedFilterPruner")},
        lr_schedulers={"l": {"class": "ExponentialLR", "gamma": 0.5}},
    )  # fmt: skip
    found = interventions_of(schedule, steps_per_epoch=8, epochs=9)
    # Learning rates: the workload's own are off from the start, and the schedule's act from epoch 1 on. The ranking by
    # activations looks from epoch 2 on, as the other pruner acts then. What begins with epoch 9 never comes.
    assert [act.iteration for act in found] == [0, 8, 16]
    actions = [json.loads(act.action)["compression"] for act in found]
    assert actions[0] == ["the schedule's learning rates"]
    assert [[part["place"] for part in action] for action in actions[1:]] == [[3], [0, 1]]
    assert interventions_of(schedule, steps_per_epoch=8, epochs=1)[0].iteration == 0
    assert [act.iteration for act in interventions_of(schedule, steps_per_epoch=8, epochs=10)] == [0, 8, 16, 72]


def test_an_action_is_all_that_the_training_after_it_depends_on() -> None:
    def action(schedule: dict[str, Any]) -> str:
        (act,) = interventions_of(schedule, steps_per_epoch=8, epochs=4)
        return act.action

    base = SCHEDULES["agp"]
    seen = {action(base)}
    for path, value in (
        (("pruners", "p", "final_sparsity"), 0.7),
        (("pruners", "p", "weights"), ["0.weight"]),
        (("policies", 0, "ending_epoch"), 3),
        (("policies", 0, "frequency"), 2),
        (("policies", 0, "pruner"), {"instance_name": "p", "args": {"keep_mask": True}}),
    ):
        other = copy.deepcopy(base)
        place: Any = other
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        seen.add(action(other))
    assert len(seen) == 6
    # A pruner's chance is seeded by its name.
    chance = sections([span("pruner", "p", 1, 4)], pruners={"p": ranked("RandomRankedFilterPruner")})
    renamed = sections([span("pruner", "q", 1, 4)], pruners={"q": ranked("RandomRankedFilterPruner")})
    assert action(chance) != action(renamed)
    # What nobody uses does not matter.
    unused = {**base, "pruners": {**base["pruners"], "z": SCHEDULES["sensitivity"]["pruners"]["p"]}}
    assert action(unused) == action(base)


# --- what is shared -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("epoch", [2, 1, 3])
def test_trials_that_prune_from_an_epoch_on_share_the_epochs_before(epoch: int, tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=OFTEN)
    plain = TrialConfig(workload="tiny", epochs=EPOCHS, method="none")
    assert assert_equals_alone(plain, sharing).trained_steps == TOTAL

    def pruned(share: float) -> TrialConfig:
        pruner = {"class": "SparsityLevelParameterPruner", "levels": {"*.weight": share}}
        return config_of(sections([span("pruner", "p", epoch, EPOCHS)], pruners={"p": pruner}))

    root = assert_equals_alone(plain, sharing)
    kept = [entry.step for entry in root.checkpoints.entries(root.store.root)]
    nearest = max((step for step in kept if step <= epoch * STEPS_PER_EPOCH), default=0)
    # The first one trains from the checkpoint before, and leaves one where it acts: for all others exactly there.
    assert assert_equals_alone(pruned(0.5), sharing).trained_steps == TOTAL - nearest
    for share in (0.3, 0.7):
        assert assert_equals_alone(pruned(share), sharing).trained_steps == TOTAL - epoch * STEPS_PER_EPOCH
    again = assert_equals_alone(pruned(0.3), sharing)
    assert (again.trained_steps, again.search_flops, again.run) == (0, 0, None)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "never",
    [
        {"schedule": text(sections([span("pruner", "p", 4, 9)], pruners=SCHEDULES["agp"]["pruners"]))},
        {"pruning_sensitivities": ("0.weight=0",)},
        {"agp_weights": ("0.weight",), "agp_initial_sparsity": 0.3, "agp_final_sparsity": 0.3},
        {"distill_weight": 0.0},
        {},
    ],
)
def test_what_never_acts_is_the_baselines_run(never: dict[str, Any], tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree")
    with SharedRun(TrialConfig(workload="tiny", epochs=EPOCHS, method="none"), sharing) as baseline:
        rows = without(finish(baseline), CLOCKS)
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", **never)
    with SharedRun(config, sharing) as trial:
        assert without(finish(trial), CLOCKS) == rows
    assert (trial.trained_steps, trial.row["stage"]) == (0, baseline.row["stage"])  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_teacher_with_other_weights_in_the_same_file_is_another_teacher(tmp_path: Path) -> None:
    file = tmp_path / "teacher.pt"
    schedule = sections(
        [span("distiller", "d", 1, 4)],
        distillers={"d": {"class": "KnowledgeDistillation", "checkpoint": str(file), "distill_weight": 0.9}},
    )
    sharing = Sharing(tree=tmp_path / "tree", trials=OFTEN)
    stages = []
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        torch.save(Tiny().make_model().state_dict(), file)
        trial = assert_equals_alone(config_of(schedule), sharing)
        assert trial.row is not None
        stages.append(trial.row["stage"])
    assert stages[0] != stages[1] == stages[2]
