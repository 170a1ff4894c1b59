"""Thinning: the function stays, and the structure is what a loop over zero filters says; what follows it: optimizer,
record, parametrizations, modes and dtypes; and what is refused.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from thinned_models import filled, images, stack, thinned_alike, widths, with_norms, zero_filters
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW

from trainables.compression.measures import layer_macs
from trainables.compression.scheduler import CompressionScheduler
from trainables.compression.thinning import crop, thin, thin_again
from trainables.errors import UserError
from trainables.workloads.models import build_model


def test_a_stack_loses_its_zero_filters_and_the_columns_behind_them() -> None:
    model, x = stack(), images(4, 3, 8, 8)
    zero_filters([model[0]], [1, 3, 4])
    zero_filters([model[2]], [0, 5])
    zero_filters([model[5]], [2])  # an output of the model
    kept = model[5].weight.detach().view(5, 6, 16)[:, [1, 2, 3, 4]].flatten(1)
    found = thinned_alike(model, x, kind="filters")
    assert widths(model) == {"0": (5, 3, 1), "2": (4, 5, 1), "5": (5, 4 * 16)}
    assert torch.equal(model[5].weight, kept)
    macs = layer_macs(model, lambda m, batch: m(*batch), (x,))
    assert macs == {"0.weight": 5 * 3 * 9 * 36, "2.weight": 4 * 5 * 9 * 16, "5.weight": 5 * 64}
    columns = [*range(16), *range(80, 96)]
    assert found.removed == {
        "0.weight": {0: [1, 3, 4]}, "0.bias": {0: [1, 3, 4]},
        "2.weight": {0: [0, 5], 1: [1, 3, 4]}, "2.bias": {0: [0, 5]},
        "5.weight": {1: columns},
    }  # fmt: skip


def test_zero_channels_go_with_the_filters_that_made_them() -> None:
    model, x = with_norms(), images(4, 3, 8, 8)
    with torch.no_grad():
        model[3].weight[:, [2, 7]] = 0
        model[8].weight[:, 1] = 0
        model[0].weight[:, 0] = 0  # an input of the model
        model[0].weight[4] = 0  # a filter, which is none of these
    found = thinned_alike(model, x, kind="channels")
    assert widths(model) == {"0": (6, 3, 1), "1": (6,), "3": (5, 6, 1), "4": (5,), "8": (5, 5)}
    assert found.removed["1.bias"] == {0: [2, 7]}


@pytest.mark.parametrize("how", [{"affine": False}, {"track_running_stats": False}])
def test_norms_without_some_of_their_tensors_go_too(how: dict[str, Any]) -> None:
    model, x = with_norms(), images(4, 3, 8, 8)
    model[1], model[4] = (nn.BatchNorm2d(features, **how).double().eval() for features in (8, 6))
    with torch.no_grad():
        model[3].weight[:, [2, 7]] = 0
    thin(model, (x,), kind="channels")
    assert (model[0].weight.shape[0], model[1].num_features, model[3].weight.shape[1]) == (6, 6, 6)


def test_a_zero_filter_before_a_norm_changes_the_function_by_the_norms_constant() -> None:
    """beta - gamma mean / std stays behind a zero filter; without it the next layer reads as much less."""
    model, x = with_norms(), images(4, 3, 8, 8)
    with torch.no_grad():
        model[3].weight[2] = 0
        model[4].bias[2] = 3
    norm, linear = model[4], model[8]
    constant = norm.bias[2] - norm.weight[2] * norm.running_mean[2] / (norm.running_var[2] + norm.eps) ** 0.5
    constant = constant.clamp(min=0)
    assert constant > 0.01  # the case is one
    expected = float((constant * linear.weight[:, 2]).abs().max().detach())
    before = model(x).detach()
    found = thin(model, (x,), kind="filters")
    assert widths(model)["3"] == (5, 8, 1)
    assert not found.exact
    assert found.difference == pytest.approx(expected, rel=1e-6)
    assert float((model(x) - before).abs().max().detach()) == pytest.approx(expected, rel=1e-6)


def test_an_activation_that_makes_something_of_zero_keeps_its_channels() -> None:
    model = filled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 6, 3)))
    zero_filters([model[0]], [1])
    found = thinned_alike(model, images(2, 3, 8, 8), kind="filters")
    assert found.record == []


def test_a_layer_keeps_one() -> None:
    model = stack()
    zero_filters([model[2]], list(range(6)))
    thinned_alike(model, images(2, 3, 8, 8))
    assert widths(model)["2"][0] == 1


def resnet() -> tuple[nn.Module, list[nn.Module], list[nn.Module]]:
    """ResNet-20, and its convolutions and norms that a shortcut adds to."""
    model = filled(build_model("resnet20", classes=10))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)  # outputs of a size at which 1e-5 means something
    modules = dict(model.named_modules())
    convolutions = [m for n, m in modules.items() if n == "conv1" or n.endswith("conv2")]
    norms = [m for n, m in modules.items() if n == "bn1" or n.endswith("bn2")]
    return model, convolutions, norms


def test_what_a_shortcut_adds_to_goes_where_all_of_it_is_zero() -> None:
    """Channel 5 of all three stages, which the shortcuts between them hand on in its place."""
    model, convolutions, norms = resnet()
    zero_filters([*convolutions, *norms], [5])
    thinned_alike(model, images(2, 3, 32, 32), kind="filters")
    found = widths(model)
    assert [found[name][0] for name in ("conv1", "layer1.2.conv2", "layer2.1.conv2", "layer3.0.bn2")] == [
        15,
        15,
        31,
        63,
    ]
    assert (found["layer2.0.conv1"], found["fc"]) == ((32, 15, 1), (10, 63))


def test_what_a_shortcut_adds_to_stays_where_one_is_not_zero() -> None:
    model, convolutions, norms = resnet()
    zero_filters([*convolutions[:3], *norms[:3]], [5])
    before = widths(model)
    thinned_alike(model, images(2, 3, 32, 32), kind="filters")
    assert widths(model) == before


def test_channels_that_only_a_padding_shortcut_makes_stay() -> None:
    model, convolutions, norms = resnet()
    zero_filters([*convolutions[-3:], *norms[-3:]], [40])
    found = thinned_alike(model, images(2, 3, 32, 32), kind="filters")
    assert found.record == []


def mobile() -> nn.Sequential:
    """A depthwise convolution between two of 1x1."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    filled(model)
    return model


@pytest.mark.parametrize("where", [0, 3])
def test_depthwise(where: int) -> None:
    """A zero filter before it, with the norms up to the next reader, or its own."""
    model = mobile()
    zero_filters([model[where], *([model[1]] if where == 0 else []), model[4]], [2, 6])
    thinned_alike(model, images(2, 3, 8, 8), kind="filters")
    assert widths(model) == {
        "0": (6, 3, 1),
        "1": (6,),
        "3": (6, 6, 6),
        "4": (6,),
        "6": (4, 6, 1),
        "7": (4,),
        "10": (3, 4),
    }


class Concatenating(nn.Module):
    """Two convolutions side by side, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 5, 3)
        self.last = nn.Conv2d(9, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.cat([self.left(x), self.right(x)], 1).relu())
        return result


def test_concatenated_channels() -> None:
    model = Concatenating()
    filled(model)
    zero_filters([model.left], [1])
    zero_filters([model.right], [0, 4])
    found = thinned_alike(model, images(2, 3, 8, 8), kind="filters")
    assert found.removed["last.weight"] == {1: [1, 4, 8]}


class Twice(nn.Module):
    """One convolution called twice, and a forward that knows its width."""

    def __init__(self, *, knows: bool) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(4 * 4, 2)
        self.knows = knows

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.first(x)) if self.knows else self.again(self.again(self.first(x)))
        result: Tensor = self.last(y.view(-1, 16) if self.knows else y.flatten(1))
        return result


@pytest.mark.parametrize("knows", [False, True])
def test_what_cannot_be_cut_stays(knows: bool) -> None:
    model = Twice(knows=knows)
    filled(model)
    zero_filters([model.first, model.again], [1])
    with torch.no_grad():
        model.again.weight[:, 1] = 0
    before = widths(model)
    thinned_alike(model, images(2, 3, 2, 2))
    assert widths(model) == before | ({"first": (3, 3, 1), "again": (4, 3, 1)} if knows else {})


@pytest.mark.parametrize(
    "layers",
    [
        [nn.ReLU()],  # an output of the model
        [],  # read by no layer
        [nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1)],  # which mixes channels
        [nn.Conv2d(8, 4, 3, groups=4), nn.Conv2d(4, 2, 1)],  # several input channels for each filter
        [nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 2, 1)],  # groups, which have to stay alike
        [nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 2, 1))],  # a weight that is computed
    ],
)
def test_channels_that_have_to_stay(layers: list[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers)
    filled(model)
    zero_filters([model[0]], [1])
    assert thinned_alike(model, images(2, 3, 8, 8)).record == []


def test_shared_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    filled(model)
    zero_filters([model[0], model[2]], [1])
    assert thinned_alike(model, images(5, 4)).record == []


# --- what follows -----------------------------------------------------------------------------------------------------


class OfOneDtype(nn.Module):
    """Makes a tensor of its own, which is not of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x @ torch.eye(3))
        return result


def test_a_model_of_one_dtype() -> None:
    model, x = OfOneDtype(), images(5, 3).float()
    zero_filters([model.layers[0]], [2, 4])
    before = model(x).detach()
    found = thin(model, (x,))
    assert found.exact
    assert found.removed["layers.2.weight"] == {1: [2, 4]}
    assert torch.allclose(model(x), before, atol=1e-6)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_optimizer_goes_on_as_if_the_model_had_always_been_thin(kind: str) -> None:
    """Channels that are zero on both sides get no gradient, so training with them goes the same way."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [{"params": named[:3], "lr": 1e-4}, {"params": named[3:], "lr": 2e-4}]
        return SGD(groups, momentum=0.9) if kind == "sgd" else AdamW(groups, weight_decay=0.1)

    model, x = stack(), images(4, 3, 8, 8)
    zero_filters([model[0]], [1, 3])
    with torch.no_grad():
        model[2].weight[:, [1, 3]] = 0
    optimizer = make(model)
    trained(model, optimizer, x, 3)
    thin_model = copy.deepcopy(model)
    thin_optimizer = make(thin_model)
    thin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = [group["param_names"] for group in thin_optimizer.param_groups]
    found = thin(thin_model, (x,), thin_optimizer, kind="structures")
    assert widths(thin_model)["0"] == (6, 3, 1)
    assert [group["param_names"] for group in thin_optimizer.param_groups] == names
    in_groups = [p for group in thin_optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in in_groups] == [id(p) for p in thin_model.parameters()]
    assert set(thin_optimizer.state) == set(in_groups)
    trained(model, optimizer, x, 3)
    trained(thin_model, thin_optimizer, x, 3)
    for (name, ours), theirs in zip(thin_model.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, crop(theirs.detach(), found.removed.get(name, {})), rtol=1e-9, atol=1e-12), name


class Scaled(nn.Module):
    """Quantizes with a scale for each filter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", weight.detach().abs().amax((1, 2, 3), keepdim=True) + 1e-3)

    def forward(self, weight: Tensor) -> Tensor:
        return (weight / self.scale * 7).round() / 7 * self.scale


def test_quantized_weights() -> None:
    model, x = stack(), images(4, 3, 8, 8)
    zero_filters([model[0]], [1, 3])
    parametrize.register_parametrization(model[0], "weight", Scaled(model[0].weight))
    original, before = copy.deepcopy(model), model(x).detach()
    found = thin(model, (x,), kind="filters")
    assert found.removed["0.weight"] == {0: [1, 3]}
    assert torch.allclose(model(x), before, atol=1e-9)
    assert model[0].parametrizations.weight[0].scale.shape == (6, 1, 1, 1)
    assert torch.equal(original(x), before)  # the class that both share is as it was


@pytest.mark.parametrize("cut", [["9", 0, [1]], ["1", 0, [1]], ["0", 0, [8]], ["0", 0, list(range(8))]])
def test_a_record_of_another_model(cut: list[Any]) -> None:
    model = stack()
    before = widths(model)
    with pytest.raises(UserError, match=rf"^the record of a thinning is of another model: it cuts .*of '{cut[0]}', wh"):
        thin_again(model, [cut])
    assert widths(model) == before


def test_without_torch_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(UserError, match=r"pip install 'tune-cac\[thin\]'$"):
        thin(stack(), (images(1, 3, 8, 8),))


class Wrapped(nn.Linear):
    """A layer that returns its output in a dictionary."""

    def forward(self, x: Tensor) -> Any:
        return {"scores": super().forward(x)}


def test_a_model_that_cannot_be_followed() -> None:
    with pytest.raises(UserError, match=r"^the model cannot be thinned, for torch_pruning cannot follow it: "):
        thin(nn.Sequential(nn.Linear(3, 3), Wrapped(3, 2)), (images(1, 3),))


@pytest.mark.parametrize("architecture", ["vit", "bert"])
def test_heads_and_widths_of_a_transformer_go(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    torch.manual_seed(0)
    if architecture == "vit":
        model: Any = transformers.ViTForImageClassification(
            transformers.ViTConfig(**small, image_size=8, patch_size=4, num_channels=1)
        )
        x, reads_heads, reads_widths = images(4, 1, 8, 8).float(), "attention.o_proj", "mlp.fc2"
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**small, vocab_size=20))
        x, reads_heads, reads_widths = torch.arange(20).view(4, 5), "attention.output.dense", "r.{}.output.dense"
    for number in range(2):
        for name, module in model.named_modules():
            with torch.no_grad():
                if name.endswith(f".{number}.{reads_heads}"):
                    module.weight[:, 8 * number : 8 * number + 8] = 0  # a head
                if name.endswith(reads_widths.format(number)) and f".{number}." in name:
                    module.weight[:, [3, 5]] = 0
    with torch.no_grad():
        expected = model.eval()(x).logits
    found = thin(model, (x,), kind="channels")
    assert found.exact
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, expected)
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    # Query, key and value; the output of three heads; the MLP.
    assert shapes[:6] == [(24, 32), (24, 32), (24, 32), (32, 24), (22, 32), (32, 22)]
    assert shapes[6:12] == shapes[:6]


@pytest.mark.filterwarnings("ignore:thinning changed what the model computes")  # the removed filters' biases
def test_a_model_called_by_name_loses_its_filters_in_a_schedule() -> None:
    """As models of transformers are, which return their loss with the scores."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = stack()

        def forward(self, *, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            scores = self.body(pixels)
            return {"scores": scores} if labels is None else {"loss": cross_entropy(scores, labels), "scores": scores}

    model = Named()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = {
        "version": 1,
        "pruners": {"half": {"class": "L1RankedStructureParameterPruner", "group_type": "Filters",
                             "desired_sparsity": 0.5, "weights": ["body.0.weight"]}},
        "extensions": {"thin": {"class": "FilterRemover"}},
        "policies": [{"pruner": {"instance_name": "half"}, "epochs": [0]},
                     {"extension": {"instance_name": "thin"}, "epochs": [0]}],
    }  # fmt: skip
    scheduler = CompressionScheduler(model, schedule, optimizer)
    x, y = images(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    for epoch in range(2):
        for _ in scheduler.batches(epoch, [0]):
            optimizer.zero_grad()
            scheduler.loss(model(pixels=x, labels=y)["loss"]).backward()
            optimizer.step()
    assert widths(model.body)["0"] == (4, 3, 1)
