"""Quantization that begins when it is frozen: the switch of post-training quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.quantizers.quantized_module import Quantization


class Frozen(Quantization):
    """Lets everything through until it is frozen.

    Whether it is frozen is both a flag, for the forward pass must not wait for the device, and a buffer, so that the
    model's state has it; loading a state sets the flag from the buffer.

    Args:
        bits: k.
        device: of the buffer.
    """

    is_frozen: Tensor

    def __init__(self, bits: int, device: torch.device) -> None:
        super().__init__(bits)
        self.frozen = False
        self.register_buffer("is_frozen", torch.zeros((), dtype=torch.bool, device=device))
        self.register_load_state_dict_post_hook(_follow_buffer)

    def freeze(self) -> None:
        """Quantize from now on."""
        self.frozen = True
        self.is_frozen.fill_(True)


def _follow_buffer(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, Frozen)
    if not module.is_frozen.is_meta:
        module.frozen = bool(module.is_frozen)
