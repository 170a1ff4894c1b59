"""Distillation in a training loop: collects the student's and the teacher's logits of a step and computes the loss.

Shapes: B samples, C classes, T positions; logits (B, C), (B, T, C) or, flattened to rows, (N, C).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.compression.distillation.loss import DistillationLossWeights, distillation_loss
from trainables.errors import UserError


class KnowledgeDistillationPolicy:
    """Run a teacher on the student's inputs and add the distillation term to the loss.

    The loop either calls `forward` instead of the student, or calls `attach` once and then the student as usual. For
    each loss it calls `before_backward`. After the first `attach`, the policy acts only between `attach` and `detach`,
    however the student is called.

    The teacher is always frozen and in eval mode, whatever the student's mode. It is called after the student, under
    the same autocast and on the same inputs; a student that changes its inputs in place changes the teacher's too.

    Args:
        student_model: the trained model; it must return one tensor of logits.
        teacher_model: another model that returns logits of the same shape; it is moved to the student's device.
        temperature: T, > 0.
        loss_weights: of the terms. ``teacher`` adds a constant, and only if `before_backward` is given labels.

    Raises:
        UserError: a number is out of range, or the teacher shares parameters with the student.
    """

    def __init__(
        self,
        student_model: nn.Module,
        teacher_model: nn.Module,
        temperature: float = 1.0,
        loss_weights: DistillationLossWeights = DistillationLossWeights(),  # noqa: B008  # it cannot be changed
    ) -> None:
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature of distillation must be a number > 0, got {temperature}")
        loss_weights = DistillationLossWeights(*loss_weights)
        for name, weight in zip(loss_weights._fields, loss_weights, strict=True):
            if not 0 <= weight < math.inf:
                raise UserError(f"loss weight {name} of distillation must be a number >= 0, got {weight}")
        names = {id(parameter): name for name, parameter in student_model.named_parameters()}
        shared = [names[id(parameter)] for parameter in teacher_model.parameters() if id(parameter) in names]
        if shared:
            raise UserError(f"the teacher must be another model than the student, they share {shared[0]}")
        self.student = student_model
        self.teacher = teacher_model.eval().requires_grad_(False)
        self.temperature = temperature
        self.loss_weights = loss_weights
        self._follow(next((parameter.device for parameter in student_model.parameters()), None))
        self._handle: RemovableHandle | None = None
        self._was_attached = False
        self._in_forward = False
        self.clear()

    @property
    def calls_teacher_each_step(self) -> bool:
        """Return whether a training step runs the teacher because the loss needs its logits."""
        return self.loss_weights.distill != 0 or self.loss_weights.teacher != 0

    @property
    def is_attached(self) -> bool:
        """Return whether the hook on the student is installed."""
        return self._handle is not None

    def attach(self) -> None:
        """Install a hook that runs the teacher at each call of the student in training mode with gradients enabled."""
        if self._handle is None:
            self.clear()
            self._was_attached = True
            self._handle = self.student.register_forward_hook(_Watch(self), with_kwargs=True)

    def detach(self) -> None:
        """Remove the hook from the student and discard stored logits."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.clear()

    def clear(self) -> None:
        """Discard the stored logits, for example after a step whose loss is not used."""
        self._calls = 0
        self._student_logits: Tensor | None = None
        self._teacher_logits: Tensor | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the student's output for these inputs; with gradients enabled, also run the teacher on them.

        Raises:
            UserError: student or teacher does not return logits.
        """
        self._in_forward = True
        try:
            output = self.student(*inputs, **named)
        finally:
            self._in_forward = False
        if self.is_attached or not self._was_attached:
            self._keep(inputs, named, output)
        return output

    def before_backward(self, loss: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss for the backward pass, computed from the last call of the student.

        Args:
            loss: the student's loss against the labels, a scalar.
            labels: class numbers, int64, needed only for the value of the teacher's term, which has no gradient.

        Raises:
            UserError: the student was not called since the last loss, or more than once.
        """
        if not self.calls_teacher_each_step:
            return self.loss_weights.student * loss
        calls, student, teacher = self._calls, self._student_logits, self._teacher_logits
        self.clear()
        if calls > 1:
            raise UserError(
                f"distillation needs a loss made of one call of the student, it was called {calls} times since the "
                "last loss: call it in eval mode or without gradients for anything else"
            )
        if student is None or teacher is None:
            raise UserError(
                "distillation needs the student's logits: call the policy's forward(inputs) instead of the model, or "
                "its attach(), before the loss"
            )
        return distillation_loss(
            student,
            teacher,
            loss,
            temperature=self.temperature,
            distill_weight=self.loss_weights.distill,
            student_weight=self.loss_weights.student,
            teacher_weight=self.loss_weights.teacher,
            labels=labels,
        )

    def watch(self, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        """Handle a call of the student that the hook reports."""
        if self.student.training and not self._in_forward:
            self._keep(args, named, output)

    def _keep(self, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or not self.calls_teacher_each_step:
            return
        self._calls += 1
        self._student_logits = self._teacher_logits = None
        if self._calls > 1:  # before_backward will raise
            return
        self._student_logits = _logits(output, "student")
        self._follow(self._student_logits.device)
        if self.teacher.training:
            self.teacher.eval()
        with torch.no_grad():
            self._teacher_logits = _logits(self.teacher(*args, **named), "teacher")

    def _follow(self, device: torch.device | None) -> None:
        """Move the teacher to the student's device."""
        here = next((parameter.device for parameter in self.teacher.parameters()), device)
        if device is not None and here != device:
            self.teacher.to(device)


class _Watch:
    """The hook on the student. On a deep copy of the student it does nothing."""

    def __init__(self, policy: KnowledgeDistillationPolicy | None) -> None:
        self._policy = policy

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if self._policy is not None:
            self._policy.watch(args, named, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(None)


def _logits(output: Any, who: str) -> Tensor:
    rule = f"distillation needs a {who} that returns one tensor of logits, (B, C) or (B, T, C)"
    if not isinstance(output, Tensor):
        raise UserError(f"{rule}, got {type(output).__name__}")
    if output.dim() not in (2, 3) or not output.is_floating_point():
        raise UserError(f"{rule}, got shape {list(output.shape)} of {output.dtype}")
    return output
