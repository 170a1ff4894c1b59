"""Knowledge distillation: a model learns from another model's logits (Hinton, Vinyals and Dean 2015)."""

from trainables.compression.distillation.arguments import add_distillation_args
from trainables.compression.distillation.policy import (
    DistillationLossWeights,
    KnowledgeDistillationPolicy,
    build_teacher,
    distillation_loss,
)

__all__ = [
    "DistillationLossWeights",
    "KnowledgeDistillationPolicy",
    "add_distillation_args",
    "build_teacher",
    "distillation_loss",
]
