"""The loss of knowledge distillation.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531), section 2.

Symbols: s, t logits of student and teacher; T temperature; p = softmax(t / T), q = softmax(s / T); w_d, w_s, w_t the
weights; N rows, C classes.

    L = w_s CE(s, labels) + w_d T^2 mean_n sum_c p (log p - log q) + w_t CE(t, labels)

T^2 keeps the gradients of both terms of one size when T changes: with regard to s, that of the second is
w_d T (q - p) / N.

Shapes: logits (B, C), then N = B, or (B, T', C) for sequences, then N = B T'; labels as the logits without C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.errors import UserError


class DistillationLossWeights(NamedTuple):
    """What the parts of the loss are multiplied by, each >= 0."""

    distill: float = 0.5
    """w_d, of student against teacher."""
    student: float = 0.5
    """w_s, of student against labels."""
    teacher: float = 0.0
    """w_t, of teacher against labels: a constant, for the teacher does not learn."""


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_ce: Tensor,
    *,
    temperature: float,
    distill_weight: float,
    student_weight: float,
    teacher_weight: float = 0.0,
    labels: Tensor | None = None,
) -> Tensor:
    """L, a scalar; gradients flow to the student alone.

    Args:
        student_logits: s.
        teacher_logits: t, of the same shape.
        student_ce: the student's loss against the labels, a scalar; whatever loss the training has.
        temperature: T, > 0.
        distill_weight: w_d.
        student_weight: w_s.
        teacher_weight: w_t.
        labels: class numbers, int64, for the teacher's part alone. Without them that part, a constant, is left out.

    Raises:
        UserError: logits of two shapes, or labels of another shape than theirs.
    """
    if student_logits.shape != teacher_logits.shape:
        raise UserError(
            "student and teacher must give logits of one shape, got "
            f"{list(student_logits.shape)} and {list(teacher_logits.shape)}"
        )
    student, teacher = _rows(student_logits), _rows(teacher_logits.detach())
    log_q = F.log_softmax(student / temperature, dim=1)
    log_p = F.log_softmax(teacher / temperature, dim=1)
    divergence = F.kl_div(log_q, log_p, reduction="sum", log_target=True) / len(student)
    loss = student_weight * student_ce + distill_weight * temperature**2 * divergence
    if teacher_weight == 0 or labels is None:
        return loss
    if labels.shape != student_logits.shape[:-1]:
        raise UserError(
            f"labels must have the logits' shape without the classes, {list(student_logits.shape[:-1])}, got "
            f"{list(labels.shape)}"
        )
    return loss + teacher_weight * F.cross_entropy(teacher, labels.flatten())


def _rows(logits: Tensor) -> Tensor:
    """(N, C), at least float32: sums in half precision overflow at 65,504."""
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
