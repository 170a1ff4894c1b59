"""Cost of a training step, counted once for each set of stopped layers and each batch shape.

Counting runs a copy of the model on torch's meta device, which computes shapes and no numbers: the run's weights,
buffers and random generators are not touched. The counts equal those on the real device, except that torch does not
count all of a fused attention on a CPU. Matrix products and convolutions count; norms, activations and the optimizer's
arithmetic do not.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from trainables.gradskip.forward_cache import PassReport
from trainables.gradskip.layers import unit_ends
from trainables.runtime.flops import flop_counter
from trainables.runtime.isolation import kept_generators
from trainables.savings import share_saved
from trainables.training.recipe.recipe import computed_again
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import on_meta, shapes_of, to_meta
from trainables.workloads.batch_structure import tensors_in

# --- FLOPs of a training step by layer: the forward and backward cost of each module's own operations -----------------
# Counting runs a copy of the model on the meta device with the counter of `trainables.training.cost`, so the sums over
# layers are the totals of that module. The counter is read whenever the active layer changes, and its increase belongs
# to the layer that was active. In the forward pass the active layer is that of the innermost running module; in the
# backward pass, that of the module that created the executing autograd node: nodes are labelled as modules are entered
# and left, and a hook on each node reports when it begins. (The module tracker inside torch's counter uses the tensors
# that enter and leave modules instead. It never leaves a module whose input needs no gradient, such as the first layer,
# and it has no separate place for what a caller computes between two modules.)
#
# Shapes: P parameters in the model's order have the numbers 0..P-1; a batch is a tuple of tensors whose first
# dimension is the sample.

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


# --- Cost of a training step, counted once for each set of stopped layers and each batch shape ------------------------


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
