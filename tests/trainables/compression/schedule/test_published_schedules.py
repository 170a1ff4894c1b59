"""Distiller's own schedules, where ``DISTILLER`` names a clone of NervanaSystems/distiller that has f401db9."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.policies import model_facts
from trainables.compression.schedule import ModelFacts, Schedule, ScheduleError, read_schedule, resolve
from trainables.workloads.models import MODELS, build_model

CLONE = os.environ.get("DISTILLER")


def fits(schedule: Schedule, facts: ModelFacts) -> bool:
    try:
        resolve(schedule, facts)
    except ScheduleError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(CLONE is None, reason="DISTILLER names no clone of NervanaSystems/distiller")
@pytest.mark.filterwarnings("ignore")
def test_76_of_79_run_as_they_are(tmp_path: Path) -> None:
    """As docs/compression.md counts them."""
    archive = ["git", "-C", str(CLONE), "archive", "f401db9", ":(glob)examples/**/*.yaml"]
    made = subprocess.run(archive, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        files.extractall(tmp_path, filter="data")
    with torch.device("meta"):
        models = [model_facts(build_model(name, entry.classes)) for name, entry in MODELS.items()]
    found, refused = Counter[str](), []
    for path in sorted(tmp_path.rglob("*.yaml")):
        if "stats" in path.name:  # of activations
            continue
        try:
            schedule = read_schedule(path, check_lr=check_lr_scheduler)
        except ScheduleError as error:
            refused.append(str(error))
        else:
            after = [component.class_name for component in schedule.components()] == ["PostTrainLinearQuantizer"]
            built_in = any(fits(schedule, facts) for facts in models)
            found["trained" if after else "built in" if built_in else "own"] += 1
    assert found == {"built in": 57, "own": 16, "trained": 3}
    assert len(refused) == 3
    assert sum("policies" in message for message in refused) == 2
    assert sum("twice" in message for message in refused) == 1
