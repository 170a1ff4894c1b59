"""Distillation: the loss against sums in Python floats, the policy in training loops, and the flags of a script."""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.compression.distillation import (
    DistillationLossWeights,
    KnowledgeDistillationPolicy,
    distillation_loss,
)
from trainables.compression.distillation_flags import add_distillation_args, distillation_fields
from trainables.errors import UserError


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def divergence_by_hand(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """T^2 times the mean over rows of the sum of p (log p - log q)."""
    total, rows = 0.0, 0
    for s, t in zip(student.flatten(0, -2).tolist(), teacher.flatten(0, -2).tolist(), strict=True):
        q, p = softmax(s, temperature), softmax(t, temperature)
        total += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        rows += 1
    return temperature**2 * total / rows


def ce_by_hand(logits: Tensor, labels: Tensor) -> float:
    rows = zip(logits.flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True)
    return sum(-math.log(softmax(row, 1.0)[label]) for row, label in rows) / labels.numel()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_the_weighted_sum(shape: tuple[int, ...], temperature: float) -> None:
    student, teacher = draw(*shape, seed=1), draw(*shape, seed=2)
    labels = torch.randint(5, shape[:-1], generator=torch.Generator().manual_seed(3))
    loss = distillation_loss(
        student,
        teacher,
        torch.tensor(1.25, dtype=torch.float64),
        DistillationLossWeights(0.7, 0.2, 0.4),
        temperature,
        labels,
    )
    expected = 0.2 * 1.25 + 0.7 * divergence_by_hand(student, teacher, temperature) + 0.4 * ce_by_hand(teacher, labels)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_the_gradient_is_the_difference_of_the_shares(shape: tuple[int, ...], temperature: float) -> None:
    student, teacher = draw(*shape, seed=1).requires_grad_(), draw(*shape, seed=2).requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    distillation_loss(student, teacher, zero, DistillationLossWeights(0.7, 0.2), temperature).backward()
    q, p = (torch.softmax(x.detach() / temperature, -1) for x in (student, teacher))
    rows = student.numel() // 5
    assert student.grad is not None
    assert torch.allclose(student.grad, 0.7 * temperature * (q - p) / rows, rtol=1e-12, atol=1e-15)
    assert teacher.grad is None


def test_half_precision_is_computed_in_single() -> None:
    # The sum over the rows, 120,000, is above the greatest number of half precision.
    student = torch.tensor([[0.0, -60.0]], dtype=torch.half).repeat(2000, 1)
    teacher = torch.tensor([[-60.0, 0.0]], dtype=torch.half).repeat(2000, 1)
    loss = distillation_loss(student, teacher, torch.tensor(0.0), DistillationLossWeights(1.0, 0.0), temperature=1.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(60)


def network(seed: int, hidden: int = 6) -> nn.Sequential:
    """With dropout and batch norm, which tell the modes apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.5), nn.ReLU(), nn.Linear(hidden, 3)
        )


class Counted(nn.Module):
    """Counts its calls, and those that autograd records."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0
        self.recorded_calls = 0

    def forward(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        self.recorded_calls += torch.is_grad_enabled()
        return self.inner(*args, **named)


class Returns(nn.Module):
    """Gives what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("attached", [False, True])
def test_a_step_is_that_of_the_loss_written_out(attached: bool) -> None:
    inputs, labels = batch()
    student, teacher = network(1), network(2, hidden=11)
    reference, expert = copy.deepcopy(student), copy.deepcopy(teacher).eval()
    policy = KnowledgeDistillationPolicy(student, teacher, 3.0, DistillationLossWeights(0.7, 0.2))
    torch.manual_seed(9)
    if attached:
        policy.attach()
        output = student(inputs)
    else:
        output = policy.forward(inputs)
    policy.before_backward(F.cross_entropy(output, labels)).backward()
    torch.manual_seed(9)
    scores = reference(inputs)
    distillation_loss(
        scores, expert(inputs), F.cross_entropy(scores, labels), DistillationLossWeights(0.7, 0.2), temperature=3.0
    ).backward()
    assert torch.equal(output, scores)
    for ours, theirs in zip(gradients(student), gradients(reference), strict=True):
        assert torch.equal(ours, theirs)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_teacher_stays_as_it_is() -> None:
    student, teacher = network(1), network(2)
    before = copy.deepcopy(teacher.state_dict())
    policy = KnowledgeDistillationPolicy(student, teacher)
    policy.attach()
    teacher.train()  # somebody does
    inputs, labels = batch()
    policy.before_backward(F.cross_entropy(student(inputs), labels)).backward()
    assert not any(module.training for module in teacher.modules())
    assert student.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_attached_it_watches_training_alone() -> None:
    student, teacher = network(1), Counted(network(2))
    policy = KnowledgeDistillationPolicy(student, teacher)
    inputs, labels = batch()
    student(inputs)
    assert teacher.calls == 0
    policy.attach()
    policy.attach()  # once is enough
    assert policy.is_attached
    student.eval()
    student(inputs)
    student.train()
    with torch.no_grad():
        student(inputs)
    assert teacher.calls == 0
    loss = F.cross_entropy(student(inputs), labels)
    assert teacher.calls == 1
    policy.before_backward(loss)
    policy.detach()
    student(inputs)
    assert not policy.is_attached
    assert teacher.calls == 1


def test_forward_outside_of_its_time_is_the_students() -> None:
    """A scheduler attaches the policy when its epochs begin; a published loop calls forward in all of them."""
    student, teacher = network(1), Counted(network(2))
    policy = KnowledgeDistillationPolicy(student, teacher)
    inputs, labels = batch()
    for _ in range(3):
        policy.forward(inputs)
    policy.attach()
    policy.before_backward(F.cross_entropy(policy.forward(inputs), labels))
    policy.detach()
    calls = teacher.calls
    assert torch.equal(policy.forward(inputs).isfinite(), torch.ones(8, 3, dtype=torch.bool))
    assert teacher.calls == calls


def test_the_teachers_loss_is_a_constant_that_needs_labels() -> None:
    inputs, labels = batch()
    values = {}
    grads = {}
    for given in (None, labels):
        student, teacher = network(1).eval(), network(2)
        policy = KnowledgeDistillationPolicy(student, teacher, 1.0, DistillationLossWeights(0.5, 0.5, 2.0))
        loss = policy.before_backward(F.cross_entropy(policy.forward(inputs), labels), given)
        loss.backward()
        values[given is None], grads[given is None] = loss.item(), gradients(student)
        constant = F.cross_entropy(teacher(inputs), labels).item()
    assert values[False] == pytest.approx(values[True] + 2.0 * constant, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(grads[True], grads[False], strict=True))


def test_a_copy_of_the_student_is_no_student() -> None:
    student, teacher = network(1), Counted(network(2))
    policy = KnowledgeDistillationPolicy(student, teacher)
    policy.attach()
    other = copy.deepcopy(student)
    other(batch()[0]).sum().backward()
    assert teacher.calls == 0
    inputs, labels = batch()
    policy.before_backward(F.cross_entropy(student(inputs), labels))
    assert teacher.calls == 1


@pytest.mark.parametrize("attached", [False, True])
def test_two_calls_for_one_loss(attached: bool) -> None:
    student, teacher = network(1), Counted(network(2))
    policy = KnowledgeDistillationPolicy(student, teacher)
    inputs, labels = batch()
    if attached:
        policy.attach()
    call = student if attached else policy.forward
    loss = F.cross_entropy(call(inputs), labels) + call(inputs).sum()
    with pytest.raises(UserError) as raised:
        policy.before_backward(loss)
    assert str(raised.value) == (
        "distillation needs a loss made of one call of the student, it was called 2 times since the last loss: call "
        "it in eval mode or without gradients for anything else"
    )
    assert teacher.calls == 1  # not for a loss that is refused
    policy.before_backward(F.cross_entropy(call(inputs), labels))  # the next step begins anew


def test_a_loss_without_the_student() -> None:
    policy = KnowledgeDistillationPolicy(network(1), network(2))
    policy.before_backward(policy.forward(batch()[0]).sum())
    with pytest.raises(UserError) as raised:
        policy.before_backward(torch.tensor(1.0))
    assert str(raised.value) == (
        "distillation needs the student's logits: call the policy's forward(inputs) instead of the model, or its "
        "attach(), before the loss"
    )


@pytest.mark.parametrize(
    ("output", "got"),
    [
        ((torch.zeros(2, 3), torch.zeros(2)), "got tuple"),
        (torch.zeros(2, 3, 4, 4), "got shape [2, 3, 4, 4] of torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), "got shape [2, 3] of torch.int64"),
    ],
)
def test_outputs_that_are_no_logits(output: Any, got: str) -> None:
    good = Returns(torch.zeros(2, 3))
    rule = "distillation needs a {} that returns one tensor of logits, (B, C) or (B, T, C), {}"
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(Returns(output), good).forward(torch.zeros(2))
    assert str(raised.value) == rule.format("student", got)
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(Returns(torch.zeros(2, 3)), Returns(output)).forward(torch.zeros(2))
    assert str(raised.value) == rule.format("teacher", got)


def test_a_teacher_that_is_the_student() -> None:
    student = network(1)
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(student, nn.Sequential(student[0], nn.Linear(6, 3)))
    assert str(raised.value) == "the teacher must be another model than the student, they share 0.weight"
    assert student[0].weight.requires_grad  # nothing was frozen


def test_numbers_out_of_range() -> None:
    for temperature in (0.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"^temperature of distillation must be a number > 0, got {temperature}$"):
            KnowledgeDistillationPolicy(network(1), network(2), temperature)
    with pytest.raises(UserError, match=r"^loss weight student of distillation must be a number >= 0, got -0.5$"):
        KnowledgeDistillationPolicy(network(1), network(2), 1.0, DistillationLossWeights(0.5, -0.5))


DEFAULTS: dict[str, Any] = {
    "kd_teacher": None, "kd_pretrained": False, "kd_resume": None, "kd_temp": 1.0, "kd_distill_wt": 0.5,
    "kd_student_wt": 0.5, "kd_teacher_wt": 0.0, "kd_start_epoch": 0,
}  # fmt: skip


def parser(**more: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100))
    add_distillation_args(made, **more)
    return made


def test_the_published_defaults() -> None:
    assert vars(parser().parse_args([])) == DEFAULTS


def test_every_flag() -> None:
    for flags, name, text, value in (
        (("--kd-teacher",), "kd_teacher", "resnet56", "resnet56"),
        (("--kd-resume",), "kd_resume", "best.pt", "best.pt"),
        (("--kd-temperature", "--kd-temp"), "kd_temp", "4", 4.0),
        (("--kd-distill-wt", "--kd-dw"), "kd_distill_wt", "0.7", 0.7),
        (("--kd-student-wt", "--kd-sw"), "kd_student_wt", "0", 0.0),
        (("--kd-teacher-wt", "--kd-tw"), "kd_teacher_wt", "1e-1", 0.1),
        (("--kd-start-epoch",), "kd_start_epoch", "7", 7),
    ):
        for flag in flags:
            assert vars(parser().parse_args([flag, text])) == {**DEFAULTS, name: value}
    assert vars(parser().parse_args(["--kd-pretrained"])) == {**DEFAULTS, "kd_pretrained": True}
    assert vars(parser(enable_pretrained=False).parse_args([])) == DEFAULTS


def test_flags_are_fields_of_a_trial() -> None:
    parser = argparse.ArgumentParser()
    add_distillation_args(parser)
    assert distillation_fields(parser.parse_args([])) == {}
    given = ["--kd-resume", "t.pt", "--kd-temp", "4", "--kd-dw", "0.7", "--kd-sw", "0.3", "--kd-start-epoch", "1"]
    assert distillation_fields(parser.parse_args(given)) == {
        "distill_checkpoint": "t.pt", "distill_temperature": 4.0, "distill_weight": 0.7, "distill_start_epoch": 1,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"need a teacher: give --kd-teacher NAME or --kd-resume FILE, too"):
        distillation_fields(parser.parse_args(["--kd-temp", "4"]))
    for more, message in (
        (["--kd-tw", "1"], r"must be 1 together, .*, got 0\.7, 0\.3, 1: scale the learning rate"),
        (["--kd-sw", "0.5"], r"got 0\.7, 0\.5, 0"),
        (["--kd-pretrained"], "give them by --kd-resume FILE"),
    ):
        with pytest.raises(UserError, match=message):
            distillation_fields(parser.parse_args([*given, *more]))
