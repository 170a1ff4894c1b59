"""Quantization that starts when it is frozen, used by post-training quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.quantizers.quantized_module import Quantization


class Frozen(Quantization):
    """Return its input unchanged until it is frozen.

    The frozen state is stored twice: as a Python flag, so that the forward pass does not synchronize with the device,
    and as a buffer in the model's state dict. Loading a state sets the flag from the buffer.

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
