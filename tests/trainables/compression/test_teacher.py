"""Teachers by name, by function and like the student; and checkpoints in the forms that they come in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables import workloads
from trainables.compression.distillation import build_teacher
from trainables.compression.schedule.configs import KnowledgeDistillationConfig
from trainables.errors import UserError
from trainables.workloads.models import build_model


def settings(**arguments: Any) -> KnowledgeDistillationConfig:
    return KnowledgeDistillationConfig(**arguments)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: nn.Module, weights: dict[str, Tensor]) -> bool:
    own = one.state_dict()
    return own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)


def make_small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.fixture
def small() -> nn.Module:
    return make_small()


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of another small model, and what is in it."""
    weights = state(make_small())
    path = tmp_path / "trained.pt"
    torch.save(weights, path)
    return path, weights


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's with teachers, in the working directory."""
    name = "teachers_of_mine"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def plain(): return nn.Linear(2, 2)\n"
        "def sized(num_classes, channels): return nn.Conv2d(channels, num_classes, 1)\n"
        "def loaded(pretrained=False):\n"
        "    model = nn.Linear(2, 2)\n"
        "    nn.init.constant_(model.weight, 3.0 if pretrained else 0.0)\n"
        "    return model\n"
        "def broken(): raise KeyError('weights')\n"
        "def number(): return 3\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_model_of_the_registry_takes_the_students_channels_and_classes(tmp_path: Path) -> None:
    reference = build_model("resnet56", 7, channels=1)
    torch.save(reference.state_dict(), tmp_path / "expert.pt")
    student = build_model("resnet20", 7, channels=1)
    teacher = build_teacher(settings(teacher="resnet56", checkpoint=str(tmp_path / "expert.pt")), student)
    assert same(teacher, state(reference))
    images = torch.zeros(2, 1, 32, 32)
    assert teacher(images).shape == student(images).shape == (2, 7)


@pytest.mark.parametrize("name", ["same", None])
def test_a_teacher_like_the_student(trained: tuple[Path, dict[str, Tensor]], name: str | None) -> None:
    path, weights = trained
    student = make_small()
    before = state(student)
    for make in (make_small, None):
        teacher = build_teacher(settings(teacher=name, checkpoint=str(path)), student, make)
        assert same(teacher, weights)
        assert {id(p) for p in teacher.parameters()}.isdisjoint(id(p) for p in student.parameters())
    assert same(student, before)


def test_a_teacher_for_the_digits_out_of_a_run_of_tune_cac(tmp_path: Path) -> None:
    workload = workloads.build("digits")
    expert = workload.make_model()
    torch.save({"config": {"seed": 1}, "epoch": 3, "model": expert.state_dict(), "row": None}, tmp_path / "run.pt")
    for checkpoint in (tmp_path / "run.pt", tmp_path):
        teacher = build_teacher(
            settings(checkpoint=str(checkpoint)), workload.make_model(), workload.make_model
        )  # fmt: skip
        assert same(teacher, state(expert))


def test_functions_of_the_users(own_module: str, small: nn.Module) -> None:
    with pytest.warns(UserWarning, match="learns from random scores"):
        assert isinstance(build_teacher(settings(teacher=f"{own_module}:plain"), small), nn.Linear)
    with pytest.warns(UserWarning, match="learns from random scores"):
        sized = build_teacher(settings(teacher=f"{own_module}:sized"), small)
    assert (sized.in_channels, sized.out_channels) == (1, 5)


@pytest.mark.filterwarnings("error")
def test_a_function_can_bring_pretrained_weights(own_module: str, small: nn.Module) -> None:
    teacher = build_teacher(settings(teacher=f"{own_module}:loaded", pretrained=True), small)
    assert isinstance(teacher.weight, Tensor)
    assert teacher.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_an_untrained_teacher_is_warned_of_and_always_the_same(small: nn.Module) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.warns(UserWarning, match="the teacher same has neither checkpoint nor pretrained weights: unless"):
            made.append(build_teacher(settings(teacher="same"), small, make_small))
    assert same(made[0], state(made[1]))


def refused(student: nn.Module, **arguments: Any) -> str:
    with pytest.raises(UserError) as raised:
        build_teacher(settings(**arguments), student, make_small)
    return str(raised.value)


def test_models_here_have_no_pretrained_weights(small: nn.Module) -> None:
    assert refused(small, teacher="same", pretrained=True) == (
        "there are no pretrained weights for the teacher same: give a checkpoint, or package.module:function that "
        "loads some"
    )


def test_a_student_that_does_not_tell_its_sizes() -> None:
    message = "but the student has no convolution or no linear layer to tell them: give package.module:function"
    assert message in refused(nn.Linear(3, 4), teacher="resnet20")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "must be built by calling it, which raised KeyError: 'weights'"),
        ("number", "must return an nn.Module, got int"),
        ("value", "must be a function, got int"),
    ],
)
def test_functions_that_make_no_model(own_module: str, small: nn.Module, name: str, message: str) -> None:
    assert refused(small, teacher=f"{own_module}:{name}") == f"teacher {own_module}:{name} {message}"


def test_a_file_that_is_not_there(small: nn.Module, tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path):
        assert refused(small, checkpoint=str(path)) == f"teacher checkpoint {path}: there is no such file"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_file_that_is_no_checkpoint(small: nn.Module, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.pt"
    path.write_bytes(content)
    message = refused(small, checkpoint=str(path))
    assert message.startswith(
        f"teacher checkpoint {path} must hold tensors by name, as torch.save(model.state_dict(), file) writes them, "
        "but reading it raised "
    )
    assert "\n" not in message


def test_weights_of_another_architecture(small: nn.Module, tmp_path: Path) -> None:
    weights = state(small)
    weights["0.weight"] = torch.zeros(8, 1, 3, 3)
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
        del weights[name]
    weights["9.weight"] = torch.zeros(2)
    torch.save(weights, tmp_path / "other.pt")
    before = state(small)
    message = refused(small, checkpoint=str(tmp_path / "other.pt"))
    assert message.startswith(f"teacher checkpoint {tmp_path / 'other.pt'} does not fit the teacher: ")
    for part in ('"1.weight"', 'Unexpected key(s) in state_dict: "9.weight"', "size mismatch for 0.weight"):
        assert part in message
    assert same(small, before)
