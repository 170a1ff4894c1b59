"""The loss of distillation against sums in Python floats, and its gradient against the closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainables.compression.distillation import distillation_loss
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
        temperature=temperature,
        distill_weight=0.7,
        student_weight=0.2,
        teacher_weight=0.4,
        labels=labels,
    )
    expected = 0.2 * 1.25 + 0.7 * divergence_by_hand(student, teacher, temperature) + 0.4 * ce_by_hand(teacher, labels)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_the_gradient_is_the_difference_of_the_shares(shape: tuple[int, ...], temperature: float) -> None:
    student, teacher = draw(*shape, seed=1).requires_grad_(), draw(*shape, seed=2).requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    distillation_loss(
        student, teacher, zero, temperature=temperature, distill_weight=0.7, student_weight=0.2
    ).backward()  # fmt: skip
    q, p = (torch.softmax(x.detach() / temperature, -1) for x in (student, teacher))
    rows = student.numel() // 5
    assert student.grad is not None
    assert torch.allclose(student.grad, 0.7 * temperature * (q - p) / rows, rtol=1e-12, atol=1e-15)
    assert teacher.grad is None


def test_half_precision_is_computed_in_single() -> None:
    # The sum over the rows, 120,000, is above the greatest number of half precision.
    student = torch.tensor([[0.0, -60.0]], dtype=torch.half).repeat(2000, 1)
    teacher = torch.tensor([[-60.0, 0.0]], dtype=torch.half).repeat(2000, 1)
    loss = distillation_loss(
        student, teacher, torch.tensor(0.0), temperature=1.0, distill_weight=1.0, student_weight=0.0
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(60)


def test_without_labels_the_teachers_part_is_left_out() -> None:
    student, teacher, ce = draw(4, 6, seed=5), draw(4, 6, seed=6), torch.tensor(1.0)
    shared = {"temperature": 1.0, "distill_weight": 0.5, "student_weight": 0.5}
    without = distillation_loss(student, teacher, ce, teacher_weight=3.0, **shared)
    assert torch.equal(without, distillation_loss(student, teacher, ce, **shared))


def test_labels_of_another_shape() -> None:
    logits = draw(2, 3, 6, seed=1)
    with pytest.raises(UserError) as raised:
        distillation_loss(
            logits, logits, torch.tensor(1.0), temperature=1.0, distill_weight=1.0, student_weight=1.0,
            teacher_weight=1.0, labels=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
    assert str(raised.value) == "labels must have the logits' shape without the classes, [2, 3], got [2]"
