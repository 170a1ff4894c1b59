"""Checkpoints of `torch.distributed.checkpoint` of a training that may have stopped layers, also under DDP and FSDP2.

    save("checkpoints/100", model, optimizer)
    load("checkpoints/100", model, optimizer)    # a new model and optimizer, in every process

`get_state_dict` leaves the optimizer's state of stopped parameters out, and loads only what a new optimizer has; so the
rule's state comes first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Save a training; called in every process.

    Args:
        folder: new, or of an earlier checkpoint of this training.
        model: in its wrapper, if it has one.
        optimizer: with Gradient-Skip.
    """
    found = get_state_dict(model, optimizer)
    rule: Any = optimizer.gradskip.state_bytes()  # type: ignore[attr-defined]
    dcp.save({"model": found[0], "optimizer": found[1], "gradskip": rule}, checkpoint_id=folder)


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Continue from what `save` wrote, bit for bit; called in every process.

    Raises:
        UserError: for a state of another rule or other parameters.
    """
    rule: dict[str, Any] = {"gradskip": b""}
    dcp.load(rule, checkpoint_id=folder)
    skip: Any = optimizer.gradskip  # type: ignore[attr-defined]
    skip.load_state_bytes(rule["gradskip"])
    found: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    skip.load_state_bytes(rule["gradskip"])  # torch takes a step to make the optimizer's state
