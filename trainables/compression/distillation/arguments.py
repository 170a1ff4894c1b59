"""Command-line flags of distillation for a training script's parser. Does not import torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T", int, float)


def add_distillation_args(
    parser: argparse.ArgumentParser, arch_choices: Sequence[str] | None = None, enable_pretrained: bool = True
) -> None:
    """Add the group "Knowledge Distillation Training Arguments" to a parser.

    The parsed values are ``kd_teacher``, ``kd_pretrained``, ``kd_resume``, ``kd_temp``, ``kd_distill_wt``,
    ``kd_student_wt``, ``kd_teacher_wt`` and ``kd_start_epoch``.

    Args:
        parser: the script's parser.
        arch_choices: accepted teacher names; None accepts any name.
        enable_pretrained: whether to add the flag ``--kd-pretrained``; without it ``kd_pretrained`` is False.
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
        "--kd-temperature", "--kd-temp", dest="kd_temp", type=_positive, default=1.0, metavar="TEMP",
        help="Knowledge distillation softmax temperature (default: %(default)s)",
    )  # fmt: skip
    for flag, short, default, what in (
        ("distill", "dw", 0.5, "distillation loss (student vs. teacher soft targets)"),
        ("student", "sw", 0.5, "student vs. labels loss"),
        ("teacher", "tw", 0.0, "teacher vs. labels loss"),
    ):
        group.add_argument(
            f"--kd-{flag}-wt", f"--kd-{short}", type=_not_negative, default=default, metavar="WEIGHT",
            help=f"Weight for {what} (default: %(default)s)",
        )  # fmt: skip
    group.add_argument(
        "--kd-start-epoch", type=_epoch, default=0, metavar="EPOCH_NUM",
        help="Epoch from which to enable distillation (default: %(default)s)",
    )  # fmt: skip


def _positive(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < math.inf, "a number > 0")


def _not_negative(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value < math.inf, "a number >= 0")


def _epoch(text: str) -> int:
    return _number(text, int, lambda value: value >= 0, "a whole number >= 0")


def _number(text: str, kind: Callable[[str], T], holds: Callable[[T], bool], rule: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value
