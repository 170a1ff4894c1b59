"""The policy in training loops: what it runs, what it keeps, and the loss it gives."""

from __future__ import annotations

import copy
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
from trainables.errors import UserError
from trainables.runtime.isolation import generators_state


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
        scores, expert(inputs), F.cross_entropy(scores, labels), temperature=3.0, distill_weight=0.7, student_weight=0.2
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


def test_the_teacher_draws_on_no_generator() -> None:
    inputs, _ = batch()
    student = network(1).eval()  # draws nothing itself
    policy = KnowledgeDistillationPolicy(student, network(2))
    before = generators_state(torch.device("cpu"))
    policy.forward(inputs)
    after = generators_state(torch.device("cpu"))
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"][::2] == after["python"][::2]
    assert torch.equal(torch.as_tensor(before["python"][1]), torch.as_tensor(after["python"][1]))
    assert torch.equal(before["numpy"][1], after["numpy"][1])


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


def test_forward_of_an_attached_policy_runs_the_teacher_once() -> None:
    student, teacher = network(1), Counted(network(2))
    policy = KnowledgeDistillationPolicy(student, teacher)
    policy.attach()
    inputs, labels = batch()
    for _ in range(3):
        policy.before_backward(F.cross_entropy(policy.forward(inputs), labels))
    assert teacher.calls == 3
    assert teacher.recorded_calls == 0


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
        ({"logits": torch.zeros(2, 3)}, "got dict"),
        (torch.zeros(2, 3, 4, 4), "got shape [2, 3, 4, 4] of torch.float32"),
        (torch.zeros(2), "got shape [2] of torch.float32"),
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


def test_a_teacher_of_other_classes() -> None:
    policy = KnowledgeDistillationPolicy(nn.Linear(4, 3), nn.Linear(4, 5))
    loss = policy.forward(batch()[0]).sum()
    with pytest.raises(UserError) as raised:
        policy.before_backward(loss)
    assert str(raised.value) == "student and teacher must give logits of one shape, got [8, 3] and [8, 5]"


def test_a_teacher_that_is_the_student() -> None:
    student = network(1)
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(student, nn.Sequential(student[0], nn.Linear(6, 3)))
    assert str(raised.value) == "the teacher must be another model than the student, they share 0.weight"
    assert student[0].weight.requires_grad  # nothing was frozen


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_temperatures_out_of_range(temperature: float) -> None:
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(network(1), network(2), temperature)
    assert str(raised.value) == f"temperature of distillation must be a number > 0, got {temperature}"


def test_negative_weights() -> None:
    with pytest.raises(UserError) as raised:
        KnowledgeDistillationPolicy(network(1), network(2), 1.0, DistillationLossWeights(0.5, -0.5))
    assert str(raised.value) == "loss weight student of distillation must be a number >= 0, got -0.5"


def test_a_student_learns_what_its_teacher_knows() -> None:
    """No label is seen: on inputs it has not met, the student takes over the teacher's classes."""
    torch.manual_seed(0)
    teacher, student = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    unseen = torch.randn(200, 4)

    def agreement() -> float:
        return (student(unseen).argmax(1) == teacher(unseen).argmax(1)).double().mean().item()

    before = agreement()
    policy = KnowledgeDistillationPolicy(student, teacher, 2.0, DistillationLossWeights(1.0, 0.0))
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    for _ in range(150):
        loss = policy.before_backward(policy.forward(torch.randn(32, 4)).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.7
    assert agreement() > 0.95
