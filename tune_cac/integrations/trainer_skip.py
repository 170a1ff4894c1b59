"""Gradient-Skip on the optimizer that a trainer has made: what the callbacks of all trainers have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.advice import some
from trainables.gradskip.controller import STATE_KEY, GradientSkip
from trainables.gradskip.optimizers import wrap
from trainables.gradskip.script_counting.process_record import start
from trainables.gradskip.script_counting.stretches import totals_of
from trainables.gradskip.script_counting.trace_file import METRIC_VARIABLE, TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.gradskip.stops import switch_on_again
from trainables.script.report_lines import by_metric, report

#: Names that trainers give to an accuracy of validation, which a search knows as ``accuracy``; the last ones may be of
#: training.
_ACCURACIES = ("val_accuracy", "val_acc", "val/accuracy", "val/acc", "accuracy", "acc")
#: Entry of a saved state with what the trainer counts.
_TRAINER = "trainer"


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
        self._first_states = WeakKeyDictionary[GradientSkip, dict[str, Any]]()  # of all that this has attached
        self._found: dict[str, float] = {}  # metrics that are not reported yet
        self._reported: dict[str, float] = {}
        self._hint = ""  # how to search by a metric that is there
        self._trains = False
        self._steps: Callable[[], int] = lambda: 0
        self._step_begun: float | None = None
        self._train_time_s = 0.0  # in steps

    def begin(
        self,
        optimizer: Any,
        model: nn.Module,
        *,
        steps: Callable[[], int],
        total_steps: int | None,
        is_resumed: bool = True,
        schedulers: Iterable[Any] = (),
        named_in: nn.Module | None = None,
    ) -> None:
        """Attach Gradient-Skip to a training.

        Args:
            optimizer: of the trainer.
            model: that the trainer calls.
            steps: returns the number of steps that the trainer has taken.
            total_steps: of the training, where known.
            is_resumed: whether steps that were taken before are part of this training.
            schedulers: of the optimizer.
            named_in: see `wrap`.

        Raises:
            UserError: the steps before were taken without it; the optimizer has it already, or lacks what an earlier
                training has stopped; and as `wrap`.
        """
        own = innermost(optimizer)
        saved = own.param_groups[0].pop(STATE_KEY, None)
        taken = steps() if is_resumed else 0
        if is_new := not hasattr(own, STATE_KEY):
            if earlier := switch_on_again(model, own):
                raise UserError(
                    f"{some(earlier, 1)} were stopped by an earlier training of this model, so that this trainer's "
                    "optimizer lacks them: they are switched on again, make a new trainer"
                )
            wrap(own, self._settings, model=model, total_steps=total_steps, schedulers=schedulers, named_in=named_in)
            new: GradientSkip = own.gradskip  # type: ignore[attr-defined]
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                new.process_group = None if new.numbering.is_sharded else torch.distributed.group.WORLD
            if new.step_record is None:
                new.step_record = start(new, model)
            self._first_states[new] = new.state_dict()
            own.register_state_dict_post_hook(self._state_in_group)
            if getattr(optimizer, "scaler", None) is not None:  # accelerate's, which has taken the step off already
                type(optimizer).__init__(optimizer, own, device_placement=False, scaler=optimizer.scaler)
        skip: GradientSkip = own.gradskip  # type: ignore[attr-defined]
        if skip not in self._first_states:
            raise UserError(
                "the trainer's optimizer has Gradient-Skip already, by wrap or another GradientSkipCallback: leave one "
                "of them out (for a second trainer of one optimizer, give it the first one's callback)"
            )
        self.gradskip = skip
        counted = {} if saved is None else saved.get(_TRAINER, {})
        noted = taken if saved is None else saved["machine"]["iteration"]  # of an older version
        if (at := counted.get("steps", noted)) != taken and skip.settings.mode != "off":
            raise UserError(
                f"the checkpoint's state of Gradient-Skip must be of its step {taken}, got that of step {at}: it was "
                f"trained on without the callback. Resume from the checkpoint of step {at}, or go on without it"
            )
        if saved is not None:
            skip.load_state_dict(saved)
        elif taken and skip.settings.mode != "off":
            raise UserError(
                f"the checkpoint must have the state of Gradient-Skip, which was not there in its {taken} steps: begin "
                "anew without the checkpoint, or go on without the callback"
            )
        elif not is_new:  # another training with the same optimizer
            skip.load_state_dict(self._first_states[skip])
        self._found, self._reported, self._trains = {}, {}, True
        self._steps, self._step_begun = steps, None
        is_of_trial = saved is not None and saved.get("step_record", {}).get("trial") == os.environ.get(TRIAL_FOLDER)
        self._train_time_s = counted.get("train_time_s", 0.0) if is_of_trial else 0.0

    def begin_step(self) -> None:
        """Report what was evaluated since the last step."""
        self.flush()
        self._step_begun = time.perf_counter()

    def end_step(self) -> None:
        """Count the step's time."""
        if self._step_begun is not None:
            self._train_time_s += time.perf_counter() - self._step_begun
        self._step_begun = None

    def logged(self) -> dict[str, float]:
        """Return the shares of weights that have stopped and of compute that was saved, by name.

        The latter is unknown where no step before the first stop was counted, and none shows what it left out.
        """
        if self.gradskip is None:
            return {}
        sizes = [parameter.numel() for parameter in self.gradskip.parameters]
        stopped = sum(sizes[number] for number in self.gradskip.stops.numbers)
        found, stretches = {"stopped_share": stopped / sum(sizes)}, self.gradskip.step_record.stretches
        if any((int(one.still, 16) == 0 and any(one.backward_flops)) or any(one.left_flops) for one in stretches):
            counted = totals_of(stretches)
            spared = counted["dense_backward_flops"] - counted["backward_flops"]
            found["compute_saved"] = spared / max(counted["dense_flops"], 1)
        return found

    def take(self, metrics: Mapping[str, float], chosen_by: str | None = None, direction: str = "max") -> None:
        """Take the metrics of an evaluation, which `flush` reports: there may be several, one a data set.

        Args:
            metrics: of the validation split by name, or of the test split by names that begin with ``test``.
            chosen_by: the metric that the trainer chooses checkpoints by, if any.
            direction: ``max`` or ``min``, of that one.
        """
        if not os.environ.get(TRIAL_FOLDER) or self.gradskip is None or not metrics:
            return
        wanted = os.environ.get(METRIC_VARIABLE, "accuracy")
        if all(name.startswith("test") for name in metrics):
            self._found = {**self._reported, **{_test_name(name, wanted): value for name, value in metrics.items()}}
        else:
            self._found |= metrics
            if wanted == "accuracy" and (name := next((one for one in _ACCURACIES if one in self._found), None)):
                self._found[wanted] = self._found[name]
            others = [name for name in self._found if not name.startswith("train")]
            known = chosen_by is not None and chosen_by in self._found
            self._hint = by_metric(str(chosen_by), direction) if known else f"search with --metric {others[0]}"
        if not self._trains:
            self.flush()

    def flush(self) -> None:
        """Report what was evaluated to the search; UserError if its metric is not among that."""
        if not self._found:
            return
        wanted = os.environ.get(METRIC_VARIABLE, "accuracy")
        if wanted not in self._found:
            raise UserError(
                f"the search compares by {wanted}, and an evaluation has {', '.join(sorted(self._found))}: {self._hint}"
            )
        report(**self._found, train_time_s=self._train_time_s)
        self._reported, self._found = self._found, {}

    def end(self, *, early: bool, best: Mapping[str, float] | None = None) -> None:
        """Report the last evaluation, that a training ended early, and the metrics of the weights that it ends with.

        ``best`` are those where they are not the last ones.
        """
        self.flush()
        self.let_go()
        if self._reported and (early or best):
            self._found = self._reported | ({"early_stopped": True} if early else {})
            self.take(best or self._found)

    def let_go(self) -> None:
        """Let what has stopped train in the next training of the model, which takes it for frozen by its user."""
        self._trains = False
        if self.gradskip is not None:
            self.gradskip.stops.let_go()
            self.gradskip.step_record.end_training()

    def _state_in_group(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        first, *others = state["param_groups"]
        own = {name: value for name, value in state.items() if name != STATE_KEY}
        saved = {**state[STATE_KEY], _TRAINER: {"steps": self._steps(), "train_time_s": self._train_time_s}}
        return {**own, "param_groups": [{**first, STATE_KEY: saved}, *others]}


def _test_name(name: str, wanted: str) -> str:
    """Return the name under which a search expects a metric of the test split."""
    alike = {wanted, wanted.removeprefix("val_"), *(_ACCURACIES if wanted == "accuracy" else ())}
    return f"test_{wanted}" if name[len("test_") :] in alike else name
