"""The loss of knowledge distillation.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531), section 2.

Symbols: s, t logits of student and teacher; T temperature; p = softmax(t / T), q = softmax(s / T); w_d, w_s, w_t the
weights; N rows, C classes.

    L = w_s CE(s, labels) + w_d T^2 mean_n sum_c p (log p - log q) + w_t CE(t, labels)

T^2 keeps the gradients of both terms at a similar magnitude when T changes: the gradient of the second term with
respect to s is w_d T (q - p) / N.

Shapes: logits (B, C), then N = B, or (B, T', C) for sequences, then N = B T'; labels as the logits without C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.errors import UserError


class DistillationLossWeights(NamedTuple):
    """Weights of the terms of the loss, each >= 0."""

    distill: float = 0.5
    """w_d, of student against teacher."""
    student: float = 0.5
    """w_s, of student against labels."""
    teacher: float = 0.0
    """w_t, of teacher against labels; this term is constant because the teacher is not trained."""


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
    """Return L, a scalar; gradients flow to the student only.

    Args:
        student_logits: s.
        teacher_logits: t, of the same shape.
        student_ce: the student's loss against the labels, a scalar; any training loss.
        temperature: T, > 0.
        distill_weight: w_d.
        student_weight: w_s.
        teacher_weight: w_t.
        labels: class numbers, int64, only for the teacher's term. Without them that term, a constant, is left out.

    Raises:
        UserError: the logits have different shapes, or the labels do not match them.
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
    """Return logits as (N, C) in at least float32, because sums in half precision overflow at 65,504."""
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
