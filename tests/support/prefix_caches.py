"""Forward caches over the small convolutional network, and the batches of an epoch.

Shapes: 40 samples, images (N, 1, 8, 8), labels (N,) in 0..4. The chain of `conv_model`: convolution, norm, ReLU (0-2),
convolution, norm, ReLU (3-5), convolution, ReLU, flatten, linear (6-9); parameters 0..6 are modules 0, 1, 3 and 4.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradskip.forward_cache import ForwardCache

SAMPLES = 40


#: Bytes of a row after the second block: 4 channels of 4x4 in float32.
ROW_BYTES = 4 * 4 * 4 * 4


def stopped(model: nn.Module, parameters: int) -> nn.Module:
    for parameter in list(model.parameters())[:parameters]:
        parameter.requires_grad_(False)
    return model


def cache_of(model: nn.Module, **more: Any) -> ForwardCache:
    more = {"forward": lambda m: m(torch.ones(3, 1, 8, 8)), **more}
    return ForwardCache(model, **{"samples": SAMPLES, "budget_bytes": 10**6, **more})


@contextmanager
def one_warning(pattern: str) -> Iterator[None]:
    """The block warns once, and so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    said = [warning for warning in said if warning.category is not ResourceWarning]  # of an earlier test's files
    assert len(said) == 1, [str(warning.message) for warning in said]
    assert re.search(pattern, str(said[0].message)), said[0].message


def batches(epoch: int, size: int = 7) -> Iterator[Tensor]:
    return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(size))
