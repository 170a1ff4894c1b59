"""What every quantizer keeps to, class by class: a contract over the registry of settings."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from trainables.compression.component import Quantizer
from trainables.compression.quantizers import build_quantizer, is_quantized
from trainables.compression.schedule.configs import QUANTIZERS, ComponentConfig
from trainables.errors import UserError
from trainables.gradskip import optimizers as gradskip
from trainables.gradskip import settings as gradskip_settings
from trainables.workloads.batch_shapes import on_meta

LOW_BITS: dict[str, dict[str, Any]] = {
    "DorefaQuantizer": {"bits_weights": 3, "bits_bias": 6, "bits_activations": 4},
    "WRPNQuantizer": {"bits_weights": 4, "bits_bias": 6, "bits_activations": 4},
    "PACTQuantizer": {"bits_weights": 3, "bits_bias": 6, "bits_activations": 4, "act_clip_init_val": 1.5},
    "QuantAwareTrainRangeLinearQuantizer": {
        "bits_weights": 4, "bits_bias": 6, "bits_activations": 4, "ema_decay": 0.9, "per_channel_wts": True,
    },
    "PostTrainLinearQuantizer": {
        "bits_parameters": 4, "bits_activations": 5, "bits_accum": 12, "clip_acts": "N_STD", "clip_n_stds": 2.0,
        "per_channel_wts": True, "mode": "ASYMMETRIC_UNSIGNED",
    },
}  # fmt: skip
NAMES = sorted(LOW_BITS)


class Net(nn.Module):
    """Every kind of layer that is quantized in two dimensions, a rectifier that is used twice, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.up = nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.last = nn.ReLU6()
        self.same = self.last
        self.fc = nn.Linear(4 * 25, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.same(self.last(self.relu(self.up(x))))
        scores: Tensor = self.fc(x.flatten(1))
        return scores


def make_model(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def settings_of(name: str, **changes: Any) -> ComponentConfig:
    return QUANTIZERS[name].model_validate({**LOW_BITS[name], **changes})


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def prepared(name: str, **changes: Any) -> tuple[Net, SGD, Quantizer]:
    model = make_model()
    optimizer = SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    quantizer = build_quantizer("q", settings_of(name, **changes), model)
    quantizer.prepare(model, optimizer)
    return model, optimizer, quantizer


def step(model: nn.Module, optimizer: SGD, batch: tuple[Tensor, Tensor]) -> float:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def quantizing(name: str, **changes: Any) -> tuple[Net, SGD, Quantizer]:
    """Prepared, trained by two steps, ranges frozen where they are."""
    model, optimizer, quantizer = prepared(name, **changes)
    for batch in batches(2):
        step(model, optimizer, batch)
    quantizer.finish_epoch(model)
    return model, optimizer, quantizer


def test_every_class_of_the_language_is_here() -> None:
    assert set(NAMES) == set(QUANTIZERS)


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
def test_another_model_of_the_same_classes_is_unaffected(name: str) -> None:
    x = batches()[0][0]
    expected = make_model()(x)
    model, _, _ = quantizing(name)
    other = make_model()
    assert torch.equal(other(x), expected)
    assert type(other.conv) is nn.Conv2d
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_quantized_once(name: str) -> None:
    model, optimizer, quantizer = prepared(name)
    state = list(model.state_dict())
    for again in (quantizer, build_quantizer("q", settings_of("DorefaQuantizer"))):
        with pytest.raises(UserError, match="must be quantized once, got a quantized one for quantizer q"):
            again.prepare(model, optimizer)
    assert list(model.state_dict()) == state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("finished", [False, True])
def test_a_run_goes_on_from_its_state_bit_for_bit(name: str, finished: bool) -> None:
    model, optimizer, quantizer = (quantizing if finished else prepared)(name)
    for batch in batches()[:2]:
        step(model, optimizer, batch)
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "quantizer": quantizer.state_dict()}, file
    )
    losses = [step(model, optimizer, batch) for batch in batches()[2:]]
    quantizer.finish_epoch(model)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, its_optimizer, its_quantizer = prepared(name)
    resumed.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    its_quantizer.load_state_dict(state["quantizer"])
    assert [step(resumed, its_optimizer, batch) for batch in batches()[2:]] == losses
    its_quantizer.finish_epoch(resumed)
    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key
    assert torch.equal(resumed.eval()(batches()[0][0]), model.eval()(batches()[0][0]))


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    quantizer = build_quantizer("q", settings_of(name))
    quantizer.prepare(model, None)
    x = batches()[0][0].to(dtype)
    model(x).sum().backward()
    quantizer.finish_epoch(model)
    assert model(x).dtype == model.conv.weight.dtype == model.conv.bias.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = {t.dtype for n, t in model.state_dict().items() if "quantized" in n and t.is_floating_point()}
    assert kept <= {wide}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_n_stds": None}, "N_STD, and N_STD needs it, got clip_acts N_STD without"),
        ({"clip_acts": "AVG"}, "N_STD, and N_STD needs it, got clip_acts AVG with"),
    ],
)
def test_deviations_are_for_their_clip(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"clip_n_stds belongs to clip_acts {message}"):
        settings_of("PostTrainLinearQuantizer", **changes)


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


def test_a_weight_that_is_parametrized_already_is_quantized_after_that() -> None:
    layer = nn.Linear(3, 2, bias=False)
    nn.utils.parametrizations.weight_norm(layer)
    normed = layer.weight.detach().clone()
    for name in NAMES:
        model = nn.Sequential(copy.deepcopy(layer), nn.ReLU())
        quantizer = build_quantizer("q", settings_of(name))
        quantizer.prepare(model, None)
        model(torch.ones(1, 3))
        quantizer.finish_epoch(model)
        plain = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
        with torch.no_grad():
            plain[0].weight.copy_(normed)
        quantizer = build_quantizer("q", settings_of(name))
        quantizer.prepare(plain, None)
        plain(torch.ones(1, 3))
        quantizer.finish_epoch(plain)
        assert torch.equal(model[0].weight, plain[0].weight)


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


def test_learned_clips_join_the_optimizer_with_the_options_of_its_first_group() -> None:
    model = make_model()
    first = {"params": list(model.conv.named_parameters()), "lr": 0.3, "weight_decay": 0.25, "betas": (0.5, 0.6)}
    rest = [(n, p) for n, p in model.named_parameters() if not n.startswith("conv.")]
    optimizer = AdamW([first, {"params": rest}], lr=0.1)
    before = [n for n, _ in model.named_parameters()]
    quantizer = build_quantizer("q", settings_of("PACTQuantizer", bits_weights=32, bits_bias=None))
    quantizer.prepare(model, optimizer)
    group = optimizer.param_groups[2]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.3, 0.25, (0.5, 0.6))
    assert group["param_names"] == ["relu.quantized_output.alpha", "last.quantized_output.alpha"]
    assert [n for n, _ in model.named_parameters() if "quantized" not in n] == before
    alphas = group["params"]
    assert [alpha.item() for alpha in alphas] == [1.5, 1.5]
    assert alphas[0] is model.relu.quantized_output.alpha
    model(batches()[0][0]).square().sum().backward()
    optimizer.step()
    assert all(alpha.item() != 1.5 for alpha in alphas)


def test_learned_clips_join_an_optimizer_without_names() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.3))
    build_quantizer("q", settings_of("PACTQuantizer")).prepare(model, optimizer)
    assert len(optimizer.param_groups[1]["params"]) == 2
    assert "param_names" not in optimizer.param_groups[1]
    # A rate that is a tensor is each group's own: a scheduler that scales both in place scales each once.
    assert optimizer.param_groups[1]["lr"] is not optimizer.param_groups[0]["lr"]
