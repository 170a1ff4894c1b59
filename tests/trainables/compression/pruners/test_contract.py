"""What holds for every pruner class of a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saved_states import round_trip
from torch import Tensor, nn

from trainables.compression.pruners import Pruner, build_pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError

TIMING = Timing(starting_epoch=1, ending_epoch=6)

_FILTERS: dict[str, Any] = {"weights": ["0.weight", "2.weight"], "group_type": "Filters"}
_FIXED, _GRADUAL = {"desired_sparsity": 0.4}, {"initial_sparsity": 0.2, "final_sparsity": 0.7}
#: Arguments of each class for `model_of`.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "SensitivityPruner": {"sensitivities": {"*.weight": 0.6}},
    "MagnitudeParameterPruner": {"thresholds": {"*.weight": 0.1}},
    "SparsityLevelParameterPruner": {"levels": {"*.weight": 0.6}},
    "AutomatedGradualPruner": {"weights": ["*.weight"], **_GRADUAL},
    "L1RankedStructureParameterPruner": {**_FILTERS, **_FIXED, "noise": 0.5},
    "L2RankedStructureParameterPruner": {**_FILTERS, **_FIXED, "group_type": "Channels"},
    "L1RankedStructureParameterPruner_AGP": {
        **_FILTERS,
        **_GRADUAL,
        "weights": ["2.weight"],
        "group_type": "Blocks",
        "kwargs": {"block_shape": [1, 2, 1, 1]},
    },
    "L2RankedStructureParameterPruner_AGP": {**_GRADUAL, "weights": ["5.weight"], "group_type": "Rows", "noise": 0.5},
    "RandomLevelStructureParameterPruner": {**_FILTERS, "sparsity_range": [0.1, 0.9]},
    **{
        f"{kind}{gradual}": {**_FILTERS, **(_GRADUAL if gradual else _FIXED)}
        for kind in (
            "ActivationAPoZRankedFilterPruner",
            "ActivationMeanRankedFilterPruner",
            "GradientRankedFilterPruner",
            "RandomRankedFilterPruner",
            "BernoulliFilterPruner",
        )
        for gradual in ("", "_AGP")
    },
    "StructureParameterPruner": {"reg_regims": {"0.weight": [0.1, "2D"]}, "threshold_criteria": "Mean_Abs"},
    "SplicingPruner": {
        "sensitivities": {"*": 0.5},
        "low_thresh_mult": 0.9,
        "hi_thresh_mult": 1.1,
        "sensitivity_multiplier": 0.1,
    },
    "BaiduRNNPruner": {"q": 0.2, "ramp_epoch": 3, "ramp_slope_mult": 1.5, "weights": ["5.weight"]},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(160, 7)
    )


def pruner_of(class_: str, model: nn.Module) -> Pruner:
    return build_pruner("an instance", PRUNERS[class_](**ARGUMENTS[class_]), model, seed=3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8, generator=generator)).square().sum().backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("class_", PRUNERS)
def test_masks_fit_their_weights_and_no_other_chance_is_touched(class_: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    pruner = pruner_of(class_, model)
    state = torch.get_rng_state()
    pruner.start(model)
    train(model, optimizer, 0)
    weights = weights_of(model)
    kept = {name: weight.clone() for name, weight in weights.items()}
    masks = pruner.masks(weights, {}, Moment(epoch=1, timing=TIMING))
    pruner.stop()
    assert set(masks) == set(pruner.targets)
    for name, mask in masks.items():
        assert mask.shape == weights[name].shape
        assert mask.dtype == weights[name].dtype
        assert not mask.requires_grad
        assert torch.equal(weights[name], kept[name])
    assert any(bool((mask == 0).any()) for mask in masks.values())
    assert any(bool((mask != 0).any()) for mask in masks.values())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("class_", PRUNERS)
def test_a_resumed_run_decides_the_same_bit_for_bit(class_: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    pruner = pruner_of(class_, model)
    pruner.start(model)
    train(model, optimizer, 0)
    current = pruner.masks(weights_of(model), {}, Moment(epoch=1, timing=TIMING))
    # What is seen before the state is saved counts in the second decision.
    train(model, optimizer, 1)
    saved = round_trip({"p": pruner.state_dict(), "m": model.state_dict(), "o": optimizer.state_dict()})

    other = model_of()
    second = torch.optim.SGD(other.parameters(), lr=1e-4, momentum=0.9)
    resumed = pruner_of(class_, other)
    other.load_state_dict(saved["m"])
    second.load_state_dict(saved["o"])
    resumed.load_state_dict(saved["p"])
    resumed.start(other)
    decisions = []
    for m, o, p in ((model, optimizer, pruner), (other, second, resumed)):
        train(m, o, 2)
        decisions.append(p.masks(weights_of(m), current, Moment(epoch=2, timing=TIMING)))
    assert decisions[0].keys() == decisions[1].keys() == set(pruner.targets)
    for name, mask in decisions[0].items():
        assert torch.equal(mask, decisions[1][name])


def test_a_name_that_matches_nothing_is_told() -> None:
    for class_, given in (("SensitivityPruner", {"sensitivities": {"0.wieght": 1}}),
                          ("AutomatedGradualPruner", {**_GRADUAL, "weights": ["0.wieght"]})):  # fmt: skip
        with pytest.raises(UserError, match=r"^unknown parameter '0\.wieght': did you mean '0\.weight'\? Valid: 0\.b"):
            build_pruner("p", PRUNERS[class_](**given), model_of(), seed=0)
