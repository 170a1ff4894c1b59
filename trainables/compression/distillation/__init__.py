"""Knowledge distillation: a model learns from another model's logits (Hinton, Vinyals and Dean 2015)."""

from trainables.compression.distillation.arguments import add_distillation_args
from trainables.compression.distillation.loss import DistillationLossWeights, distillation_loss
from trainables.compression.distillation.policy import KnowledgeDistillationPolicy
from trainables.compression.distillation.teacher import build_teacher

__all__ = [
    "DistillationLossWeights",
    "KnowledgeDistillationPolicy",
    "add_distillation_args",
    "build_teacher",
    "distillation_loss",
]
