"""Fixtures of the tests of Gradient-Skip."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from conv_models import conv_model
from counted_loops import RECORDS, end_counting
from prefix_caches import SAMPLES, stopped
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting.process_record import ProcessRecord


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ignore warnings; a test that is about one asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def images() -> Tensor:
    """Inputs of a forward cache."""
    return torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(images: Tensor) -> nn.Module:
    """Of a forward cache: trained running statistics, parameters 0..6 stopped."""
    model = conv_model().train()
    for part in images.split(10):
        model(part)
    return stopped(model, 7)


@pytest.fixture
def own_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records of this test alone; none is left at work."""
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    yield
    for record in RECORDS:
        end_counting(record)
    RECORDS.clear()
    end_counting(process_record._PROCESS)
    assert _get_current_dispatch_mode_stack() == []
