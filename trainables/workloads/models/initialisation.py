"""Weight initialisation shared by several models."""

from __future__ import annotations

from torch import nn


def he_fan_out(model: nn.Module) -> None:
    """Draw every convolution from a normal distribution of variance 2 / fan-out; biases become 0.

    Draws from torch's global generator. Norms keep torch's initial weight 1 and bias 0.

    Source: He et al., "Delving Deep into Rectifiers", 2015, section 2.2, equation 14 (the backward pass).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
