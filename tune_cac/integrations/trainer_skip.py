"""Gradient-Skip on the optimizer that a trainer has made: what the callbacks of all trainers have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import STATE_KEY, GradientSkip
from trainables.gradskip.optimizers import wrap
from trainables.gradskip.script_counting.process_record import start, totals_of
from trainables.gradskip.script_counting.trace_file import METRIC_VARIABLE, TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.script.report_lines import report

#: Names that trainers give to an accuracy, which a search knows as ``accuracy``.
_ACCURACIES = ("accuracy", "acc", "val_accuracy", "val_acc")


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer of torch within a trainer's wrappers; UserError for DeepSpeed's, which moves the weights."""
    while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        if "deepspeed" in f"{type(optimizer).__module__}{type(optimizer).__name__}".lower():
            raise UserError("Gradient-Skip needs an optimizer of torch, got DeepSpeed's: train with DDP or FSDP2")
        optimizer = optimizer.optimizer
    return optimizer


class TrainerSkip:
    """Gradient-Skip in one training of a trainer.

    Its state is saved in the optimizer's first parameter group, an entry that torch's ``load_state_dict`` keeps:
    trainers load an optimizer before their callbacks have seen it.

    Args:
        settings: None reads the ``CAC_*`` variables when the training begins.
    """

    def __init__(self, settings: Settings | None) -> None:
        self._settings = settings
        self.gradskip: GradientSkip | None = None  # of the latest training
        self._reported: dict[str, float] = {}

    def begin(self, optimizer: Any, model: nn.Module, *, steps: int, total_steps: int | None) -> None:
        """Attach Gradient-Skip to a training that has taken some steps; UserError if they were taken without it."""
        own = innermost(optimizer)
        saved = own.param_groups[0].pop(STATE_KEY, None)
        if not hasattr(own, STATE_KEY):
            wrap(own, self._settings, model=model, total_steps=total_steps)
            own.register_state_dict_post_hook(_state_in_group)
            if getattr(optimizer, "scaler", None) is not None:  # accelerate's, which has taken the step off already
                type(optimizer).__init__(optimizer, own, device_placement=False, scaler=optimizer.scaler)
        skip: GradientSkip = own.gradskip  # type: ignore[attr-defined]
        if skip.step_record is None:
            skip.step_record = start(skip, model)
        if saved is not None:
            skip.load_state_dict(saved)
        elif steps > skip.iteration and skip.settings.mode != "off":
            raise UserError(
                f"the checkpoint must have the state of Gradient-Skip, which was not there in its {steps} steps: begin "
                "anew without the checkpoint, or go on without the callback"
            )
        self.gradskip, self._reported = skip, {}

    def logged(self) -> dict[str, float]:
        """Return the shares of weights that have stopped and of compute that was saved, by name."""
        if self.gradskip is None:
            return {}
        sizes = [parameter.numel() for parameter in self.gradskip.parameters]
        stopped = sum(sizes[number] for number in self.gradskip.stops.numbers)
        counted = totals_of(self.gradskip.step_record.stretches)
        spared = counted["dense_backward_flops"] - counted["backward_flops"]
        return {"stopped_share": stopped / sum(sizes), "compute_saved": spared / max(counted["dense_flops"], 1)}

    def report(self, metrics: Mapping[str, float], chosen_by: str | None, direction: str) -> None:
        """Report metrics of an evaluation to the search, if one runs this script.

        Args:
            metrics: of the validation split by name, or of the test split by names that begin with ``test_``.
            chosen_by: the metric that the trainer chooses checkpoints by, if any.
            direction: ``max`` or ``min``, of that one.

        Raises:
            UserError: if the metric of the search is not among them.
        """
        if not os.environ.get(TRIAL_FOLDER) or self.gradskip is None or not metrics:
            return
        wanted = os.environ.get(METRIC_VARIABLE, "accuracy")
        if all(name.startswith("test_") for name in metrics):
            metrics = {**self._reported, **{_test_name(name, wanted): value for name, value in metrics.items()}}
        elif wanted not in metrics:
            found = next((name for name in _ACCURACIES if name in metrics), None) if wanted == "accuracy" else None
            if found is None:
                name = chosen_by if chosen_by in metrics else next(iter(metrics))
                raise UserError(
                    f"the search compares by {wanted}, and an evaluation has {', '.join(sorted(metrics))}: search with "
                    f"--metric {name} --direction {direction}"
                )
            metrics = {**metrics, wanted: metrics[found]}
        self._reported = dict(metrics)
        report(**self._reported)


def _test_name(name: str, wanted: str) -> str:
    """Return the name under which a search expects a metric of the test split."""
    alike = {wanted, wanted.removeprefix("val_"), *(_ACCURACIES if wanted == "accuracy" else ())}
    return f"test_{wanted}" if name.removeprefix("test_") in alike else name


def _state_in_group(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    first, *others = state["param_groups"]
    own = {name: value for name, value in state.items() if name != STATE_KEY}
    return {**own, "param_groups": [{**first, STATE_KEY: state[STATE_KEY]}, *others]}
