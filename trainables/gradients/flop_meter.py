"""FLOPs of what a method executes beside the training step's own passes, counted once for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from trainables.attachment import EstimateFlops
from trainables.runtime.operator_flops import flop_counter


class FlopMeter:
    """Count FLOPs of passes. The first pass of a key runs under torch's counter, later ones are known."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self.forward_flops = 0  # FLOPs of forward passes so far
        self.backward_flops = 0  # FLOPs of backward passes, and of what turns gradients into a direction, so far

    @contextmanager
    def forward(self, key: Hashable) -> Iterator[None]:
        """Count a forward pass; equal keys must mean equal work."""
        with self._counted(("forward", key)):
            yield
        self.forward_flops += self._known["forward", key]

    @contextmanager
    def backward(self, key: Hashable, spared: Callable[[], int] = int) -> Iterator[None]:
        """Count a backward pass; equal keys must mean equal work, but for the FLOPs that it spared in the end."""
        with self._counted(("backward", key), spared):
            yield
        self.backward_flops += self._known["backward", key] - spared()

    @contextmanager
    def _counted(self, key: Hashable, spared: Callable[[], int] = int) -> Iterator[None]:
        if key in self._known:
            yield
            return
        with flop_counter() as counter:
            yield
        self._known[key] = int(counter.get_total_flops()) + spared()

    def add(self, backward_flops: int) -> None:
        """Add FLOPs of arithmetic on gradients, which are known from shapes; negative for what was spared."""
        self.backward_flops += backward_flops

    @contextmanager
    def apart(self) -> Iterator[FlopMeter]:
        """Count the block apart: its counts are in the meter that is given, once it has ended, and not in this one."""
        kept, spent = (self.forward_flops, self.backward_flops), FlopMeter()
        self.take()
        try:
            yield spent
        finally:
            spent.forward_flops, spent.backward_flops = self.forward_flops, self.backward_flops
            self.forward_flops, self.backward_flops = kept

    def take(self) -> EstimateFlops:
        """Return the counts since the last call, and begin anew."""
        taken = EstimateFlops(forward_flops=self.forward_flops, backward_flops=self.backward_flops)
        self.forward_flops = self.backward_flops = 0
        return taken
