"""Quantizers: what all keep to, class by class; models of many kinds; which bits each module gets."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quantized_nets import LOW_BITS, NAMES, Net, batches, make_model, prepared, settings_of, step
from thorough import rest_thorough
from torch import Tensor, nn
from torch.optim import SGD

from trainables.compression.quantizers import Bits, Quantizer, build_quantizer, is_quantized, plan_bits
from trainables.compression.quantizers.quantized_modules import LearnedClipActivation, Quantization, quantize_input
from trainables.compression.schedule.configs import QUANTIZERS
from trainables.errors import UserError
from trainables.gradskip import optimizers as gradskip
from trainables.gradskip import settings as gradskip_settings
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


def test_a_sequence_of_layers_runs_no_quantization_as_its_last_layer() -> None:
    """`nn.Sequential` runs every module that it has; its first layer's input is its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 30))
    plain = copy.deepcopy(net)
    changes: dict[str, Any] = {"bits_weights": None, "bits_bias": None, "mode": "SYMMETRIC"}
    build_quantizer("q", settings_of("QuantAwareTrainRangeLinearQuantizer", **changes)).prepare(net, None)
    x = torch.randn(50, 4)
    net(x)
    assert len(net) == 2

    def four_bits(x: Tensor) -> Tensor:
        scale = 7.5 / x.abs().max()
        return (x * scale).round().clamp(-8, 7) / scale

    torch.testing.assert_close(net.eval()(x), plain[1](four_bits(plain[0](four_bits(x)))))


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


def test_an_input_by_name_is_quantized_too() -> None:
    """As models of transformers are called."""
    model, _, _ = prepared("QuantAwareTrainRangeLinearQuantizer")
    x = batches()[0][0]
    by_place = model(x)
    again, _, _ = prepared("QuantAwareTrainRangeLinearQuantizer")
    assert torch.equal(again(**{next(iter(inspect.signature(again.forward).parameters)): x}), by_place)


class Wrapped(nn.Module):
    """Hands everything on, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.linear(*args, **kwargs)


def test_an_input_that_is_handed_on_by_name_is_quantized() -> None:
    seen: list[torch.Tensor] = []
    model = Wrapped()
    model.linear.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input"]), with_kwargs=True)
    quantize_input(model, Quantization(8, lambda x, _: x.round()))
    model(input=torch.tensor([[0.2, 1.4, -0.6, 3.0]]))
    assert seen[0].tolist() == [[0.0, 1.0, -1.0, 3.0]]


class Concat(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], dim=1)


class EltwiseMult(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Factors(nn.Module):
    """As NeuMF: a product of two embeddings beside a layer over both."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 6), nn.Embedding(7, 6)
        self.product, self.both, self.joined = EltwiseMult(), Concat(), Concat()
        self.hidden, self.act, self.last = nn.Linear(12, 8), nn.ReLU(), nn.Linear(14, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        hidden = self.act(self.hidden(self.both(user, item)))
        scores: Tensor = self.last(self.joined(self.product(user, item), hidden))
        return scores


def test_of_ncf_outputs_of_layers_concatenations_and_products_are_quantized() -> None:
    torch.manual_seed(0)
    model, seen = Factors(), dict[str, Tensor]()
    build_quantizer("q", settings_of("NCFQuantAwareTrainQuantizer", mode="ASYMMETRIC_UNSIGNED")).prepare(model, None)
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: output}))
    model(torch.stack([torch.arange(40) % 9, torch.arange(40) % 7], dim=1))
    levels = {name: values.unique().numel() for name, values in seen.items() if name not in ("users", "items")}
    assert set(levels) == {"product", "both", "joined", "hidden", "act", "last"}
    assert all(2 < count <= 16 for count in levels.values())
    with pytest.raises(ValidationError, match="quantize_inputs"):
        settings_of("NCFQuantAwareTrainQuantizer", quantize_inputs=True)


def test_inputs_that_are_no_real_numbers_stay() -> None:
    words = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(20, 2))
    given = settings_of("QuantAwareTrainRangeLinearQuantizer", bits_activations=None, num_bits_inputs=4)
    build_quantizer("q", given).prepare(words, None)
    assert torch.isfinite(words(torch.arange(10).reshape(2, 5))).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("finished", rest_thorough([True, False]))
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


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.conv2 = nn.Conv2d(1, 1, 1)
        self.relu = nn.ReLU()


def make_branches() -> nn.Module:
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
    model = model or make_branches()
    settings = QUANTIZERS["DorefaQuantizer"].model_validate(
        {"bits_activations": 8, "bits_weights": 3, "overrides": overrides}
    )
    default = build_quantizer("q", settings).default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_bits(model, default, settings.overrides)
    return {name: plan[module] for name, module in model.named_modules()}


DEFAULT = {"weights": 3, "bias": None, "activations": 8}


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


def test_overrides_of_a_container_or_of_what_has_no_numbers_are_said_to_have_no_effect() -> None:
    default: Bits = {"weights": 3, "bias": None, "activations": 8}
    overrides = QUANTIZERS["DorefaQuantizer"].model_validate({"overrides": {"layer1": {}, "pool": {}}}).overrides
    with pytest.warns(UserWarning, match=r"overrides of") as caught:
        plan_bits(make_branches(), default, overrides)
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


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
@pytest.mark.parametrize("decay", [None, 0.0, 0.3])
def test_the_learned_clip_has_a_weight_decay_of_its_own(decay: float | None, kind: type[torch.optim.Optimizer]) -> None:
    """Other weights have the optimizer's; the gradients are 0, over two backward passes a step."""
    model = make_model()
    optimizer: Any = kind(model.parameters(), lr=0.1, weight_decay=0.2)  # type: ignore[call-arg]
    changes = {} if decay is None else {"act_clip_decay": decay}
    build_quantizer("q", settings_of("PACTQuantizer", **changes)).prepare(model, optimizer)
    before = model.fc.parametrizations.weight.original.detach().clone()
    for _ in range(2):
        (model(torch.zeros(2, 1, 4, 4)) * 0).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())  # makes its groups anew
    optimizer.step()
    shrunk = 1 - 0.1 * (0.2 if decay is None else decay)
    for module in model.modules():
        if isinstance(module, LearnedClipActivation):
            assert module.alpha.item() == pytest.approx(1.5 * shrunk)
    torch.testing.assert_close(model.fc.parametrizations.weight.original, before * (1 - 0.1 * 0.2))
