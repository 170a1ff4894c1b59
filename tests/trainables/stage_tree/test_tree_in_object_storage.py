"""A stage tree in object storage: trials share training as on a disk, and equal the trials alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from object_storage import outage, s3, s3_environment  # noqa: F401 - fixtures
from runs import facts, finish
from tiny_workload import STEPS_PER_EPOCH, tiny  # noqa: F401 - a fixture

from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore, roots
from trainables.storage import ObjectFiles, files_of
from trainables.training.run import TrainingRun

EPOCHS = 3


def manual(step: int) -> TrialConfig:
    return TrialConfig(workload="tiny", epochs=EPOCHS, CAC_STOP_LAYER_NUM=(1,), CAC_STOP_LAYER_ITR=(step,))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_trials_share_training_through_it_and_equal_the_trials_alone(s3: str) -> None:  # noqa: F811
    sharing = Sharing(tree=f"{s3}/tree", trials=10, checkpoint_every_s=0)
    trained = []
    for step in (2 * STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH):
        trained.append(_assert_equals_alone(manual(step), sharing))
    assert trained[0] == EPOCHS * STEPS_PER_EPOCH
    assert 0 < trained[1] <= STEPS_PER_EPOCH
    assert trained[2] == 0
    (root,) = roots(sharing.tree)
    assert len(StageStore(sharing.tree, root).links()) == 3
    # What is torn is left out, and trained again.
    for file in list(files_of(sharing.tree).scan("checkpoints")):
        files_of(sharing.tree).write(file.name, [b"torn"])
    assert _assert_equals_alone(manual(2 * STEPS_PER_EPOCH + 2), sharing) == EPOCHS * STEPS_PER_EPOCH


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_storage_that_is_away_for_a_while_costs_time_and_no_result(
    s3: str,  # noqa: F811
    s3_environment: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = []
    for name in ("names", "size", "read", "write"):
        real = getattr(ObjectFiles, name)

        def counting(*arguments: Any, real: Any = real) -> Any:
            try:
                return real(*arguments)
            except OSError as error:
                failed.append(error)
                raise

        monkeypatch.setattr(ObjectFiles, name, counting)
    sharing = Sharing(tree=f"{s3}/tree", trials=10, checkpoint_every_s=0)
    _assert_equals_alone(manual(2 * STEPS_PER_EPOCH), sharing)
    config = manual(STEPS_PER_EPOCH + 1)
    with SharedRun(config, sharing) as shared:
        first = shared.train_epoch()
        away, back = threading.Event(), threading.Event()

        def be_away() -> None:
            with outage(s3_environment):
                away.set()
                back.wait(14)  # pyarrow tries each operation for 6 s

        thread = threading.Thread(target=be_away)
        thread.start()
        away.wait()
        rows = facts([first, *finish(shared)])
        back.set()
        thread.join()
    with TrainingRun(config) as alone:
        assert rows == facts(finish(alone))
    assert failed
    assert _assert_equals_alone(config, sharing) < EPOCHS * STEPS_PER_EPOCH


def _assert_equals_alone(config: TrialConfig, sharing: Sharing) -> int:
    """Rows equal, and the whole weights where it trained to the end; return the steps it trained."""
    with SharedRun(config, sharing) as shared:
        rows = facts(finish(shared))
        weights = [] if shared.run is None else [value.clone() for value in shared.run.model.state_dict().values()]
    with TrainingRun(config) as alone:
        assert rows == facts(finish(alone))
        for value, own in zip(weights, alone.model.state_dict().values(), strict=bool(weights)):
            assert torch.equal(value, own)
    return shared.trained_steps
