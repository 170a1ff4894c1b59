"""The default workload is real, split once, and a trade-off."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
import torch
from runs import finish

from trainables.config import TrialConfig
from trainables.gradients import BinaryActivation
from trainables.training.run import TrainingRun
from trainables.workloads import build
from trainables.workloads.digits import Digits, digit_splits


def test_three_disjoint_thirds_of_all_images() -> None:
    from sklearn.datasets import load_digits

    splits = digit_splits()
    assert {name: len(labels) for name, (_, labels) in splits.items()} == {"train": 599, "validation": 599, "test": 599}
    # Every image of scikit-learn's is in exactly one split: compare what enlarging keeps, the sorted means.
    assert sum(len(images) for images, _ in splits.values()) == 1797
    labels = torch.cat([labels for _, labels in splits.values()])
    assert torch.equal(torch.bincount(labels), torch.bincount(torch.tensor(load_digits().target)))
    flat = torch.cat([images.flatten(1) for images, _ in splits.values()])
    assert len(torch.unique(flat, dim=0)) == len(np.unique(load_digits().data, axis=0))
    assert 1 / 599 < 0.002  # accuracy resolves 0.2 points


def test_the_order_is_drawn_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainables.workloads import seeded_loader

    seeded_loader.shuffled_batches.cache_clear()
    draws = []
    monkeypatch.setattr(seeded_loader, "epoch_seed", lambda epoch, seed: draws.append(epoch) or epoch)
    for epoch in range(3):
        assert len(list(Digits().train_batches(epoch, 0))) == Digits().steps_per_epoch
    seeded_loader.shuffled_batches.cache_clear()
    assert draws == [0, 1, 2]


def test_six_convolutions_with_batch_norm() -> None:
    model = Digits().make_model()
    kinds = [type(module).__name__ for module in model.children()]
    assert kinds.count("Conv2d") == kinds.count("BatchNorm2d") == 6
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "conv1.weight"
    assert len(names) == 20


def accuracies(seed: int, **variables: object) -> tuple[float, float]:
    config = TrialConfig(seed=seed, **variables)  # type: ignore[arg-type]
    with TrainingRun(config) as run:
        row = finish(run)[-1]
    return row["quality"], row["test_quality"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_baseline_is_good_and_reckless_settings_lose_two_points() -> None:
    """Reckless: every convolution stopped in the first twentieth of the run (15 of 300 steps)."""
    seeds = (0, 1, 2)
    baseline = [accuracies(seed, method="none") for seed in seeds]
    reckless = [accuracies(seed, CAC_STOP_LAYER_NUM=(17,), CAC_STOP_LAYER_ITR=(14,)) for seed in seeds]
    assert all(validation >= 0.96 and test >= 0.96 for validation, test in baseline)
    for good, bad in zip(baseline, reckless, strict=True):
        assert good[0] - bad[0] >= 0.02
    assert mean(b[1] for b in baseline) - mean(r[1] for r in reckless) >= 0.02


def test_the_data_is_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    from trainables.workloads import digits

    theirs = load_digits()
    for _ in range(2):
        images, labels = digits.read_digits()
        assert np.array_equal(images, theirs.images)
        assert np.array_equal(labels, theirs.target)
        monkeypatch.setattr(digits, "_DATA_FILE", ("nowhere",))  # then scikit-learn itself is asked


def test_binary_activations_stand_in_the_relus_place_and_change_nothing_else() -> None:
    torch.manual_seed(0)
    plain = Digits().make_model()
    torch.manual_seed(0)
    binary = build("digits", ("activations=binary",)).make_model()
    kinds = [(type(a), type(b)) for a, b in zip(plain, binary, strict=True) if type(a) is not type(b)]
    assert kinds == [(torch.nn.ReLU, BinaryActivation)] * 6
    assert plain.state_dict().keys() == binary.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), binary.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_network_of_binary_activations_learns() -> None:
    with TrainingRun(TrialConfig(workload_options=("activations=binary",), method="none", epochs=4)) as run:
        rows = [run.train_epoch() for _ in range(4)]
    assert rows[-1]["quality"] > 0.5
