"""All warnings of a gradient-skip optimizer: each once, at the user's own line. None suggests a setting already on."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainables

#: Folders and packages whose lines are not the user's: ours, and libraries that call the optimizer for users.
_NOT_THE_USERS = tuple(f"{Path(path).resolve()}{os.sep}" for path in trainables.__path__)
_LIBRARIES = ("torch", "accelerate", "transformers", "trl", "lightning", "pytorch_lightning", "tune_cac")


def users_level() -> int:
    """Return the ``stacklevel`` with which the caller's `warnings.warn` points at the user's innermost line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        ours = frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        if not ours and module not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return level


#: Warnings whose text depends on a few values alone, by key.
MESSAGES = {
    "groups": "parameters came in {count} groups and no model: layers are numbered through the groups; "
    "give model= to number them in the model's order",
    "never": "Gradient-Skip {reason}",
    "left": "{names} still train before stopped layers, so the backward pass runs on through them: {ways}",
    "all": "every parameter of this optimizer is stopped: training goes on with nothing to do, and backward passes "
    "still reach one of them",
    "unseen": "the execution order of the layers was never seen, so they stop in the order of registration and what "
    "is left before them is not known: the model is called in a way that hides it, as under torch.compile. {way}",
    "processes": "a layer stopped in one of several processes, which torch's DistributedDataParallel does not expect: "
    "use tune_cac.gradskip.DistributedDataParallel(model, optimizer)",
    "lost": "{names} had a gradient before the last stop and none after it. Reentrant activation checkpointing does "
    "that behind a stopped prefix: use checkpoint(..., use_reentrant=False). (A layer that a step may leave out is no "
    "reason to worry.)",
    "front": "{names} run before every layer that could stop and come behind these in the optimizer's order, as "
    "prompts do: no stop ends the backward pass but that of everything",
    "inputs": "the backward pass runs on through stopped layers to the model's inputs, whose gradient reentrant "
    "activation checkpointing needs: give gradient_checkpointing_kwargs={{'use_reentrant': False}}",
    "woken": "requires_grad of {name}, which has stopped, was switched on again: {then}",
    "still": "{name} does not move (no gradient, or a learning rate of 0), and the rule waits for it: switch its "
    "requires_grad off until it is to train",
    "rates": "CAC_LR_FACTOR={factor:g} has no effect on learning rates that the loop does not derive from the "
    "optimizer's, and that of the first step is {now:g}, not {scaled:g}: {way}",
    "earlier": "{names}: stopped by an earlier gradient-skip optimizer of this model, and trained again by this one. "
    "To keep them still, load the earlier one's state, or switch requires_grad off after building this one",
}


def some(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


class Advice:
    """The warnings of one optimizer, each said once; once about each thing where there are several."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # the first of each key
        self._said: set[tuple[str, str]] = set()

    def say(self, key: str, *, about: str = "", **values: Any) -> None:
        if (key, about) not in self._said:
            self._said.add((key, about))
            text = MESSAGES[key].format(**values)
            self.texts.setdefault(key, text)
            warnings.warn(text, stacklevel=users_level())
