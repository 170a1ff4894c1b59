"""FLOPs of an operation by torch's formulas, with one corrected and one for attention on a CPU added.

torch counts the gradient of a grouped convolution's weights as if every group saw all channels: for a depthwise
convolution this is too much by a factor of the number of channels (torch 2.13,
`torch.utils.flop_counter.conv_backward_flop`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Self

import torch
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


#: Formulas in place of torch's, or where torch has none, of shapes.
_OURS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward: convolution_backward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
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
    return shape_wrapper(_OURS[operation]) if operation in _OURS else found
