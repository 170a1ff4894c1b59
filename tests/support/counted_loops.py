"""A small model, a loop and the records that count its steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainables import gradskip
from trainables.gradskip.script_counting.process_record import ProcessRecord

BATCH = 4


RECORDS: list[ProcessRecord] = []


def record_of(*optimizers: torch.optim.Optimizer) -> ProcessRecord:
    """A record as a process has one, of these optimizers from now on."""
    RECORDS.append(ProcessRecord())
    for optimizer in optimizers:
        RECORDS[-1].add(optimizer.gradskip)  # type: ignore[attr-defined]
    return RECORDS[-1]


def end_counting(record: ProcessRecord) -> None:
    """Count no further step."""
    record.records.clear()
    record.settle()


def summary_of(record: ProcessRecord) -> dict[str, Any]:
    found = record.summary()
    assert found is not None
    return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip


def batch(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, 1, 6, 6), torch.randint(0, 3, (rows,))


def counted_step(net: nn.Module, rows: int = BATCH) -> tuple[int, int]:
    """Forward and backward FLOPs of a step of this model as it is now, by torch."""
    images, labels = batch(rows)
    with FlopCounterMode(display=False) as forward:
        loss = F.cross_entropy(net(images), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    net.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


def settings(*stops: tuple[int, int], **more: object) -> gradskip.Settings:
    numbers, iterations = zip(*stops, strict=True) if stops else ((), ())
    return gradskip.Settings(stop_layer_num=numbers, stop_layer_itr=iterations, **more) if stops else gradskip.Settings(
        start_thr=-1
    )  # fmt: skip


def train(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int, *, evaluate: bool = False) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        images, labels = batch()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        if evaluate:
            with torch.no_grad():
                net(batch(40)[0])
