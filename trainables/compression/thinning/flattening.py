"""Mapping between a channel and the columns of a linear layer that reads it after a flattening.

torch_pruning derives the mapping from the channels it infers along one path back through the graph, which is wrong
after a shortcut that pads with zero channels (ResNet for 32x32 images, option A). The flattened shape is known exactly:
autograd saves it.

Shapes: (N, C, *places) is flattened to (N, C * P), P = prod(places); channel c becomes columns c P .. (c + 1) P - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from trainables.compression.thinning.cutting import NORMS, width

#: Channel indices, each with the index of the root's channel that it comes from (torch_pruning's pairs).
Indices = list[Any]


def map_flattenings(graph: Any) -> None:
    """Set the mapping of every flattening in torch_pruning's graph, and prevent it from inferring them again."""
    import torch_pruning  # type: ignore[import-untyped]

    kinds = torch_pruning.ops.OPTYPE
    for node in graph.module2node.values():
        if node.type != kinds.RESHAPE:
            continue
        shape = [int(size) for size in getattr(node.grad_fn, "_saved_self_sym_sizes", ())]
        if len(shape) < 4 or _channels_behind(node) != prod(shape[1:]):
            continue
        places = prod(shape[2:])
        for other in node.inputs:
            _set(other, node, _spread(places))
            _set(node, other, _gather(places))
        for other in node.outputs:
            _set(other, node, None)
            _set(node, other, None)
        node.type = kinds.ELEMENTWISE  # torch_pruning infers only RESHAPE nodes again


def _set(source: Any, target: Any, mapping: Callable[[Indices], Indices] | None) -> None:
    for dependency in source.dependencies:
        if dependency.target is target:
            dependency.index_mapping[0] = mapping


def _spread(places: int) -> Callable[[Indices], Indices]:
    return lambda given: [i._replace(idx=k) for i in given for k in range(i.idx * places, (i.idx + 1) * places)]


def _gather(places: int) -> Callable[[Indices], Indices]:
    return lambda given: list(dict.fromkeys(i._replace(idx=i.idx // places) for i in given))


def _channels_behind(node: Any) -> int | None:
    """Return the input channels of the first layer after a node; None without one."""
    seen, waiting = set(), [node]
    while waiting:
        behind = waiting.pop()
        if id(behind) in seen:
            continue
        seen.add(id(behind))
        if isinstance(behind.module, (_ConvNd, nn.Linear, *NORMS)):
            return width(behind.module, 1)
        waiting += behind.outputs
    return None
