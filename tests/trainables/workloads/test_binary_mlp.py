"""The binary network: its shape, its teacher and data, and that pretraining is done once and disturbs nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainables.config import TrialConfig
from trainables.gradients import BinaryActivation
from trainables.training.run import TrainingRun
from trainables.workloads import binary_mlp, build
from trainables.workloads.binary_mlp import BinaryMLP, teacher


def seeded(seed: int, workload: BinaryMLP) -> nn.Module:
    torch.manual_seed(seed)
    return workload.make_model()


def test_three_layers_of_32_with_float_weights_and_binary_activations() -> None:
    model = BinaryMLP().make_model()
    shapes = [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]
    assert shapes == [(32, 32)] * 3
    assert [type(m) for m in model][1::2] == [BinaryActivation] * 2
    (inputs, targets), *_ = BinaryMLP().train_batches(0, 0)
    assert set(model[:2](inputs).unique().tolist()) == {-1.0, 1.0}
    assert inputs.shape == targets.shape == (1024, 32)


def test_inputs_are_normal_and_targets_the_teachers() -> None:
    inputs = torch.cat([part for part, _ in BinaryMLP().train_batches(0, 0)])
    count = inputs.numel()
    assert abs(float(inputs.mean())) < 5 / count**0.5
    assert abs(float(inputs.var()) - 1) < 5 * (2 / count) ** 0.5
    first, second, third = copy.deepcopy(teacher()).double()[::2]
    for sample, target in BinaryMLP(batch_size=8, steps_per_epoch=1).train_batches(3, 4):
        hidden = (sample.double() @ first.weight.T + first.bias >= 0).double() * 2 - 1
        hidden = (hidden @ second.weight.T + second.bias >= 0).double() * 2 - 1
        expected = hidden @ third.weight.T + third.bias
        torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-5)


def test_splits_differ() -> None:
    workload = BinaryMLP(batch_size=4, steps_per_epoch=2)
    validation, test = (next(iter(workload.evaluation_batches(split)))[0] for split in ("validation", "test"))
    assert not torch.equal(validation, test)


def test_the_quality_is_the_mean_squared_error_and_no_seed_begins_as_the_teacher() -> None:
    workload = build("binary_mlp")
    assert (workload.quality.name, workload.quality.direction) == ("mse", "min")
    for seed in range(3):
        model = seeded(seed, workload)
        with torch.no_grad():
            errors = [F.mse_loss(model(x), y) for x, y in workload.evaluation_batches("validation")]
            assert workload.evaluate(model, "validation", "cpu") == pytest.approx(float(torch.stack(errors).mean()))
        assert min(errors) > 0.1


def test_pretraining_is_done_once_for_equal_weights_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_mlp, "PRETRAINING_STEPS", 3)
    monkeypatch.setattr(binary_mlp, "PRETRAINING_BATCH_SIZE", 64)
    monkeypatch.setattr(binary_mlp, "_pretrained", type(binary_mlp._pretrained)())
    workload = build("binary_mlp", ("pretrained=yes",))
    first, first_state = seeded(5, workload), torch.get_rng_state()
    drawn = []
    monkeypatch.setattr(binary_mlp, "draw", lambda *_: drawn.append(1))
    again, again_state = seeded(5, workload), torch.get_rng_state()
    assert drawn == []
    raw = seeded(5, BinaryMLP())
    assert torch.equal(first_state, again_state)
    assert torch.equal(first_state, torch.get_rng_state())  # what comes after is drawn as without pretraining
    for one, other, start in zip(first.parameters(), again.parameters(), raw.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, start)
        assert one.grad is None
    monkeypatch.undo()


@pytest.mark.slow
def test_training_lowers_the_error() -> None:
    config = TrialConfig(workload="binary_mlp", method="none", epochs=15)
    with TrainingRun(config) as run:
        rows = [run.train_epoch() for _ in range(15)]
    assert rows[-1]["quality"] < 0.75 * rows[0]["quality"]
    assert rows[-1]["test_quality"] == pytest.approx(rows[-1]["quality"], rel=0.1)
