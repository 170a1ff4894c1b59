"""Cost of a training step, counted once for each set of stopped layers and each batch shape.

Counting runs a copy of the model on torch's meta device, which computes shapes and no numbers: the run's weights,
buffers and random generators are not touched. The counts equal those on the real device, except that torch does not
count all of a fused attention on a CPU. Matrix products and convolutions count; norms, activations and the optimizer's
arithmetic do not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainables.gradskip.forward_cache.prefix_pass import PassReport
from trainables.runtime.flops import flop_counter
from trainables.runtime.generators import kept_generators
from trainables.training.recipe.checkpointing import computed_again
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import on_meta, shapes_of, to_meta

_Count = TypeVar("_Count")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one training step."""

    forward_flops: int
    """FLOPs of the loss."""
    backward_flops: int
    """FLOPs of its backward pass; 0 when nothing needs a gradient."""
    gradient_bytes: int
    """Bytes of all gradients produced."""
    optimizer_bytes: int
    """Bytes of parameters, gradients and optimizer state visited by the step."""

    @property
    def flops(self) -> int:
        """Return the forward and backward FLOPs."""
        return self.forward_flops + self.backward_flops


#: Counts of this process, by workload, structure, trainable parameters and batch shapes; all trials share them.
_COUNTED: dict[Hashable, StepCost] = {}
#: Forward FLOPs of a prefix for a batch, by workload, the prefix's modules and batch shapes.
_COUNTED_PREFIXES: dict[Hashable, int] = {}


class CostTable:
    """Costs of one run's steps."""

    def __init__(self, workload: Workload, model: nn.Module, structure: Hashable = ()) -> None:
        self._workload = workload
        self._model = model
        self._source = model  # the model that is copied for counting
        self._structure = (structure, computed_again(model))
        self._dense = tuple(p.requires_grad for p in model.parameters())
        self._masks: dict[Hashable, tuple[bool, ...]] = {}
        self._meta: nn.Module | None = None
        self._on_meta = True
        self._visited_bytes: list[int] = []
        self.counting_time_s = 0.0
        """Time spent counting, which is no part of the training time."""

    def freeze(self) -> None:
        """Copy the model now, so that later changes do not affect the counts."""
        if self._meta is None and self._source is self._model:
            with kept_generators([]):
                self._source = copy.deepcopy(self._model)

    def forward_flops(self, batch: Batch) -> int:
        """Return the FLOPs of a forward pass without gradients."""
        return self._cost((False,) * len(self._dense), batch).forward_flops

    def step(self, stop_key: Hashable, batch: Batch, prefix: PassReport | None = None) -> StepCost:
        """Return the cost of a step on this batch with the parameters that need a gradient now.

        Equal keys must mean equal parameters. With a forward cache, ``prefix`` tells on how many rows the prefix was
        computed.
        """
        mask = self._masks.get(stop_key)
        if mask is None:
            mask = self._masks[stop_key] = tuple(p.requires_grad for p in self._model.parameters())
        cost = self._cost(mask, batch)
        if prefix is None:
            return cost
        # FLOPs are proportional to the rows. The backward FLOPs of the prefix's parameters are already left out.
        spared = self._prefix_flops(prefix.modules, batch) * (prefix.rows - prefix.computed) // prefix.rows
        return replace(cost, forward_flops=cost.forward_flops - spared)

    def dense_step(self, batch: Batch) -> StepCost:
        """Return the cost of a step on this batch with the model as it was built."""
        return self._cost(self._dense, batch)

    def stopped_step(self, through: int, batch: Batch) -> StepCost:
        """Return the cost of a step on this batch with the model's parameters 0..``through`` stopped."""
        return self._cost((False,) * (through + 1) + self._dense[through + 1 :], batch)

    def _cost(self, mask: tuple[bool, ...], batch: Batch) -> StepCost:
        key = (self._workload.key, self._structure, mask, shapes_of(batch))
        return self._counted_once(_COUNTED, key, lambda: self._count(mask, batch))

    def _counted_once(self, known: dict[Hashable, _Count], key: Hashable, count: Callable[[], _Count]) -> _Count:
        if key not in known:
            begun = time.perf_counter()
            known[key] = count()
            self.counting_time_s += time.perf_counter() - begun
        return known[key]

    def _count(self, mask: tuple[bool, ...], batch: Batch) -> StepCost:
        model = self._meta_model(batch)
        batch = self._without_numbers(batch)
        model.zero_grad(set_to_none=True)
        parameters = list(model.parameters())
        for parameter, trainable in zip(parameters, mask, strict=True):
            parameter.requires_grad_(trainable)
        forward, backward = flop_counter(), flop_counter()
        with kept_generators([]), forward:
            loss = self._workload.loss(model, batch)
        if loss.requires_grad:
            with backward:
                loss.backward()
        live = [i for i, p in enumerate(parameters) if p.grad is not None]
        return StepCost(
            forward_flops=int(forward.get_total_flops()),
            backward_flops=int(backward.get_total_flops()),
            gradient_bytes=sum(parameters[i].nbytes for i in live),
            optimizer_bytes=sum(self._visited_bytes[i] for i in live),
        )

    def _prefix_flops(self, names: tuple[str, ...], batch: Batch) -> int:
        key = (self._workload.key, names, shapes_of(batch))
        return self._counted_once(_COUNTED_PREFIXES, key, lambda: self._count_prefix(names, batch))

    def _count_prefix(self, names: tuple[str, ...], batch: Batch) -> int:
        """Return the forward FLOPs up to the return of the prefix's last module."""
        model = self._meta_model(batch)
        counter = flop_counter()
        counts: list[int] = []  # after each module call; a shared module is called more than once
        handles = [
            module.register_forward_hook(lambda *_: counts.append(int(counter.get_total_flops())))
            for module in {model.get_submodule(name) for name in names}
        ]
        try:
            with kept_generators([]), counter:
                self._workload.loss(model, self._without_numbers(batch))
        finally:
            for handle in handles:
                handle.remove()
        return counts[len(names) - 1]

    def _meta_model(self, batch: Batch) -> nn.Module:
        if self._meta is None:
            model = self._rehearsed(on_meta(self._source), batch)
            if model is None:
                # The model creates tensors on the CPU or reads values, so it runs on the CPU with numbers.
                self._on_meta = False
                model = self._rehearsed(copy.deepcopy(self._source).to("cpu"), batch)
            assert model is not None
            optimizer = self._workload.make_optimizer(model.named_parameters())
            optimizer.step()
            for parameter in model.parameters():
                state = sum(v.nbytes for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))
                self._visited_bytes.append(2 * parameter.nbytes + state)
            self._meta, self._source = model, self._model
        return self._meta

    def _rehearsed(self, model: nn.Module, batch: Batch) -> nn.Module | None:
        """Return the model after a dense step; None if it cannot run without numbers."""
        model.zero_grad(set_to_none=True)
        for parameter, trainable in zip(model.parameters(), self._dense, strict=True):
            parameter.requires_grad_(trainable)
        model.train()
        try:
            with kept_generators([]):
                loss = self._workload.loss(model, self._without_numbers(batch))
                if loss.requires_grad:  # a teacher's does not
                    loss.backward()
        except Exception:  # a model may raise anything
            if self._on_meta:
                return None
            raise
        return model

    def _without_numbers(self, batch: Batch) -> Batch:
        return to_meta(batch) if self._on_meta else tuple(torch.zeros(t.shape, dtype=t.dtype) for t in batch)
