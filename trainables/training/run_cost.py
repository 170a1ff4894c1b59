"""FLOPs and bytes of the steps that a run executes, against those of the model as it was built."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from trainables.attachment import EstimateFlops
from trainables.gradskip.forward_cache.prefix_pass import PassReport
from trainables.savings import share_of_budget
from trainables.training.cost import CostTable, StepCost
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import structure_of


def with_estimate(cost: StepCost, dense: StepCost, estimated: EstimateFlops) -> StepCost:
    """Return the cost of a step in which a method estimated gradients.

    Args:
        cost: of the step's own forward and backward pass.
        dense: of a step with nothing stopped, whose optimizer visits what this one's does.
        estimated: what the estimate executed.
    """
    return replace(
        cost,
        forward_flops=cost.forward_flops + estimated.forward_flops,
        backward_flops=cost.backward_flops + estimated.backward_flops,
        optimizer_bytes=dense.optimizer_bytes if estimated.all_trained else cost.optimizer_bytes,
    )


class RunCost:
    """Count what each step costs, once for each set of stopped layers, batch shape and structure of the model.

    Args:
        workload: whose loss is counted.
        model: as it was built; savings are relative to it, even if it changes later.
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
        self.flops_before = 0
        """FLOPs executed before the loaded checkpoint."""

    @property
    def counting_time_s(self) -> float:
        """Return the seconds spent on counting so far, which are no part of the training."""
        return sum(table.counting_time_s for table in self._tables)

    @property
    def executed_flops(self) -> int:
        """Return the forward and backward FLOPs of the executed steps."""
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
        self._beside.clear()

    def dense_step(self, batch: Batch) -> StepCost:
        """Return the cost of a step with nothing stopped, of the model as it was built."""
        return self._dense.dense_step(batch)

    def step(self, stop_key: Hashable, batch: Batch, cached: PassReport | None = None) -> StepCost:
        """Return the cost of a step of the model as it is now.

        Args:
            stop_key: `Attached.stop_key`.
            batch: of the step.
            cached: what the forward cache saved of its forward pass.
        """
        return self._now.step(stop_key, batch, cached)

    def add(self, dense: StepCost, cost: StepCost, batch: Batch, beside: Iterable[nn.Module]) -> None:
        """Add an executed step.

        Args:
            dense: of `dense_step`.
            cost: of `step`.
            batch: of the step.
            beside: other models that ran forward on it, such as a teacher.
        """
        counts = self.counts
        counts["step"] += 1
        counts["forward_flops"] += cost.forward_flops + sum(self._forward_flops(model, batch) for model in beside)
        counts["backward_flops"] += cost.backward_flops
        counts["gradient_bytes"] += cost.gradient_bytes
        counts["optimizer_bytes"] += cost.optimizer_bytes
        counts["dense_flops"] += dense.flops
        counts["dense_backward_flops"] += dense.backward_flops

    def add_measured(self, executed: EstimateFlops | None) -> None:
        """Add what measurements executed beside the steps."""
        if executed is not None:
            self.counts["forward_flops"] += executed.forward_flops
            self.counts["backward_flops"] += executed.backward_flops

    def _forward_flops(self, model: nn.Module, batch: Batch) -> int:
        table = self._beside.get(id(model))
        if table is None:
            table = self._beside[id(model)] = self._new_table(model, ("beside", structure_of(model)))
        return table.forward_flops(batch)

    def _new_table(self, model: nn.Module, structure: Hashable) -> CostTable:
        table = CostTable(self._workload, model, structure)
        self._tables.append(table)
        return table

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
