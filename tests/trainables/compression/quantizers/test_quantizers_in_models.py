"""Quantizers in models of many kinds: what cannot be quantized, hooks, parametrizations, learned clips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_nets import LOW_BITS, NAMES, batches, make_model, prepared, settings_of, step
from torch import Tensor, nn

from trainables.compression.quantizers import build_quantizer, is_quantized
from trainables.compression.schedule.configs import ComponentConfig
from trainables.errors import UserError
from trainables.gradskip import optimizers as gradskip
from trainables.gradskip import settings as gradskip_settings


@pytest.mark.parametrize("name", NAMES)
def test_functions_in_place_of_modules_are_said_not_to_be_seen(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    if name == "PostTrainLinearQuantizer":
        model = nn.Sequential(nn.Embedding(5, 2))  # its layers' own activations are quantized: here is none
    with pytest.warns(
        UserWarning, match="quantizer q quantizes no activations, for no module is one of .*ReLU6.*F.relu"
    ):
        build_quantizer("q", settings_of(name)).prepare(model, None)


@pytest.mark.parametrize("name", NAMES)
def test_one_dimension_three_dimensions_and_embeddings(name: str) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.conv1 = nn.Conv1d(6, 4, 2)
            self.up1 = nn.ConvTranspose1d(4, 2, 2)
            self.conv3 = nn.Conv3d(1, 2, 1)
            self.up3 = nn.ConvTranspose3d(2, 1, 1)
            self.relu = nn.ReLU()

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.relu(self.up1(self.relu(self.conv1(self.table(tokens).transpose(1, 2)))))
            result: Tensor = self.up3(self.relu(self.conv3(x[:, None, None])))
            return result

    model = Text()
    quantizer = build_quantizer("q", settings_of(name, overrides={}))
    quantizer.prepare(model, None)
    tokens = torch.arange(22).reshape(2, 11) % 11
    model(tokens).sum().backward()
    quantizer.finish_epoch(model)
    model(tokens).sum().backward()
    for layer in (model.table, model.conv1, model.up1, model.conv3, model.up3):
        assert is_quantized(layer)
        assert layer.parametrizations.weight.original.grad is not None
    assert model.table.weight.unique().numel() <= 2**4


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_checked_against_the_model_when_it_is_given(name: str) -> None:
    settings = settings_of(name, overrides={"convv": {}})
    build_quantizer("q", settings)
    with pytest.raises(UserError, match=r"unknown module 'convv': did you mean 'conv'\?"):
        build_quantizer("q", settings, make_model())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("WRPNQuantizer", {"bits_weights": 1}, r"bits of weights of quantizer q must be at least 2 .*got 1 for conv"),
        ("WRPNQuantizer", {"bits_bias": 1}, r"bits of bias of quantizer q must be at least 2 .*got 1 for conv"),
        (
            "QuantAwareTrainRangeLinearQuantizer",
            {"overrides": {"relu": {"bits_activations": 1}}},
            r"bits of activations of quantizer q must be at least 2 \(one is the sign's\), got 1 for relu",
        ),
        (
            "PostTrainLinearQuantizer",
            {"mode": "SYMMETRIC", "overrides": {"fc": {"bits_weights": 1}}},
            r"bits of weights of quantizer q must be at least 2 .*got 1 for fc",
        ),
        ("PostTrainLinearQuantizer", {"bits_accum": 1}, r"bits of bias of quantizer q must be at least 2 .*for conv"),
    ],
)
def test_what_cannot_be(name: str, changes: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(UserError, match=message):
        build_quantizer("q", settings_of(name, **changes)).prepare(model, None)
    assert not is_quantized(model)


def test_one_bit_is_enough_where_no_bit_is_the_signs() -> None:
    for name, changes in (
        ("DorefaQuantizer", {"bits_weights": 1, "bits_bias": 1, "bits_activations": 1}),
        ("WRPNQuantizer", {"bits_activations": 1}),
        ("QuantAwareTrainRangeLinearQuantizer", {"mode": "ASYMMETRIC_SIGNED", "bits_weights": 1}),
    ):
        model, optimizer, _ = prepared(name, **changes)
        step(model, optimizer, batches()[0])


def test_other_settings_are_no_quantizer() -> None:
    class Unknown(ComponentConfig):
        class_ = "DorefaQuantiser"

    with pytest.raises(UserError, match=r"unknown quantizer 'DorefaQuantiser': did you mean 'DorefaQuantizer'\?"):
        build_quantizer("q", Unknown())


def test_a_weight_that_an_old_style_hook_computes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1])
    with pytest.raises(
        UserError, match="weight of 1 must be a parameter to be quantized, got one that a hook computes: use"
    ):
        build_quantizer("q", settings_of("WRPNQuantizer", bits_activations=32)).prepare(model, None)
    assert not is_quantized(model)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_and_transformers_own_shortcut_do_not_pass_by_the_quantized_activation(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=nn.ReLU(), batch_first=True)
    seen: list[Tensor] = []
    layer.activation.register_forward_hook(lambda _, args, output: seen.append(output))
    quantizer = build_quantizer("q", settings_of(name))
    quantizer.prepare(layer, None)
    x = torch.randn(2, 3, 8)
    layer(x)
    if name == "PostTrainLinearQuantizer":
        # Attention uses its output projection's weight without calling it.
        with pytest.warns(UserWarning, match="no batch went through it: activations of self_attn.out_proj$"):
            quantizer.finish_epoch(layer)
    with torch.no_grad():
        layer.eval()(x)
    assert len(seen) == 2
    assert seen[-1].unique().numel() <= 2 ** LOW_BITS[name]["bits_activations"]


@pytest.mark.parametrize("name", NAMES)
def test_gradient_skip_stops_a_quantized_layer(name: str) -> None:
    model = make_model()
    # Layers 0 and 1 are weight and bias of the convolution; they stop before the third step.
    settings = gradskip_settings.Settings(stop_layer_num=(1,), stop_layer_itr=(1,))
    optimizer = gradskip.SGD(model.named_parameters(), lr=0.05, momentum=0.9, settings=settings, model=model)
    weight, last = model.conv.weight, model.fc.weight
    quantizer = build_quantizer("q", settings_of(name))
    quantizer.prepare(model, optimizer)
    moved = []
    for batch in batches():
        before = weight.detach().clone(), last.detach().clone()
        step(model, optimizer, batch)
        moved.append((not torch.equal(weight, before[0]), not torch.equal(last, before[1])))
    assert moved == [(True, True), (True, True), (False, True), (False, True)]
    assert not weight.requires_grad
