"""FLOPs of a training step by layer: the forward and backward cost of each module's own operations.

Counting runs a copy of the model on the meta device with the counter of `trainables.training.cost`, so the sums over
layers are the totals of that module. The counter is read whenever the active layer changes, and its increase belongs to
the layer that was active. In the forward pass the active layer is that of the innermost running module; in the backward
pass, that of the module that created the executing autograd node: nodes are labelled as modules are entered and left,
and a hook on each node reports when it begins. (The module tracker inside torch's counter uses the tensors that enter
and leave modules instead. It never leaves a module whose input needs no gradient, such as the first layer, and it
has no separate place for what a caller computes between two modules.)

Shapes: P parameters in the model's order have the numbers 0..P-1; a batch is a tuple of tensors whose first
dimension is the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from trainables.gradskip.layers import unit_ends
from trainables.runtime.flops import flop_counter
from trainables.savings import share_saved
from trainables.training.cost import CostTable
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import on_meta, to_meta
from trainables.workloads.batch_structure import tensors_in

#: Name for operations of no module that owns parameters: attention scores, a loss, matrix products of a caller.
OUTSIDE = "outside layers"


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one module's own operations in a training step on one batch."""

    name: str
    """The module's name in the model, empty for the model itself; `OUTSIDE` for what belongs to no such module."""
    numbers: tuple[int, ...]
    """Numbers of the parameters that it owns itself, ascending; a shared one has one number. Empty for `OUTSIDE`."""
    forward_flops: int
    """FLOPs in the forward pass, >= 0, all its calls together."""
    backward_flops: int
    """FLOPs of the gradients of these operations, of weights and inputs, >= 0."""


def layer_costs(workload: Workload, model: nn.Module, batch: Batch) -> list[LayerCost]:
    """Return the costs of a training step on this batch by layer; model and batch are not changed.

    A layer is a module that owns parameters. Operations of the module around it, or of modules without parameters
    inside it, are not its own. A parametrised weight (`torch.nn.utils.parametrizations`) belongs to its layer.

    Args:
        workload: whose loss is computed.
        model: with ``requires_grad`` as it will be trained.
        batch: on any device; shapes and dtypes count.

    Returns:
        Layers by their first parameter's number, and `OUTSIDE` last. Their sums are the step's
        `trainables.training.cost.StepCost.forward_flops` and ``backward_flops``.
    """
    rehearsal = on_meta(model).train()
    owned = owned_numbers(rehearsal)
    ledger = _Ledger()
    for name, module in rehearsal.named_modules():
        layer = _layer_of(name)
        ledger.watch(module, layer if layer in owned else OUTSIDE)
    try:
        with ledger.counter:
            loss = workload.loss(rehearsal, to_meta(batch))
            ledger.label_nodes(loss)
            forward = ledger.take()
            if loss.requires_grad:
                loss.backward()
            backward = ledger.take()
    finally:
        ledger.labelled.clear()  # the graph's hooks hold the ledger, which holds the graph
    return [
        LayerCost(name=layer, numbers=numbers, forward_flops=forward[layer], backward_flops=backward[layer])
        for layer, numbers in (*owned.items(), (OUTSIDE, ()))
    ]


def saved_shares(
    workload: Workload, model: nn.Module, batch: Batch, most: int | None = None
) -> dict[int, float | None]:
    """Return the share of a step's FLOPs, in [0, 1], that is saved when the parameters 0..N are stopped, by N.

    The N are the ends of whole units (`trainables.gradskip.layers.unit_ends`). Each is counted separately, which takes
    half a second for a network of 60 layers.

    Args:
        workload: whose loss is computed.
        model: as it will be trained.
        batch: on any device.
        most: most units to count (>= 1), evenly spread, None for all; units that are not counted have the share None.
    """
    ends = unit_ends(model)
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


def owned_numbers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the parameter numbers of the modules that own parameters, by name, in order of the first number."""
    number_of = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    found: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        numbers = {number_of[id(parameter)] for parameter in module.parameters(recurse=False)}
        if numbers:
            found.setdefault(_layer_of(name), set()).update(numbers)
    by_first = sorted((sorted(numbers), name) for name, numbers in found.items())
    return {name: tuple(numbers) for numbers, name in by_first}


def _layer_of(module_name: str) -> str:
    """Return the layer of a module; torch keeps a parametrised weight in modules below its layer.

    >>> _layer_of("features.0.parametrizations.weight.1")
    'features.0'
    """
    parts = module_name.split(".")
    return ".".join(parts[: parts.index("parametrizations")]) if "parametrizations" in parts else module_name


class _Ledger:
    """The active layer, and the FLOPs counted so far by layer."""

    def __init__(self) -> None:
        self.counter = flop_counter()
        self.labelled: set[Node] = set()
        self._credited = 0
        self._flops: Counter[str] = Counter()
        #: Running layers, the innermost last; in the backward pass, the first entry is the executing node's layer.
        self._at_work = [OUTSIDE]

    def take(self) -> Counter[str]:
        """Return the FLOPs since the last call by layer, and make `OUTSIDE` the active layer."""
        self._credit()
        found, self._flops, self._at_work = self._flops, Counter(), [OUTSIDE]
        return found

    def watch(self, module: nn.Module, layer: str) -> None:
        """Register hooks that make ``layer`` the active layer while the module runs."""

        def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.label_nodes((args, kwargs))  # what the caller computed before
            self._credit()
            self._at_work.append(layer)

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            self.label_nodes(output)
            self._credit()
            self._at_work.pop()

        module.register_forward_pre_hook(begin, with_kwargs=True)
        # Activation checkpointing ends a module's recomputation by an exception as soon as it has what it needs.
        module.register_forward_hook(end, always_call=True)

    def label_nodes(self, value: Any) -> None:
        """Label the unlabelled autograd nodes that created these tensors with the active layer."""
        layer = self._at_work[-1]
        waiting = [tensor.grad_fn for tensor in tensors_in(value)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.labelled:
                continue
            self.labelled.add(node)
            node.register_prehook(partial(self._execute, layer))
            waiting += [earlier for earlier, _ in node.next_functions]

    def _execute(self, layer: str, _gradients: Any) -> None:
        self._credit()
        self._at_work[0] = layer

    def _credit(self) -> None:
        counted = int(self.counter.get_total_flops())
        self._flops[self._at_work[-1]] += counted - self._credited
        self._credited = counted
