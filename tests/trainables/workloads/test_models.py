"""Models are those of their papers: sizes, multiply-adds, names; and a user's own model is checked before it trains."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.errors import UserError
from trainables.gradskip.forward_chain import resolve_chain
from trainables.workloads.models import MODELS, build_model
from trainables.workloads.models.resnet import BasicBlock, Bottleneck
from trainables.workloads.models.resnet_cifar import Block, PaddedShortcut

#: Classes, side in pixels, parameters, multiply-adds in billions: as published (He et al. 2016; torchvision's tables).
PUBLISHED = {
    "resnet20": (10, 32, 269_722, 0.0408),
    "resnet56": (10, 32, 853_018, 0.1265),
    "resnet18": (1000, 224, 11_689_512, 1.814),
    "resnet50": (1000, 224, 25_557_032, 4.089),
    "alexnet": (1000, 224, 61_100_840, 0.714),
    "vgg16": (1000, 224, 138_357_544, 15.47),
}


def on_meta(name: str, classes: int, image_size: int | None = None, channels: int = 3) -> nn.Module:
    """The model without numbers: large ones cost neither time nor memory."""
    with torch.device("meta"):
        return build_model(name, classes, image_size, channels)


def images(size: int, channels: int = 3) -> Tensor:
    return torch.empty(2, channels, size, size, device="meta")


def test_all_models_are_compared_with_published_numbers() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_multiply_adds_are_the_published_ones(name: str) -> None:
    classes, size, parameters, billions = PUBLISHED[name]
    model = on_meta(name, classes)
    assert MODELS[name].image_size == size
    assert sum(p.numel() for p in model.parameters()) == parameters
    with FlopCounterMode(display=False) as counter:
        scores = model(images(size))
    assert scores.shape == (2, classes)
    # The figures of the two small ones count a multiply-add for each output of a norm as well.
    assert counter.get_total_flops() / 2 / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_resnet20_multiply_adds_by_hand() -> None:
    by_hand = 432 * 32**2 + 6 * 2304 * 32**2 + (4608 + 5 * 9216) * 16**2 + (18432 + 5 * 36864) * 8**2 + 640
    with FlopCounterMode(display=False) as counter:
        on_meta("resnet20", 10)(images(32))
    assert counter.get_total_flops() == 2 * 2 * by_hand


def test_alexnet_weights_without_biases_are_the_published_count() -> None:
    assert sum(p.numel() for p in on_meta("alexnet", 1000).parameters() if p.dim() > 1) == 61_090_496


@pytest.mark.parametrize(
    ("build", "channels"),
    [
        (lambda: Block(3, 6, stride=2), 3),
        (lambda: Block(4, 4, stride=1), 4),
        (lambda: BasicBlock(3, 4, stride=2), 3),
        (lambda: BasicBlock(4, 4, stride=1), 4),
        (lambda: Bottleneck(3, 2, stride=2), 3),
        (lambda: Bottleneck(8, 2, stride=1), 8),
        (lambda: build_model("resnet20", 3), 3),
        (lambda: features("alexnet"), 3),
        (lambda: features("vgg16"), 3),
    ],
)
def test_activations_in_place_change_no_gradient(build: Callable[[], nn.Module], channels: int) -> None:
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    activations = [module for module in plain.modules() if isinstance(module, nn.ReLU)]
    assert all(module.inplace for module in activations)
    for module in activations:
        module.inplace = False
    x = torch.randn(2, channels, 64, 64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((model, plain), inputs, strict=True):
        each(given).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for (path, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), path
        assert bool(ours.grad.any()), path


def features(name: str) -> nn.Module:
    """A model's convolutions: the 10^8 weights of its classifier have no activation of another kind."""
    convolutions = on_meta(name, 3).features.to_empty(device="cpu")
    for module in convolutions.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return convolutions


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "alexnet", "vgg16"])
def test_models_are_chains_that_a_forward_cache_can_cut(name: str) -> None:
    model = on_meta(name, 10)
    _, names = resolve_chain(model, None)
    y: Tensor = images(MODELS[name].image_size)
    for part in names:
        y = model.get_submodule(part)(y)
    assert y.shape == (2, 10)


#: First digits of the SHA-256 of the lines "name [shape]" of torchvision's state_dict, 0.29.2, with 1000 classes.
TORCHVISION = {
    "resnet18": "66b04efc1dfd4b80",
    "resnet50": "614cd53ddf849669",
    "alexnet": "23c3b8d4a3e86dc8",
    "vgg16": "8a41c838cadbc3e0",
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_shapes_and_order_are_those_of_torchvision(name: str) -> None:
    lines = [f"{path} {list(value.shape)}" for path, value in on_meta(name, 1000).state_dict().items()]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == TORCHVISION[name]


@pytest.mark.parametrize("name", ["resnet20", "resnet56"])
def test_names_of_the_small_residual_networks(name: str) -> None:
    blocks = (int(name.removeprefix("resnet")) - 2) // 6
    weights = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage in (1, 2, 3):
        for block in range(blocks):
            for number in (1, 2):
                at = f"layer{stage}.{block}"
                weights += [f"{at}.conv{number}.weight", f"{at}.bn{number}.weight", f"{at}.bn{number}.bias"]
    assert [path for path, _ in on_meta(name, 10).named_parameters()] == [*weights, "fc.weight", "fc.bias"]


def test_a_bottleneck_halves_the_image_in_its_3x3_convolution() -> None:
    strides = {
        path: module.stride[0]
        for path, module in on_meta("resnet50", 10).named_modules()
        if isinstance(module, nn.Conv2d) and module.stride != (1, 1)
    }
    halving = {f"layer{stage}.0.{conv}": 2 for stage in (2, 3, 4) for conv in ("conv2", "downsample.0")}
    assert strides == {"conv1": 2, **halving}
    assert Bottleneck(8, 4, stride=2)(torch.zeros(2, 8, 7, 7)).shape == (2, 16, 4, 4)


@pytest.mark.parametrize("side", [7, 8])
def test_option_a_is_subsampling_and_zero_channels(side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 8, (side + 1) // 2, (side + 1) // 2)
    for row in range(0, side, 2):
        for column in range(0, side, 2):
            expected[:, :3, row // 2, column // 2] = x[:, :, row, column]
    assert torch.equal(PaddedShortcut(3, 8, stride=2)(x), expected)
    block = Block(3, 8, stride=2)
    nn.init.zeros_(block.bn2.weight)  # the convolutions' branch adds nothing
    assert torch.equal(block(x), expected.relu())


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_initial_weights_are_drawn_from_the_global_generator_with_he_fan_out(name: str) -> None:
    torch.manual_seed(3)
    first = build_model(name, 10)
    torch.manual_seed(3)
    again = build_model(name, 10)
    other = build_model(name, 10)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    for path, module in first.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.03), path
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all()), path
            assert bool((module.bias == 0).all()), path


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "alexnet", "vgg16"])
def test_the_least_image_size_is_the_least_that_runs(name: str) -> None:
    least = MODELS[name].least_image_size
    assert on_meta(name, 10, least, 1)(images(least, 1)).shape == (2, 10)
    with pytest.raises(UserError, match=rf"image_size of model {name} must be .* at least {least}, got {least - 1}$"):
        build_model(name, 10, least - 1)
    with pytest.raises((RuntimeError, ValueError)):
        on_meta(name, 10)(images(least - 1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "resnet19"}, r"unknown model 'resnet19': did you mean 'resnet1?\d'\? Valid: alexnet, package\.m"),
        ({"classes": 0}, "classes of model resnet20 must be an integer of at least 1, got 0"),
        ({"classes": True}, "classes of model resnet20 must be an integer of at least 1, got True"),
        ({"channels": 2.5}, "channels of model resnet20 must be an integer of at least 1, got 2.5"),
    ],
)
def test_wrong_arguments_are_one_line(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        build_model(**{"name": "resnet20", "classes": 10, "image_size": 32, **changed})  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


HEAD = "import torch\nfrom torch import nn\n"
#: Flat, for images of any size.
FLAT = "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({channels}, {classes}))"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module `own_models` for one test."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(source: str) -> str:
        (tmp_path / "own_models.py").write_text(HEAD + source)
        return "own_models:make"

    yield written
    sys.modules.pop("own_models", None)


@pytest.mark.parametrize(
    ("signature", "called_with"),
    [
        ("num_classes", {"num_classes": 5}),
        ("num_classes=1000, width=8", {"num_classes": 5}),
        ("**more", {"num_classes": 5}),
        ("*, image_size, channels, **more", {"num_classes": 5, "image_size": 8, "channels": 2}),
        ("", {}),
    ],
)
def test_a_function_gets_what_its_signature_takes(
    signature: str, called_with: dict[str, int], write: Callable[[str], str]
) -> None:
    own = FLAT.format(channels=2, classes=5)
    name = write(f"def make({signature}):\n    model = {own}\n    model.seen = dict(locals())\n    return model\n")
    seen = build_model(name, 5, 8, channels=2).seen
    assert isinstance(seen, dict)
    given = {**seen, **seen.get("more", {})}
    assert {key: given[key] for key in ("num_classes", "image_size", "channels") if key in given} == called_with


def test_a_class_is_a_function_as_well(write: Callable[[str], str]) -> None:
    write(
        "class Own(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(3, num_classes)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x.mean((2, 3)))\n"
    )
    model = build_model("own_models:Own", 7)
    assert model(torch.zeros(1, 3, 4, 4)).shape == (1, 7)


def test_trying_a_model_leaves_it_and_the_generators_alone(write: Callable[[str], str]) -> None:
    """Also one that looks at numbers, so that it has to run for real."""
    name = write(
        "class Looking(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.drop, self.fc = nn.BatchNorm2d(3, momentum=0.5), nn.Dropout(), nn.Linear(3, 4)\n"
        "        self.runs = []\n"
        "    def forward(self, x):\n"
        "        self.runs.append(float(x.sum()))\n"
        "        return self.fc(self.drop(self.norm(x + 1)).mean((2, 3)))\n"
        "def make():\n"
        "    return Looking()\n"
    )
    torch.manual_seed(0)
    nn.Linear(3, 4)  # all that the model draws
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = build_model(name, 4, 6)
    assert model.runs == [0.0]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert {path: float(b.sum()) for path, b in model.named_buffers()} == {
        "norm.running_mean": 0, "norm.running_var": 3, "norm.num_batches_tracked": 0
    }  # fmt: skip
    assert F.cross_entropy(model(torch.zeros(2, 3, 6, 6)), torch.tensor([0, 1])).requires_grad


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            f"def make(num_classes):\n    return {FLAT.format(channels=3, classes=4)}\n",
            r"must give scores of shape \(2, 10\) for images of shape \(2, 3, 16, 16\), got \(2, 4\): it has 4 "
            "outputs, the data has 10 classes$",
        ),
        (
            f"def make(num_classes):\n    return {FLAT.format(channels=3, classes=11)}\n",
            r"must give scores of shape \(2, 10\) .*, got \(2, 11\)$",
        ),
        ("def make():\n    return nn.Conv2d(3, 10, 3)\n", r"must give scores .*, got \(2, 10, 14, 14\)$"),
        (
            "class Two(nn.Module):\n    def forward(self, x):\n        return x, x\ndef make():\n    return Two()\n",
            "must give scores .*, got tuple$",
        ),
        (
            "def make():\n    return nn.Linear(5, 10)\n",
            r"must take images of shape \(2, 3, 16, 16\), but its forward pass raised RuntimeError: mat1 and mat2",
        ),
        ("def make():\n    pass\n", "must return an nn.Module, got None$"),
        ("def make():\n    return [1]\n", "must return an nn.Module, got list$"),
        ("def make(depth):\n    pass\n", r"built by calling it, which raised TypeError: make\(\) missing .* 'depth'$"),
        ("def make():\n    raise OSError('no weights\\nhere')\n", "which raised OSError: no weights here$"),
        ("make = 3\n", "must be a function or a class, got int$"),
        ("def made():\n    pass\n", "model own_models:make: unknown name in own_models 'make': did you mean 'made'"),
        ("import not_there\n", "importing own_models failed: No module named 'not_there'$"),
        ("def make(:\n", "importing own_models failed: SyntaxError: invalid syntax"),
    ],
)
def test_what_is_wrong_with_a_model_of_ones_own_is_one_line(
    source: str, message: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        build_model(write(source), 10, 16)
    assert "\n" not in str(raised.value)
    assert "own_models" in str(raised.value)


@pytest.mark.parametrize("name", [":make", "own_models:", "own models:make", "a..b:make", "a:b:c", "a:b.c"])
def test_a_name_of_another_form_says_how_it_must_be(name: str) -> None:
    with pytest.raises(UserError, match=r"must be given as package\.module:function, got '"):
        build_model(name, 10)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UserError, match="model no_such_package:make: there is no module no_such_package"):
        build_model("no_such_package:make", 10)
