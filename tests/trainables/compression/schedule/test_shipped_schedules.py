"""The schedules that ship as examples: each is right, for the model that it names; together they use every class."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.schedule import dump, read_schedule, resolve, to_mapping
from trainables.compression.schedule.configs import CLASSES
from trainables.compression.schedule.parts import epoch_table, planned_share
from tune_cac.cli.schedule import facts_of_workload

FOLDER = Path(__file__).parents[4] / "docs" / "schedules"
FILES = sorted(FOLDER.glob("*.yaml"))


def workload_of(path: Path) -> tuple[str, list[str]]:
    """Name and options of the workload in a schedule's second line: ``# workload: images --option model=resnet20``."""
    said, model = path.read_text(encoding="utf-8").splitlines()[:2]
    assert said.startswith("# ")
    assert model.startswith("# workload: ")
    name, *options = model.removeprefix("# workload: ").split(" --option ")
    return name, options


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schedule_fits_its_model(path: Path) -> None:
    schedule = read_schedule(path, check_lr=check_lr_scheduler)
    facts, _ = facts_of_workload(*workload_of(path))
    resolved = resolve(schedule, facts)
    for component in [*schedule.sections["pruners"].values(), *schedule.sections["regularizers"].values()]:
        assert set(resolved.of(component)) <= set(facts.parameters)
        assert resolved.of(component)
    table = str(epoch_table(resolved.schedule, 30))  # the workloads' epochs
    assert all(policy.instance_name in table for policy in schedule.policies)
    assert read_schedule(dump(to_mapping(schedule))) == schedule


def test_every_class_is_in_some_schedule() -> None:
    used = {(c.section, c.class_name) for path in FILES for c in read_schedule(path).components()}
    models = {(section, CLASSES[section][name]) for section, name in used if section in CLASSES}
    every = {(section, name) for section, classes in CLASSES.items() for name in classes}
    for_ncf = {("quantizers", "NCFQuantAwareTrainQuantizer")}  # no model of ours is one of its kind
    assert models == {(section, CLASSES[section][name]) for section, name in every - for_ncf}
    assert {name for section, name in used if section == "lr_schedulers"} >= {
        "StepLR", "ExponentialLR", "MultiStepLR", "MultiStepMultiGammaLR", "PolynomialLR", "ReduceLROnPlateau",
    }  # fmt: skip


def test_alexnet_ends_with_the_published_share() -> None:
    path = FOLDER / "alexnet_agp.yaml"
    facts, _ = facts_of_workload(*workload_of(path))
    schedule = read_schedule(path)
    resolved, pruned = resolve(schedule, facts), 0
    for policy in schedule.policies:
        if policy.kind == "pruner":
            component = schedule.component(policy)
            share = planned_share(component, policy, policy.timing.last_epoch)
            assert share is not None
            pruned += sum(int(share[1] * math.prod(facts.parameters[name])) for name in resolved.of(component))
    assert 61_090_496 - pruned == 7_144_049
    assert f"{100 * pruned / 61_090_496:.5f}" == "88.30579"
