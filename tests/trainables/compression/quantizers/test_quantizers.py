"""What every quantizer keeps to, class by class: a contract over the registry of settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_nets import LOW_BITS, NAMES, Net, batches, make_model, prepared, settings_of, step
from torch import Tensor, nn
from torch.optim import SGD

from trainables.compression.quantizers import Quantizer, build_quantizer, is_quantized
from trainables.errors import UserError
from trainables.workloads.batch_shapes import on_meta


def quantizing(name: str, **changes: Any) -> tuple[Net, SGD, Quantizer]:
    """Prepared, trained by two steps, ranges frozen where they are."""
    model, optimizer, quantizer = prepared(name, **changes)
    for batch in batches(2):
        step(model, optimizer, batch)
    quantizer.finish_epoch(model)
    return model, optimizer, quantizer


@pytest.mark.parametrize("name", NAMES)
def test_parameters_stay_the_same_objects_and_learn(name: str) -> None:
    model = make_model()
    before = {id(p): p.detach().clone() for p in model.parameters()}
    cancelled = id(model.conv.bias)  # the norm after it takes it out again
    optimizer = SGD(model.parameters(), lr=0.05)
    quantizer = build_quantizer("q", settings_of(name))
    quantizer.prepare(model, optimizer)
    after = {id(p): p for p in model.parameters()}
    assert set(before) <= set(after)
    assert all(torch.equal(before[key], after[key].detach()) for key in before)
    step(model, optimizer, batches()[0])
    quantizer.finish_epoch(model)
    gradients = [p.grad for p in model.parameters()]
    step(model, optimizer, batches()[1])
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert not any(torch.equal(before[key], after[key].detach()) for key in before if key != cancelled)


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_with_few_values(name: str) -> None:
    model, _, _ = quantizing(name, **({"per_channel_wts": False} if "per_channel_wts" in LOW_BITS[name] else {}))
    bits = LOW_BITS[name].get("bits_weights", LOW_BITS[name].get("bits_parameters"))
    for layer in (model.conv, model.up, model.fc):
        values = layer.weight.unique().numel()
        assert 2 <= values <= 2**bits
        assert layer.parametrizations.weight.original.unique().numel() > 2**bits
    seen: list[Tensor] = []
    model.relu.register_forward_hook(lambda _, args, output: seen.append(output))
    model.eval()(batches()[0][0])
    assert len(seen) == 2
    assert all(2 <= y.unique().numel() <= 2 ** LOW_BITS[name]["bits_activations"] for y in seen)


@pytest.mark.parametrize("name", ["QuantAwareTrainRangeLinearQuantizer", "PostTrainLinearQuantizer"])
def test_each_filter_has_its_own_range(name: str) -> None:
    model, _, _ = quantizing(name)
    for layer, axis in ((model.conv, 0), (model.up, 1), (model.fc, 0)):
        filters = layer.weight.detach().transpose(0, axis).flatten(1)
        assert all(f.unique().numel() <= 2**4 for f in filters)
        assert filters.unique().numel() > 2**4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [32, None])
def test_32_bits_and_null_change_no_bit(name: str, bits: int | None) -> None:
    keys = [key for key in LOW_BITS[name] if key.startswith("bits_")]
    changes: dict[str, Any] = {key: 32 if key == "bits_accum" else bits for key in keys}
    plain = make_model()
    plain_optimizer = SGD(plain.named_parameters(), lr=0.05, momentum=0.9)
    with pytest.warns(UserWarning, match="quantizer q quantizes nothing: every number of bits is 32 or null, or"):
        model, optimizer, quantizer = prepared(name, **changes)
    for batch in batches():
        assert step(model, optimizer, batch) == step(plain, plain_optimizer, batch)
    quantizer.finish_epoch(model)
    assert torch.equal(model.eval()(batches()[0][0]), plain.eval()(batches()[0][0]))
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("changes", "levels"), [({}, 16), ({"num_bits_inputs": 3}, 8), ({"quantize_inputs": False}, None)]
)
def test_linear_training_quantizes_the_models_input(changes: dict[str, Any], levels: int | None) -> None:
    """Jacob et al. 2018, section 3: all that a layer computes with; on the batch's own range at the first step."""
    model, _, _ = prepared("QuantAwareTrainRangeLinearQuantizer", mode="ASYMMETRIC_UNSIGNED", **changes)
    seen: list[Tensor] = []
    model.conv.register_forward_hook(lambda _, args, output: seen.append(args[0]))
    x = batches()[0][0]
    model(x)
    if levels is None:
        assert torch.equal(seen[0], x)
        return
    step = (x.max() - x.min()) / (levels - 1)
    torch.testing.assert_close(seen[0], torch.round(x / step) * step, rtol=0, atol=1e-5)
    assert seen[0].unique().numel() <= levels


def test_inputs_that_are_no_real_numbers_stay() -> None:
    words = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(20, 2))
    given = settings_of("QuantAwareTrainRangeLinearQuantizer", bits_activations=None, num_bits_inputs=4)
    build_quantizer("q", given).prepare(words, None)
    assert torch.isfinite(words(torch.arange(10).reshape(2, 5))).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_override_leaves_a_layer_alone(name: str) -> None:
    off = {"bits_weights": None, "bits_bias": None, "bits_activations": None}
    model, _, _ = prepared(name, overrides={"fc": off, "relu": off})
    assert type(model.fc) is nn.Linear
    assert not is_quantized(model.fc)
    assert not is_quantized(model.relu)
    assert is_quantized(model.last)
    assert is_quantized(model.conv)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_quantized_once(name: str) -> None:
    model, optimizer, quantizer = prepared(name)
    state = list(model.state_dict())
    for again in (quantizer, build_quantizer("q", settings_of("DorefaQuantizer"))):
        with pytest.raises(UserError, match="must be quantized once, got a quantized one for quantizer q"):
            again.prepare(model, optimizer)
    assert list(model.state_dict()) == state


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("finished", [False, True])
def test_copies_compute_alike_and_on_the_meta_device_without_waiting_for_numbers(name: str, finished: bool) -> None:
    model, optimizer, _ = (quantizing if finished else prepared)(name)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for training in (True, False):
        # A branch on a number, or its way to the host, is an error on the meta device.
        for ghost in (copy.deepcopy(model).to("meta"), on_meta(model)):
            ghost.train(training)
            ghost(torch.empty(6, 1, 4, 4, device="meta")).sum().backward()
            assert all(p.grad is not None and p.grad.is_meta for p in ghost.parameters())
    for batch in batches():
        step(twin, twin_optimizer, batch)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), f"{key} of the original moved with its copy"
    for batch in batches():
        step(model, optimizer, batch)
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_pruned_weights_stay_exactly_zero(name: str) -> None:
    model, _, quantizer = prepared(name)
    masks = {}
    generator = torch.Generator().manual_seed(3)
    for layer in (model.conv, model.up, model.fc):
        original = layer.parametrizations.weight.original
        masks[layer] = torch.rand(original.shape, generator=generator) < 0.5
        with torch.no_grad():
            original *= masks[layer]
    model(batches()[0][0]).sum().backward()
    quantizer.finish_epoch(model)
    for layer, mask in masks.items():
        assert not layer.weight[~mask].any()
        assert layer.weight[mask].any()
