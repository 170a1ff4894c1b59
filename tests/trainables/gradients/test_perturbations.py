"""The engine of changed weights: memory, the search for a size of chunks, and counted FLOPs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.gradients import central_difference
from trainables.gradients.perturbations import Tuning


def test_chunks_bound_the_memory_and_change_no_value() -> None:
    """What is allocated is seen by torch's dispatcher, not by the engine."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocated(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(tensor, Tensor):
                    self.most = max(self.most, tensor.nbytes)
            return found

    model = nn.Sequential(nn.Conv2d(1, 24, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 10)).double()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    free = central_difference(loss, model, 1e-2, "0.weight")
    with Allocated() as seen:
        small = central_difference(loss, model, 1e-2, "0.weight", memory_bytes=2**20)
    torch.testing.assert_close(small, free, rtol=1e-9, atol=1e-12)
    assert seen.most <= 2**20
    with Allocated() as seen:
        central_difference(loss, model, 1e-2, "0.weight")
    assert seen.most > 2**20


def test_tuning_finds_the_fastest_size_and_stays_below_the_most() -> None:
    tuning, times = Tuning(most=2048), {64: 1.0, 128: 1.1, 256: 1.9, 512: 5.0, 1024: 12.0}
    while not tuning.ended:
        tuning.told(times[tuning.size])
    assert tuning.size == 256
    tuning = Tuning(most=100)
    tuning.told(1.0)
    tuning.told(1.0)
    assert (tuning.ended, tuning.size) == (True, 100)
