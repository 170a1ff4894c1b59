"""FLOPs of what a method executes beside the training step's own passes, counted once for each kind of work."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from trainables.attachment import EstimateFlops
from trainables.runtime.flops import flop_counter


class FlopMeter:
    """Count FLOPs of passes. The first pass of a key runs under torch's counter, later ones are known."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._new: Hashable = None
        self.forward_flops = 0
        """FLOPs of forward passes so far."""
        self.backward_flops = 0
        """FLOPs of backward passes, and of what turns gradients into a direction, so far."""

    @contextmanager
    def forward(self, key: Hashable) -> Iterator[None]:
        """Count a forward pass; equal keys must mean equal work."""
        with self._counted(("forward", key)):
            yield
        self.forward_flops += self._known["forward", key]

    @contextmanager
    def backward(self, key: Hashable) -> Iterator[None]:
        """Count a backward pass; equal keys must mean equal work."""
        with self._counted(("backward", key)):
            yield
        self.backward_flops += self._known["backward", key]

    @contextmanager
    def _counted(self, key: Hashable) -> Iterator[None]:
        if key in self._known:
            yield
            return
        with flop_counter() as counter:
            yield
        self._known[key] = int(counter.get_total_flops())
        self._new = key

    def spare(self, key: Hashable, flops: int) -> None:
        """Take FLOPs that were left out of the last backward pass of a key from its count."""
        if self._new == ("backward", key):  # counted without them, and later ones may leave out others
            self._known["backward", key] += flops
        else:
            self.backward_flops -= flops
        self._new = None

    def add(self, backward_flops: int) -> None:
        """Add FLOPs of arithmetic on gradients, which are known from shapes; negative for what was spared."""
        self.backward_flops += backward_flops

    def take(self) -> EstimateFlops:
        """Return the counts since the last call, and begin anew."""
        taken = EstimateFlops(forward_flops=self.forward_flops, backward_flops=self.backward_flops)
        self.forward_flops = self.backward_flops = 0
        return taken
