"""Arguments of knowledge distillation (section ``distillers``, which the original language does not have)."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from trainables.compression.schedule.config_base import ComponentConfig, Flag, NotNegative, Positive, Text


class KnowledgeDistillationConfig(ComponentConfig):
    """w_s CE(student, labels) + w_d T^2 KL(teacher || student) + w_t CE(teacher, labels) (Hinton et al. 2015)."""

    teacher: Text | None = None
    """Model of the registry (``resnet20``), or ``package.module:function`` that returns a model; None: the student's
    architecture."""
    pretrained: Flag = False
    """True if the function is called with ``pretrained=True``."""
    checkpoint: Text | None = None
    """File with the teacher's weights."""
    temperature: Positive = 1.0
    """T."""
    distill_weight: NotNegative = 0.5
    """w_d."""
    student_weight: NotNegative = 0.5
    """w_s."""
    teacher_weight: NotNegative = 0.0
    """w_t; this term is constant because the teacher is not trained."""

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if self.teacher is None and self.checkpoint is None:
            raise ValueError("distillation needs a teacher: name one, or give the checkpoint of the same architecture")
        return self


DISTILLERS: dict[str, type[ComponentConfig]] = {"KnowledgeDistillation": KnowledgeDistillationConfig}
