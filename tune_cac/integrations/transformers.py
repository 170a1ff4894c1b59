"""Gradient-Skip in the `Trainer` of Hugging Face's transformers, and in those that are one (TRL's SFTTrainer).

from tune_cac.integrations.transformers import GradientSkipCallback
Trainer(..., callbacks=[GradientSkipCallback()])
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from trainables.errors import UserError
from trainables.gradskip.settings import Settings
from tune_cac.integrations.trainer_skip import TrainerSkip

#: Ends of names of what an evaluation measures of itself.
_SPEEDS = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")


def _measured(metrics: dict[str, Any]) -> dict[str, float]:
    """Return what an evaluation measured of the model, by its name in a report."""
    return {
        ("val_loss" if name == "eval_loss" else name.removeprefix("eval_")): value
        for name, value in metrics.items()
        if name.startswith(("eval_", "test_")) and not name.endswith(_SPEEDS) and isinstance(value, int | float)
    }


class GradientSkipCallback(TrainerCallback):
    """Stop layers of a training, and log, save and restore what has stopped.

    The trainer's logs get ``stopped_share`` and ``compute_saved``, its checkpoints the rule's state, and a search that
    runs the script the metrics of every evaluation, without ``eval_`` (``eval_loss`` as ``val_loss``). When the
    training ends, or is interrupted, what has stopped can train again.

    Args:
        settings: None reads the ``CAC_*`` variables when the training begins.

    Raises:
        UserError: in ``train()``, for DeepSpeed, for DDP that does not look for unused parameters, for a checkpoint
            without our state of its last step, for an optimizer that has Gradient-Skip already, and as
            `trainables.gradskip.wrap`; in an evaluation, for a search of another metric.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._skip = TrainerSkip(settings)

    @property
    def gradskip(self) -> Any:
        """Return the `GradientSkip` of the latest training; None before the first."""
        return self._skip.gradskip

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, optimizer: Any,
        lr_scheduler: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Attach to the optimizer."""
        again = any(getattr(args, name, False) for name in ("activation_checkpointing", "gradient_checkpointing"))
        looks = args.ddp_find_unused_parameters
        if args.world_size > 1 and (looks is False or (looks is None and again)):
            raise UserError(
                f"ddp_find_unused_parameters must be True, got {looks}: DDP waits for gradients of stopped layers"
            )
        # Loggers are called in order, and those of the trainer come before the user's callbacks; they are to see what
        # we add. No argument leads to the list of callbacks, but the caller has it.
        frame = inspect.currentframe()
        handler = None if frame is None or frame.f_back is None else frame.f_back.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            handler.callbacks = [self, *(one for one in handler.callbacks if one is not self)]
            if not isinstance(model, nn.Module):  # SetFit gives what is around it
                model = handler.model
        self._skip.begin(
            optimizer, model, steps=lambda: state.global_step, total_steps=state.max_steps,
            schedulers=[getattr(lr_scheduler, "scheduler", lr_scheduler)],  # that within accelerate's
        )  # fmt: skip

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report what was evaluated since the last step."""
        self._skip.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step's time."""
        self._skip.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the last evaluation, and once more that of the model which is kept, if it is another one."""
        kept = getattr(state, "best_global_step", None) if args.load_best_model_at_end else None
        found = [log for log in state.log_history if kept and kept < state.global_step and log["step"] == kept]
        best = {name: value for log in found for name, value in _measured(log).items()}
        self._skip.end(early=state.global_step < state.max_steps, best=best)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Add what has stopped to a log of training steps."""
        if "loss" in logs or "train_loss" in logs:
            found = self._skip.logged()
            logs |= found
            state.log_history[-1] |= found

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Report an evaluation to the search; the test split is one with ``metric_key_prefix="test"``."""
        chosen = (args.metric_for_best_model or "").removeprefix("eval_")
        smaller = args.greater_is_better is False or (args.greater_is_better is None and chosen in ("", "loss"))
        self._skip.take(_measured(metrics), "val_loss" if chosen == "loss" else chosen, "min" if smaller else "max")

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Report the test split to the search."""
        self.on_evaluate(args, state, control, metrics=metrics)


def _with_end(train: Any, kind: type[GradientSkipCallback]) -> Any:
    """Return ``Trainer.train`` that lets what has stopped train again where it raises: no event tells callbacks so."""

    @functools.wraps(train)
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return train(self, *arguments, **options)
        except BaseException:  # Ctrl-C in a notebook, above all
            for one in self.callback_handler.callbacks:
                if isinstance(one, kind):  # not by its name, which is another class once this module was reloaded
                    one._skip.let_go()
            raise

    return wrapper


Trainer.train = _with_end(Trainer.train, GradientSkipCallback)
