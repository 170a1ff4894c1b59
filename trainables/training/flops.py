"""Cost of a training step, counted once for each set of stopped layers and each batch shape.

Counting runs a copy of the model on torch's meta device, which computes shapes and no numbers: the run's weights,
buffers and random generators are not touched. The counts equal those on the real device, except that the backward pass
of fused attention computes the scores once more there. Matrix products and convolutions count; norms, activations and
the optimizer's arithmetic do not.

Shapes: P parameters in the model's order have the numbers 0..P-1; a batch is a tuple of tensors whose first dimension
is the sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainables.attachment import EstimateFlops
from trainables.gradskip.forward_cache import PassReport
from trainables.gradskip.layers import unit_ends
from trainables.runtime.isolation import kept_generators
from trainables.runtime.model_copy import copy_of
from trainables.runtime.operator_flops import flop_counter
from trainables.savings import share_of_budget, share_saved
from trainables.training.recipe.recipe import computed_again
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import on_meta, shapes_of, structure_of, to_meta

# --- Steps of one structure of the model ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one training step."""

    forward_flops: int  # FLOPs of the loss
    backward_flops: int  # FLOPs of its backward pass; 0 when nothing needs a gradient
    gradient_bytes: int  # bytes of all gradients produced
    optimizer_bytes: int  # bytes of parameters, gradients and optimizer state visited by the step

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


#: Counts of this process, which all trials share: steps by workload, structure, trainable parameters and batch shapes;
#: forward FLOPs of a prefix by workload, the prefix's modules and batch shapes.
_COUNTED: dict[Hashable, Any] = {}


class CostTable:
    """Costs of one run's steps, with the structure that the model has now."""

    def __init__(self, workload: Workload, model: nn.Module, structure: Hashable = ()) -> None:
        self._workload = workload
        self._model = model
        self._source = model  # the model that is copied for counting
        self._structure = (structure, computed_again(model))
        self._dense = tuple(p.requires_grad for p in model.parameters())
        self._masks: dict[Hashable, tuple[bool, ...]] = {}
        self._copy: nn.Module | None = None
        self._on_meta = True
        self._visited_bytes: list[int] = []
        self.counting_time_s = 0.0  # time spent counting, which is no part of the training time

    def freeze(self) -> None:
        """Copy the model now, so that later changes do not affect the counts."""
        if self._copy is None and self._source is self._model:
            with kept_generators([]):
                self._source = copy_of(self._model)

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
        key = (self._workload.key, self._structure, prefix.modules, shapes_of(batch))
        flops = self._counted_once(key, lambda: self._count_prefix(prefix.modules, batch))
        # FLOPs are proportional to the rows. The backward FLOPs of the prefix's parameters are already left out.
        spared = flops * (prefix.rows - prefix.computed) // prefix.rows
        return replace(cost, forward_flops=cost.forward_flops - spared)

    def dense_step(self, batch: Batch) -> StepCost:
        """Return the cost of a step on this batch with the model as it was built."""
        return self._cost(self._dense, batch)

    def stopped_step(self, through: int, batch: Batch) -> StepCost:
        """Return the cost of a step on this batch with the model's parameters 0..``through`` stopped."""
        return self._cost((False,) * (through + 1) + self._dense[through + 1 :], batch)

    def _cost(self, mask: tuple[bool, ...], batch: Batch) -> StepCost:
        key = (self._workload.key, self._structure, mask, shapes_of(batch))
        cost: StepCost = self._counted_once(key, lambda: self._count(mask, batch))
        return cost

    def _counted_once(self, key: Hashable, count: Callable[[], Any]) -> Any:
        if key not in _COUNTED:
            begun = time.perf_counter()
            _COUNTED[key] = count()
            self.counting_time_s += time.perf_counter() - begun
        return _COUNTED[key]

    def _count(self, mask: tuple[bool, ...], batch: Batch) -> StepCost:
        model = self._counting_copy(batch)
        model.zero_grad(set_to_none=True)
        parameters = list(model.parameters())
        for parameter, trainable in zip(parameters, mask, strict=True):
            parameter.requires_grad_(trainable)
        with kept_generators([]), flop_counter() as counter:
            loss = self._workload.loss(model, self._without_numbers(batch))
            forward = int(counter.get_total_flops())
            if loss.requires_grad:
                loss.backward()
        live = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        return StepCost(
            forward_flops=forward,
            backward_flops=int(counter.get_total_flops()) - forward,
            gradient_bytes=sum(parameters[number].nbytes for number in live),
            optimizer_bytes=sum(self._visited_bytes[number] for number in live),
        )

    def _count_prefix(self, names: tuple[str, ...], batch: Batch) -> int:
        """Return the forward FLOPs of the prefix's modules; what runs between them runs where rows are read, too."""
        model = self._counting_copy(batch)
        counter = flop_counter()
        counts: list[int] = []  # of each module call that is in no other; a shared module is called more than once
        begun: list[int] = []

        def leave(*_: Any) -> None:
            before = begun.pop()
            if not begun:
                counts.append(int(counter.get_total_flops()) - before)

        handles = []
        for module in {model.get_submodule(name) for name in names}:
            enter = module.register_forward_pre_hook(lambda *_: begun.append(int(counter.get_total_flops())))
            handles += [enter, module.register_forward_hook(leave)]
        try:
            with kept_generators([]), counter:
                self._workload.loss(model, self._without_numbers(batch))
        finally:
            for handle in handles:
                handle.remove()
        return sum(counts[: len(names)])

    def _counting_copy(self, batch: Batch) -> nn.Module:
        if self._copy is None:
            try:
                model = self._rehearsed(on_meta(self._source), batch)
            except Exception:  # noqa: BLE001  # it creates tensors on the CPU or reads values: it needs numbers
                self._on_meta = False
                model = self._rehearsed(copy_of(self._source).to("cpu"), batch)
            optimizer = self._workload.make_optimizer(model.named_parameters())
            optimizer.step()
            for parameter in model.parameters():
                state = sum(v.nbytes for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))
                self._visited_bytes.append(2 * parameter.nbytes + state)
            self._copy, self._source = model, self._model
        return self._copy

    def _rehearsed(self, model: nn.Module, batch: Batch) -> nn.Module:
        model.zero_grad(set_to_none=True)
        for parameter, trainable in zip(model.parameters(), self._dense, strict=True):
            parameter.requires_grad_(trainable)
        model.train()
        with kept_generators([]):
            loss = self._workload.loss(model, self._without_numbers(batch))
            if loss.requires_grad:  # a teacher's does not
                loss.backward()
        return model

    def _without_numbers(self, batch: Batch) -> Batch:
        return to_meta(batch) if self._on_meta else tuple(torch.zeros(t.shape, dtype=t.dtype) for t in batch)


# --- A run: what it executes, against the model as it was built -------------------------------------------------------


class RunCost:
    """Count what each step costs, once for each set of stopped layers, batch shape and structure of the model.

    Savings are relative to the model as it was built, even if it changes later.
    """

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._workload = workload
        self._now = self._dense = CostTable(workload, model)
        self._tables = [self._dense]
        self._beside: dict[int, CostTable] = {}
        self.counts = dict.fromkeys(
            ("step", "forward_flops", "backward_flops", "gradient_bytes", "optimizer_bytes",
             "dense_flops", "dense_backward_flops"), 0
        )  # fmt: skip
        self.flops_before = 0  # FLOPs executed before the loaded checkpoint, or before `begin_spending`
        self.step, self.dense_step = self._now.step, self._dense.dense_step
        """Costs of a step of the model as it is now, and as it was built with nothing stopped; see `CostTable`."""

    @property
    def counting_time_s(self) -> float:
        """Return the seconds spent on counting so far, which are no part of the training."""
        return sum(table.counting_time_s for table in self._tables)

    @property
    def executed_flops(self) -> int:
        return self.counts["forward_flops"] + self.counts["backward_flops"]

    @property
    def search_flops(self) -> int:
        """Return the FLOPs executed since the checkpoint was loaded, or since `begin_spending`."""
        return self.executed_flops - self.flops_before

    def begin_spending(self) -> None:
        """Count `search_flops` from now on; FLOPs executed before belong to another trial."""
        self.flops_before = self.executed_flops

    def freeze_dense(self) -> None:
        """Copy the model as it is, before a method changes its structure or hooks into it."""
        self._dense.freeze()

    def change_model(self, model: nn.Module) -> None:
        """Count the steps of a model with another structure; savings stay relative to the model as it was built."""
        self._now = self._new_table(model, structure_of(model))
        self._now.freeze()  # without the hooks that are removed now and registered again when a step is counted
        self.step = self._now.step
        self._beside.clear()

    def add(
        self, dense: StepCost, cost: StepCost, batch: Batch, beside: Iterable[nn.Module],
        estimated: EstimateFlops | None = None,
    ) -> None:  # fmt: skip
        """Add an executed step, of which `dense_step` and `step` tell the costs.

        ``beside`` are other models that ran forward on its batch, such as a teacher; ``estimated`` is what an estimate
        of the gradients executed beside it.
        """
        counts = self.counts
        counts["step"] += 1
        counts["forward_flops"] += cost.forward_flops + sum(self._forward_flops(model, batch) for model in beside)
        counts["backward_flops"] += cost.backward_flops
        counts["gradient_bytes"] += cost.gradient_bytes
        visited = dense if estimated is not None and estimated.all_trained else cost
        counts["optimizer_bytes"] += visited.optimizer_bytes
        counts["dense_flops"] += dense.flops
        counts["dense_backward_flops"] += dense.backward_flops
        self.add_measured(estimated)

    def add_measured(self, executed: EstimateFlops | None) -> None:
        if executed is not None:
            self.counts["forward_flops"] += executed.forward_flops
            self.counts["backward_flops"] += executed.backward_flops

    def _forward_flops(self, model: nn.Module, batch: Batch) -> int:
        table = self._beside.get(id(model))
        if table is None:
            table = self._beside[id(model)] = self._new_table(model, ("beside", structure_of(model)))
        return table.forward_flops(batch)

    def _new_table(self, model: nn.Module, structure: Hashable) -> CostTable:
        self._tables.append(CostTable(self._workload, model, structure))
        return self._tables[-1]

    def columns(self, epoch: int, epochs: int) -> dict[str, Any]:
        """Return the result columns of compute after ``epoch`` of ``epochs`` epochs (`trainables.metrics.ROW`)."""
        counts, executed = self.counts, self.executed_flops
        # Epochs are alike, so the executed part gives the full budget's cost.
        budget = counts["dense_flops"] * epochs // epoch
        backward_budget = counts["dense_backward_flops"] * epochs // epoch
        backward_saved = counts["dense_backward_flops"] - counts["backward_flops"]
        return {
            "compute_saved": share_of_budget(counts["dense_flops"] - executed, budget),
            "backward_saved": share_of_budget(backward_saved, backward_budget),
            "executed_flops": executed,
            "search_flops": self.search_flops,
            "forward_flops": counts["forward_flops"],
            "backward_flops": counts["backward_flops"],
            "dense_flops": budget,
            "gradient_bytes": counts["gradient_bytes"],
            "optimizer_bytes": counts["optimizer_bytes"],
        }


def saved_shares(
    workload: Workload, model: nn.Module, batch: Batch, most: int | None = None
) -> dict[int, float | None]:
    """Return the share of a step's FLOPs, in [0, 1], that is saved when the parameters 0..N are stopped, by N.

    The N are the ends of whole units (`unit_ends`). Each takes half a second for a network of 60 layers, so at most
    ``most`` are counted, evenly spread, None for all; the others have the share None.
    """
    ends = unit_ends(list(model.parameters()), model)
    table = CostTable(workload, model)
    dense = table.dense_step(batch).flops
    saved: dict[int, float | None] = dict.fromkeys(ends)
    for end in spread(ends, len(ends) if most is None else most):
        saved[end] = share_saved(table.stopped_step(end, batch).flops, dense)
    return saved


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of the values, evenly spread, always with the last one.

    >>> spread(range(10), 4), spread([3, 5], 4)
    ([1, 4, 6, 9], [3, 5])
    """
    if len(values) <= most:
        return list(values)
    return [values[(place * len(values)) // most - 1] for place in range(1, most + 1)]
