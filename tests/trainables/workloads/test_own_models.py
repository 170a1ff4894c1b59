"""A user's own model is called with what it takes and checked before it trains; what is wrong is one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from user_factories import Write

from trainables.errors import UserError
from trainables.workloads.models import build_model
from trainables.workloads.models.custom import check_scores

#: Flat, for images of any size.
FLAT = "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({channels}, {classes}))"


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
def test_a_function_gets_what_its_signature_takes(signature: str, called_with: dict[str, int], write: Write) -> None:
    own = FLAT.format(channels=2, classes=5)
    source = f"def make({signature}):\n    model = {own}\n    model.seen = dict(locals())\n    return model\n"
    name = write(source, module="own_models")
    seen = build_model(name, 5, 8, channels=2).seen
    assert isinstance(seen, dict)
    given = {**seen, **seen.get("more", {})}
    assert {key: given[key] for key in ("num_classes", "image_size", "channels") if key in given} == called_with


def test_trying_a_model_leaves_it_and_the_generators_alone(write: Write) -> None:
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
        "    return Looking()\n",
        module="own_models",
    )
    torch.manual_seed(0)
    nn.Linear(3, 4)  # all that the model draws
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = build_model(name, 4)
    check_scores(name, model, 4, 6)
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
        ("def make():\n    pass\n", "must return an nn.Module, got NoneType$"),
        ("def make():\n    return [1]\n", "must return an nn.Module, got list$"),
        (
            "def make(num_classes, depth):\n    pass\n",
            r"built by calling it, which raised TypeError: make\(\) missing .* 'depth'$",
        ),
        ("def make():\n    raise OSError('no weights\\nhere')\n", "which raised OSError: no weights here$"),
        ("def made():\n    pass\n", "model own_models:make: unknown name in own_models 'make': did you mean 'made'"),
        ("def make(:\n", "importing own_models failed: SyntaxError: invalid syntax"),
    ],
)
def test_what_is_wrong_with_a_model_of_ones_own_is_one_line(source: str, message: str, write: Write) -> None:
    name = write(source, module="own_models")
    with pytest.raises(UserError, match=message) as raised:
        check_scores(name, build_model(name, 10, 16), 10, 16)
    assert "\n" not in str(raised.value)
    assert "own_models" in str(raised.value)


@pytest.mark.parametrize("name", [":make", "own_models:", "own models:make", "a..b:make", "a:b:c", "a:b.c"])
def test_a_name_of_another_form_says_how_it_must_be(name: str) -> None:
    with pytest.raises(UserError, match=r"must be given as package\.module:function, got '"):
        build_model(name, 10)
