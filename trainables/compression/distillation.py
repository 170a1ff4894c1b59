"""Knowledge distillation: a model learns from another model's logits; docs/compression.md has the loss.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015 (arXiv:1503.02531), section 2.
T^2 keeps the gradients of both terms at a similar magnitude when T changes: that of the second with respect to the
student's logits s is w_d T (q - p) / N, with p = softmax(t / T), q = softmax(s / T), t the teacher's, N rows.

Shapes: logits (B, C), then N = B, or (B, T', C) for sequences, then N = B T'; labels as the logits without C.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.compression.model_copies import bare_copy
from trainables.compression.schedule.configs import KnowledgeDistillationConfig
from trainables.compression.schedule.names import without_parallel
from trainables.errors import UserError, unknown_name
from trainables.runtime.isolation import kept_generators
from trainables.workloads.models import MODELS, build_model
from trainables.workloads.models.custom import called_with_sizes
from trainables.workloads.models.pretrained import read_weights


class DistillationLossWeights(NamedTuple):
    """Weights w_d, w_s and w_t of the terms of the loss, each >= 0."""

    distill: float = 0.5
    student: float = 0.5
    teacher: float = 0.0


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_ce: Tensor,
    weights: DistillationLossWeights,
    temperature: float,
    labels: Tensor | None = None,
) -> Tensor:
    """Return the loss, a scalar; gradients flow to the student only.

    ``student_ce`` is the student's loss against the labels, any scalar training loss. ``labels``, int64, are for the
    teacher's term, a constant, which is left out without them. UserError if shapes do not match.
    """
    if student_logits.shape != teacher_logits.shape:
        raise UserError(
            "student and teacher must give logits of one shape, got "
            f"{list(student_logits.shape)} and {list(teacher_logits.shape)}"
        )
    student, teacher = _rows(student_logits), _rows(teacher_logits.detach())
    log_q = F.log_softmax(student / temperature, dim=1)
    log_p = F.log_softmax(teacher / temperature, dim=1)
    divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    loss = weights.student * student_ce + weights.distill * temperature**2 * divergence
    if weights.teacher == 0 or labels is None:
        return loss
    if labels.shape != student_logits.shape[:-1]:
        raise UserError(
            f"labels must have the logits' shape without the classes, {list(student_logits.shape[:-1])}, got "
            f"{list(labels.shape)}"
        )
    return loss + weights.teacher * F.cross_entropy(teacher, labels.flatten())


def _rows(logits: Tensor) -> Tensor:
    """Return logits as (N, C) in at least float32, because sums in half precision overflow at 65,504."""
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))


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
        for name, weight in loss_weights._asdict().items():
            if not 0 <= weight < math.inf:
                raise UserError(f"loss weight {name} of distillation must be a number >= 0, got {weight}")
        theirs = {id(parameter) for parameter in teacher_model.parameters()}
        for name, parameter in student_model.named_parameters():
            if id(parameter) in theirs:
                raise UserError(f"the teacher must be another model than the student, they share {name}")
        self.student = student_model
        self.teacher = teacher_model.eval().requires_grad_(False)
        self.temperature = temperature
        self.loss_weights = loss_weights
        self._handle: RemovableHandle | None = None
        self._was_attached = False
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

        def watch(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if module is self.student and module.training:  # a copy of the student has the hook, too
                self._keep(args, named, output)

        if self._handle is None:
            self.clear()
            self._was_attached = True
            self._handle = self.student.register_forward_hook(watch, with_kwargs=True)

    def detach(self) -> None:
        """Remove the hook from the student and discard stored logits."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.clear()

    def clear(self) -> None:
        """Discard the stored logits, for example after a step whose loss is not used."""
        self._calls = 0
        self._logits: tuple[Tensor, Tensor] | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the student's output for these inputs; with gradients enabled, also run the teacher on them."""
        output = self.student(*inputs, **named)
        if not self._was_attached:  # else the hook does
            self._keep(inputs, named, output)
        return output

    def before_backward(self, loss: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss for the backward pass, computed from the last call of the student.

        ``labels``, int64, are needed only for the value of the teacher's term, which has no gradient. UserError: the
        student was not called since the last loss, or more than once.
        """
        if not self.calls_teacher_each_step:
            return self.loss_weights.student * loss
        calls, logits = self._calls, self._logits
        self.clear()
        if calls > 1:
            raise UserError(
                f"distillation needs a loss made of one call of the student, it was called {calls} times since the "
                "last loss: call it in eval mode or without gradients for anything else"
            )
        if logits is None:
            raise UserError(
                "distillation needs the student's logits: call the policy's forward(inputs) instead of the model, or "
                "its attach(), before the loss"
            )
        return distillation_loss(*logits, loss, self.loss_weights, self.temperature, labels)

    def _keep(self, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or not self.calls_teacher_each_step:
            return
        self._calls += 1
        self._logits = None
        if self._calls == 1:  # else before_backward will raise
            student = _checked(output, "student")
            if any(parameter.device != student.device for parameter in self.teacher.parameters()):
                self.teacher.to(student.device)
            if self.teacher.training:
                self.teacher.eval()
            with torch.no_grad():
                self._logits = (student, _checked(self.teacher(*args, **named), "teacher"))


def _checked(output: Any, who: str) -> Tensor:
    if isinstance(output, Tensor) and output.dim() in (2, 3) and output.is_floating_point():
        return output
    got = f"shape {list(output.shape)} of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
    raise UserError(f"distillation needs a {who} that returns one tensor of logits, (B, C) or (B, T, C), got {got}")


# --- The teacher: built by name, by the user's function, or like the student; and its weights -------------------------

#: The name of a teacher with the student's architecture.
SAME = "same"
#: Seed for initial weights, so that a resumed run without loaded weights has the same teacher.
_SEED = 0


def build_teacher(
    settings: KnowledgeDistillationConfig, student: nn.Module, make_model: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Build the teacher on the CPU with its weights; the states of the random generators are restored.

    docs/compression.md says what a ``teacher`` may be. ``make_model`` builds a fresh model of the student's
    architecture; without it a copy of the student is used. UserError if the teacher cannot be built or loaded.
    """
    name = settings.teacher or SAME
    if name != SAME and ":" not in name and name not in MODELS:
        raise unknown_name("teacher", name, [*MODELS, SAME, "package.module:function"])
    if settings.pretrained and ":" not in name:
        raise UserError(
            f"there are no pretrained weights for the teacher {name}: give a checkpoint, or "
            "package.module:function that loads some"
        )
    sizes = _sizes(student)
    with kept_generators({parameter.device for parameter in student.parameters()}):
        torch.default_generator.manual_seed(_SEED)
        if ":" in name:
            always = {"pretrained": True} if settings.pretrained else {}
            teacher = called_with_sizes(name, "teacher", sizes, **always)
        elif name == SAME:
            teacher = bare_copy(student) if make_model is None else make_model()
        elif len(sizes) < 2:
            raise UserError(
                f"the teacher {name} is built for the student's input channels and classes, but the student has no "
                "convolution or no linear layer to tell them: give package.module:function"
            )
        else:
            teacher = build_model(name, sizes["num_classes"], channels=sizes["channels"])
    if settings.checkpoint is not None:
        load_weights(teacher, settings.checkpoint, what="teacher checkpoint", of="the teacher")
    elif not settings.pretrained:
        warnings.warn(
            f"the teacher {settings.teacher} has neither checkpoint nor pretrained weights: unless its function loads "
            "some, the student learns from random scores",
            stacklevel=2,
        )
    return teacher


def _sizes(student: nn.Module) -> dict[str, int]:
    """Return the input channels of the first convolution and the outputs of the last linear layer, where there are."""
    found: dict[str, int] = {}
    for module in student.modules():
        if isinstance(module, nn.Conv2d):
            found.setdefault("channels", module.in_channels)
        elif isinstance(module, nn.Linear):
            found["num_classes"] = module.out_features
    return found


def load_weights(model: nn.Module, checkpoint: str | Path, *, what: str, of: str) -> None:
    """Load a checkpoint's weights into a model; a ``module`` of a parallel wrapper in names is ignored.

    `read_weights` says what a checkpoint may be. Errors call checkpoint and model by ``what`` and ``of``.
    """
    weights = read_weights(Path(checkpoint), what)
    names = {without_parallel(name): name for name in model.state_dict()}
    try:
        model.load_state_dict({names.get(without_parallel(name), name): value for name, value in weights.items()})
    except RuntimeError as error:
        told = shorten(" ".join(str(error).splitlines()[1:]), 400, placeholder=" ...")
        raise UserError(f"{what} {checkpoint} does not fit {of}: {told}") from error
