"""Distiller's flags for distillation. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainables.errors import UserError


def add_distillation_args(
    parser: argparse.ArgumentParser, arch_choices: Sequence[str] | None = None, enable_pretrained: bool = True
) -> None:
    """Add Distiller's flags for distillation to a script's parser.

    ``arch_choices`` are the accepted teacher names, None accepts any; ``--kd-pretrained`` is a flag only if enabled.
    """
    group = parser.add_argument_group("Knowledge Distillation Training Arguments")
    group.add_argument(
        "--kd-teacher", choices=arch_choices, metavar="ARCH", help="Model architecture for teacher model"
    )
    if enable_pretrained:
        group.add_argument("--kd-pretrained", action="store_true", help="Use pre-trained model for teacher")
    else:
        parser.set_defaults(kd_pretrained=False)
    group.add_argument("--kd-resume", metavar="PATH", help="Path to checkpoint from which to load teacher weights")
    group.add_argument(
        "--kd-temperature", "--kd-temp", dest="kd_temp", type=float, default=1.0, metavar="TEMP",
        help="Knowledge distillation softmax temperature (default: %(default)s)",
    )  # fmt: skip
    for flag, short, default, what in (
        ("distill", "dw", 0.5, "distillation loss (student vs. teacher soft targets)"),
        ("student", "sw", 0.5, "student vs. labels loss"),
        ("teacher", "tw", 0.0, "teacher vs. labels loss"),
    ):
        group.add_argument(
            f"--kd-{flag}-wt", f"--kd-{short}", type=float, default=default, metavar="WEIGHT",
            help=f"Weight for {what} (default: %(default)s)",
        )  # fmt: skip
    group.add_argument(
        "--kd-start-epoch", type=int, default=0, metavar="EPOCH_NUM",
        help="Epoch from which to enable distillation (default: %(default)s)",
    )  # fmt: skip


def distillation_fields(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a configuration that the flags stand for; empty without a teacher.

    UserError: weights that a trial's loss has not, ``--kd-pretrained``, or flags without a teacher.
    """
    if given.kd_teacher is None and given.kd_resume is None:
        bare = argparse.ArgumentParser()
        add_distillation_args(bare)
        if any(getattr(given, name) != value for name, value in vars(bare.parse_args([])).items()):
            raise UserError("--kd-* flags need a teacher: give --kd-teacher NAME or --kd-resume FILE, too")
        return {}
    if given.kd_pretrained:
        raise UserError("--kd-pretrained has no weights to load: give them by --kd-resume FILE")
    if given.kd_teacher_wt or abs(given.kd_distill_wt + given.kd_student_wt - 1) > 1e-9:
        raise UserError(
            "--kd-distill-wt and --kd-student-wt must be 1 together, --kd-teacher-wt, a constant in the loss, 0, got "
            f"{given.kd_distill_wt:g}, {given.kd_student_wt:g}, {given.kd_teacher_wt:g}: scale the learning rate"
        )
    fields = {
        "distill_teacher": given.kd_teacher,
        "distill_checkpoint": given.kd_resume,
        "distill_temperature": given.kd_temp,
        "distill_weight": given.kd_distill_wt,
        "distill_start_epoch": given.kd_start_epoch,
    }
    return {name: value for name, value in fields.items() if value is not None}
