"""Components built by calls, and classes of the user's own, beside the same schedule in YAML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tune_cac as cac
from trainables.compression.schedule import ScheduleError
from trainables.errors import UserError

#: A pruner, a regularizer and a quantizer of the user's.
OWN = """
import torch
from trainables.compression.pruners import Pruner
from trainables.compression.quantizers import Quantizer
from trainables.compression.regularizers import Regularizer

class EveryNth(Pruner):
    def mask(self, name, weight, current, moment):
        mask = torch.ones_like(weight)
        mask.view(-1)[:: self.settings.n] = 0
        return mask

class Tenth(Regularizer):
    def __init__(self, settings, model):
        super().__init__(lambda weight, strength: [strength * weight.abs().sum()], settings.strengths)

class Plain(Quantizer):
    pass

def function():
    pass
"""


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(scheduler: cac.compression.CompressionScheduler) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for epoch in range(3):
        batches = [torch.randn(5, 6, generator=generator) for _ in range(4)]
        for x in scheduler.batches(epoch, batches):
            loss = scheduler.loss(scheduler.model(x).square().mean())
            assert scheduler.training.optimizer is not None
            scheduler.training.optimizer.zero_grad()
            loss.backward()
            scheduler.training.optimizer.step()
    return scheduler.model.state_dict()


@pytest.mark.parametrize(
    ("section", "name", "arguments"),
    [
        ("pruner", "SensitivityPruner", {"sensitivities": {"0.weight": 0.5}}),
        ("pruner", "SparsityLevelParameterPruner", {"levels": {"2.weight": 0.5}}),
        ("regularizer", "L1Regularizer", {"reg_regims": {"*.weight": 0.1}}),
        ("quantizer", "WRPNQuantizer", {"bits_weights": 4, "bits_activations": 4}),
    ],
)
def test_a_call_is_the_component_of_a_schedule(section: str, name: str, arguments: Any) -> None:
    schedule = {
        "version": 1,
        f"{section}s": {name: {"class": name, **arguments}},
        "policies": [{section: {"instance_name": name}, "epochs": [0, 2]}],
    }
    model, other = model_of(), model_of()
    expected = trained(
        cac.compression.CompressionScheduler(model, schedule, torch.optim.SGD(model.parameters(), lr=0.1))
    )
    scheduler = cac.compression.CompressionScheduler(other, torch.optim.SGD(other.parameters(), lr=0.1))
    scheduler.add_policy(getattr(cac.compression, name)(other, **arguments), epochs=[0, 2])
    found = trained(scheduler)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert not all(torch.equal(value, model_of().state_dict().get(key, value)) for key, value in found.items())


def test_wrong_arguments_and_names() -> None:
    with pytest.raises(ScheduleError, match=r"unknown argument of SensitivityPruner, did you mean 'sensitivities'"):
        cac.compression.SensitivityPruner(model_of(), sensitivites={"0.weight": 0.5})
    with pytest.raises(AttributeError, match="no attribute 'SensitivityPruners'"):
        cac.compression.SensitivityPruners  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: cac.compression.CompressionScheduler({}, model),
            r"first argument must be the model, got dict: CompressionScheduler\(model, schedule, optimizer\)",
        ),
        (
            lambda model: cac.compression.CompressionScheduler("prune.yaml", model),
            r"must be the model, got str: CompressionScheduler\(",
        ),
        (
            lambda model: cac.compression.CompressionScheduler(model, model),
            "a schedule must be a file's name, YAML or a map, got Linear",
        ),
        (
            lambda model: cac.compression.DorefaQuantizer({}, bits_weights=4),
            r"must be the model, got dict: DorefaQuantizer\(model, \.\.\.\)",
        ),
        (
            lambda model: cac.compression.sensitivity_analysis(len, model),
            r"got builtin_function_or_method: sensitivity_analysis\(model, evaluate\)",
        ),
        (
            lambda model: cac.export_model((torch.ones(1, 6),), model, "model.pt2"),
            r"got tuple: export_model\(model, \(inputs,\), file\)",
        ),
    ],
)
def test_a_model_in_another_place_is_told_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        call(nn.Linear(6, 2))
    assert "\n" not in str(raised.value)


def test_optimizer_and_schedule_are_taken_in_either_order() -> None:
    """The optimizer may take the schedule's place; a schedule behind it is not lost."""
    model = model_of()
    schedule = {
        "version": 1,
        "pruners": {"p": {"class": "SparsityLevelParameterPruner", "levels": {"0.weight": 0.5}}},
        "policies": [{"pruner": {"instance_name": "p"}, "epochs": [0]}],
    }
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = cac.compression.CompressionScheduler(model, optimizer, schedule)  # type: ignore[arg-type]
    assert scheduler.training.optimizer is optimizer
    assert len(scheduler.policies) == 1


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.usefixtures("own")
def test_classes_of_the_users_own() -> None:
    schedule = {
        "version": 1,
        "pruners": {"every": {"class": "mine:EveryNth", "weights": ["0.weight"], "n": 3, "group_type": "thirds"}},
        "regularizers": {"tenth": {"class": "mine:Tenth", "strengths": {"2.weight": 0.1}}},
        "quantizers": {"plain": {"class": "mine:Plain", "bits_weights": 4, "overrides": {"2": {"bits_weights": None}}}},
        "policies": [
            {"pruner": {"instance_name": "every"}, "epochs": [0]},
            {"regularizer": {"instance_name": "tenth"}, "epochs": [0]},
            {"quantizer": {"instance_name": "plain"}, "epochs": [1]},
        ],
    }
    model = model_of()
    scheduler = cac.compression.CompressionScheduler(model, schedule, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = scheduler.batches(0, [torch.randn(5, 6)])
    batch = next(batches)
    assert scheduler.loss(torch.zeros(())).item() == pytest.approx(0.1 * model[2].weight.abs().sum().item())
    assert batch.shape == (5, 6)
    scheduler.apply_masks()
    assert int((model[0].weight == 0).sum()) == 16
    assert torch.equal(torch.nonzero(model[0].weight.flatten() == 0).flatten(), torch.arange(0, 48, 3))
    list(batches)
    next(scheduler.batches(1, [torch.randn(5, 6)]))
    assert len(model[0].weight.unique()) <= 2**4 < len(model[2].weight.unique())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:Every", r"name in mine 'Every'.*EveryNth"),
        ("mine:function", r"must be a subclass of trainables\.compression\.pruners\.Pruner"),
        ("absent:Every", "there is no module absent"),
        ("mine:EveryNth", "mine:EveryNth needs weights, the parameters that it prunes"),
    ],
)
def test_what_is_no_class_of_the_kind(name: str, message: str) -> None:
    weights = {} if name == "mine:EveryNth" else {"weights": "0.weight"}  # a single name is a list of one
    schedule = {
        "version": 1,
        "pruners": {"p": {"class": name, **weights}},
        "policies": [{"pruner": {"instance_name": "p"}, "epochs": [0]}],
    }
    with pytest.raises(UserError, match=message):
        cac.compression.CompressionScheduler(model_of(), schedule)
