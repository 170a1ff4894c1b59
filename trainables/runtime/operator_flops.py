"""FLOPs of an operation by torch's formulas, with two corrected, and others added for what torch has no formula.

torch counts the gradient of a grouped convolution's weights as if every group saw all channels: for a depthwise
convolution this is too much by a factor of the number of channels (torch 2.13,
`torch.utils.flop_counter.conv_backward_flop`), and products with a sparse matrix as if it were dense.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

_aten = torch.ops.aten


def convolution_backward_flops(
    grad_out_shape: Sequence[int], x_shape: Sequence[int], w_shape: Sequence[int], *options: Any, **_: Any
) -> int:
    """Return a convolution's backward FLOPs: gradients of input and weights each cost as much as the forward pass.

    Args:
        grad_out_shape: (B, C_out, *outputs).
        x_shape: (B, C_in, *inputs).
        w_shape: (C_out, C_in / groups, *kernel), of a transposed one (C_in, C_out / groups, *kernel).
        options: of the operation; the fifth is whether it is transposed, the eighth, which of the gradients of input,
            weight and bias are computed.

    >>> shapes = (2, 8, 6, 6), (2, 8, 6, 6), (8, 1, 3, 3)  # depthwise
    >>> convolution_backward_flops(*shapes, None, 1, 1, 1, False, 0, 8, (True, True, False))
    20736
    """
    transposed, output_mask = options[4], options[7]
    places = (x_shape if transposed else grad_out_shape)[2:]
    forward = 2 * x_shape[0] * prod(places) * prod(w_shape)
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


def trilinear_flops(
    x1: Sequence[int], x2: Sequence[int], x3: Sequence[int], expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of a sum over products of three tensors, each expanded at some dimensions (`nn.Bilinear`).

    >>> trilinear_flops((2, 4), (3, 4, 5), (2, 5), [1, 3], [0], [1, 2])
    240
    """
    whole = [1] * (len(x1) + len(expand1))
    for shape, expanded in ((x1, expand1), (x2, expand2), (x3, expand3)):
        sizes = iter(shape)
        whole = [max(size, 1 if d in expanded else next(sizes)) for d, size in enumerate(whole)]
    return 2 * prod(whole)


def recurrent_flops(x: Sequence[int], weights: Any, *more: Any, **_: Any) -> int:
    """Return the FLOPs of recurrent layers: each row of x, (T, B, C) or packed (rows, C), meets each matrix once.

    The weights are those of all layers and directions, matrices and biases; of one of oneDNN, the second and the third
    argument are the two matrices.

    >>> recurrent_flops((5, 3, 4), (24, 4), (24, 6), (24,), (24,))
    7200
    """
    matrices = [weights, more[0]] if isinstance(weights[0], int) else [w for w in weights if len(w) == 2]
    return 2 * prod(x[:-1]) * sum(map(prod, matrices))


def _cudnn_backward_flops(x: Sequence[int], weights: Any, *more: Any, **_: Any) -> int:
    output_mask = more[-1]  # of input, states and weights; cuDNN computes those of input and states whatever is asked
    return recurrent_flops(x, weights) * (1 + output_mask[3])


def _product_flops(formula: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a matrix product, of tensors; what a sparse layout leaves out costs nothing."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        flops = formula(*args, out_val=out_val, **kwargs)
        for matrix in args:
            if isinstance(matrix, Tensor) and matrix.layout is not torch.strided and matrix.numel():
                kept = matrix._values() if matrix.layout is torch.sparse_coo else matrix.values()
                flops = flops * kept.numel() // matrix.numel()
        return flops

    count._get_raw = True  # type: ignore[attr-defined]  # torch gives it tensors, not shapes
    return count


def grouped_product_flops(x: Sequence[int], y: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product of matrices by groups (experts): of rows, of columns, of what is summed, or of all.

    >>> [grouped_product_flops(*two) for two in (((7, 3), (2, 3, 4)), ((2, 7, 3), (3, 4)), ((2, 7, 3), (2, 3, 4)))]
    [168, 168, 336]
    """
    return 2 * prod(x[-2:]) * y[-1] * (x[0] if len(x) == len(y) == 3 else 1)


def _linear_flops(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a linear layer on a nested tensor; on others it is a product."""
    return 2 * int(x.numel()) * weight.shape[0]


def _linear_backward_flops(x: Tensor, _: Tensor, weight: Tensor, output_mask: Sequence[bool], **__: Any) -> int:
    return _linear_flops(x, weight) * sum(output_mask[:2])


_linear_flops._get_raw = _linear_backward_flops._get_raw = True  # type: ignore[attr-defined]


#: Formulas in place of torch's, or where torch has none, of shapes.
_OURS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward: convolution_backward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
    **{packet: _product_flops(flop_registry[packet]) for packet in (_aten.mm, _aten.addmm, _aten.bmm)},
    _aten._sparse_addmm: _product_flops(flop_registry[_aten.addmm]),
    _aten.mv: lambda matrix, *_, **__: 2 * prod(matrix),
    _aten.addmv: lambda vector, matrix, *_, **__: 2 * prod(matrix),
    _aten.dot: lambda vector, *_, **__: 2 * prod(vector),
    _aten.vdot: lambda vector, *_, **__: 2 * prod(vector),
    _aten._trilinear: trilinear_flops,
    **dict.fromkeys(
        (_aten._cdist_forward, _aten._euclidean_dist), lambda x1, *_, out_shape, **__: 2 * prod(out_shape) * x1[-1]
    ),
    **({_aten._grouped_mm: grouped_product_flops} if hasattr(_aten, "_grouped_mm") else {}),  # not in torch 2.6
    _aten.linear: _linear_flops,
    _aten.linear_backward: _linear_backward_flops,
    **dict.fromkeys((_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn), recurrent_flops),
    _aten.mkldnn_rnn_layer_backward: lambda *arguments, **_: 2 * recurrent_flops(*arguments),  # all gradients, always
    **dict.fromkeys((_aten._cudnn_rnn_backward, _aten.miopen_rnn_backward), _cudnn_backward_flops),
    _aten._cdist_backward: lambda grad, x1, *_, **__: 2 * prod(grad) * x1[-1],
}


class FlopCounter(FlopCounterMode):
    """Counter by these formulas that runs compiled models uncompiled, because it sees no compiled operations."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_OURS)

    def __enter__(self) -> Self:
        self._uncompiled = uncompiled()
        self._uncompiled.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._uncompiled.__exit__(*error)


def flop_counter() -> FlopCounter:
    """Return a new counter; it prints nothing."""
    return FlopCounter()


def uncompiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` has wrapped uncompiled, without affecting the compiled code.

    torch permanently stops compiling a function that it has once met under a counter of operations.
    """
    # Importing the compiler takes seconds. Where it is not imported, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def formula_of(operation: Any) -> Callable[..., int] | None:
    """Return the formula of an operation (an overload packet), (*args, out_val=..., **kwargs) -> FLOPs, or None."""
    found: Callable[..., int] | None = flop_registry.get(operation)
    ours = _OURS.get(operation)
    return found if ours is None else ours if hasattr(ours, "_get_raw") else shape_wrapper(ours)
