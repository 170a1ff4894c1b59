"""Which bits each module gets: defaults, overrides, names, and what a user can get wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from trainables.compression.quantizers import Bits, build_quantizer, plan_bits
from trainables.compression.schedule.configs import DorefaQuantizerConfig
from trainables.compression.schedule.matching import match_modules
from trainables.errors import UserError


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.conv2 = nn.Conv2d(1, 1, 1)
        self.relu = nn.ReLU()


def make_model() -> nn.Module:
    return nn.ModuleDict(
        {
            "conv1": nn.Conv2d(1, 1, 1),
            "layer1": Branch(),
            "layer10": Branch(),
            "fc": nn.Linear(2, 2),
            "pool": nn.Flatten(),
        }
    )


def planned(overrides: dict[str, Any], model: nn.Module | None = None) -> dict[str, Bits]:
    model = model or make_model()
    settings = DorefaQuantizerConfig.model_validate({"bits_activations": 8, "bits_weights": 3, "overrides": overrides})
    default = build_quantizer("q", settings).default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_bits(model, default, settings.overrides)
    return {name: plan[module] for name, module in model.named_modules()}


DEFAULT = {"weights": 3, "bias": None, "activations": 8}


def test_what_no_pattern_matches_has_the_default() -> None:
    plan = planned({"fc": {"bits_weights": 4}})
    assert plan.pop("fc") == {"weights": 4, "bias": None, "activations": 8}
    assert all(bits == DEFAULT for bits in plan.values())


def test_an_absent_key_inherits_and_null_and_32_mean_not_quantized() -> None:
    plan = planned({"conv1": {"bits_weights": None}, "fc": {"bits_activations": 32, "bits_bias": 16}})
    assert plan["conv1"] == {"weights": None, "bias": None, "activations": 8}
    assert plan["fc"] == {"weights": 3, "bias": 16, "activations": None}


def test_the_first_pattern_that_matches_counts() -> None:
    plan = planned(
        {"layer1.conv1": {"bits_weights": 5}, "layer*conv?": {"bits_weights": 6}, "re:.*": {"bits_weights": 7}}
    )
    weights = {name: bits["weights"] for name, bits in plan.items()}
    assert weights == {
        "": 3, "conv1": 7, "layer1": 7, "layer1.conv1": 5, "layer1.conv2": 6, "layer1.relu": 7, "layer10": 7,
        "layer10.conv1": 6, "layer10.conv2": 6, "layer10.relu": 7, "fc": 7, "pool": 7,
    }  # fmt: skip
    assert planned({"layer*conv?": {"bits_weights": 6}, "layer1.conv1": {}})["layer1.conv1"]["weights"] == 6


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layer1.conv1", ["layer1.conv1"]),
        ("layer1.*", ["layer1.conv1", "layer1.conv2", "layer1.relu"]),
        (".*conv2", ["layer1.conv2", "layer10.conv2"]),
        ("layer10?.conv.", ["layer1.conv1", "layer1.conv2", "layer10.conv1", "layer10.conv2"]),
        ("conv1|fc", ["conv1", "fc"]),
        (r"re:layer\d+\.relu", ["layer1.relu", "layer10.relu"]),
        ("module.fc", ["fc"]),
    ],
)
def test_patterns_are_names_globs_and_published_regular_expressions(pattern: str, names: list[str]) -> None:
    assert match_modules(pattern, [n for n, _ in make_model().named_modules() if n]) == tuple(names)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"unknown module 'fcc': did you mean 'fc'\? Valid: conv1, fc, layer1"):
        planned({"fcc": {"bits_weights": 4}})
    with pytest.raises(UserError, match=r"'block\*' matches no module; there are conv1, layer1, "):
        planned({"block*": {"bits_weights": 4}})
    with pytest.raises(UserError, match=r"'block\[' matches no module"):
        planned({"block[": {"bits_weights": 4}})


def test_overrides_of_a_container_or_of_what_has_no_numbers_are_said_to_have_no_effect() -> None:
    default: Bits = {"weights": 3, "bias": None, "activations": 8}
    overrides = DorefaQuantizerConfig.model_validate({"overrides": {"layer1": {}, "pool": {}}}).overrides
    with pytest.warns(UserWarning, match=r"overrides of") as caught:
        plan_bits(make_model(), default, overrides)
    assert [str(w.message) for w in caught] == [
        "overrides of 'layer1' have no effect: layer1 has neither a weight nor an activation of its own that is "
        "quantized; layer1.* means what is in it",
        "overrides of 'pool' have no effect: pool has neither a weight nor an activation of its own that is quantized",
    ]


def test_one_module_under_two_names_must_be_given_the_same_bits() -> None:
    relu = nn.ReLU()
    model = nn.ModuleDict({"first": relu, "second": relu})
    with pytest.raises(UserError, match="first and second are one module and must have the same bits, got different"):
        planned({"second": {"bits_activations": 4}}, model)
    assert planned({"first|second": {"bits_activations": 4}}, model)["first"]["activations"] == 4
    assert planned({}, model)["first"] == DEFAULT
