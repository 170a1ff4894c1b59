"""Calls of torch's functions of layers, by the names of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

#: Convolutions by their number of dimensions.
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
}


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a call's arguments by name; none for a function that is not in the table."""
    return {**dict(zip(_ARGUMENTS[func], args, strict=False)), **(kwargs or {})} if func in _ARGUMENTS else {}


def convolution_sizes(func: Any, call: Mapping[str, Any]) -> tuple[list[int], list[int], list[int], int] | None:
    """Return stride, padding, dilation and groups; None for a padding in words or an input without samples."""
    dims = CONVOLUTIONS[func]
    if isinstance(call.get("padding"), str) or call["input"].dim() != dims + 2:
        return None

    def each(name: str, default: int) -> list[int]:
        size = call.get(name, default)
        sizes = [size] if isinstance(size, int) else list(size)
        return sizes * dims if len(sizes) == 1 else sizes

    return each("stride", 1), each("padding", 0), each("dilation", 1), int(call.get("groups", 1))
