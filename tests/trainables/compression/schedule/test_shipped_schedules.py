"""The schedules that ship as examples: each is right, for the model that it names; together they use every class."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.schedule import dump, epoch_table, read_schedule, resolve, to_mapping
from trainables.compression.schedule.reading import CLASSES
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
    for component in [*schedule.pruners.values(), *schedule.regularizers.values()]:
        assert set(resolved.of(component)) <= set(facts.parameters)
        assert resolved.of(component)
    rows = epoch_table(schedule, 30, resolved)  # the workloads' epochs
    acting = {(act.kind, act.name) for row in rows for act in row.acts}
    assert acting == {(policy.kind, policy.instance_name) for policy in schedule.policies}
    assert read_schedule(dump(to_mapping(schedule))) == schedule


def test_every_class_is_in_some_schedule() -> None:
    used = {(c.section, c.class_name) for path in FILES for c in read_schedule(path).components()}
    models = {(section, CLASSES[section][name]) for section, name in used if section in CLASSES}
    assert models == {(section, model) for section, classes in CLASSES.items() for model in classes.values()}
    assert {name for section, name in used if section == "lr_schedulers"} >= {
        "StepLR", "ExponentialLR", "MultiStepLR", "MultiStepMultiGammaLR", "PolynomialLR", "ReduceLROnPlateau",
    }  # fmt: skip


def test_alexnet_ends_with_the_published_share() -> None:
    path = FOLDER / "alexnet_agp.yaml"
    facts, _ = facts_of_workload(*workload_of(path))
    schedule = read_schedule(path)
    total = epoch_table(schedule, 90, resolve(schedule, facts))[-1].total
    assert total is not None
    assert round((1 - total) * 61_090_496) == 7_144_049
    assert f"{100 * total:.5f}" == "88.30579"
