"""The time of training steps: the host's on a CPU, the stream's on a GPU, whose kernels run behind the host.

On a GPU each stretch of training lies between two events of the stream, which note when the device reaches them. So
work between steps is excluded although it is queued among them, and the host waits only where it reads the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class TrainingClock:
    """A clock that runs during training steps alone.

    Args:
        device: on which the steps run.
        excluded_s: returns the seconds, so far, of what is no training although it happens in a step.
    """

    def __init__(self, device: torch.device, excluded_s: Callable[[], float]) -> None:
        self._device, self._excluded_s = device, excluded_s
        self._before_s = 0.0
        self._since: tuple[Any, float] | None = None  # a moment, and the seconds excluded up to it
        self._stretches: deque[tuple[Any, Any]] = deque()  # moments whose difference was not read yet

    def set(self, seconds: float) -> None:
        """Go on from a time; a clock that runs goes on running."""
        read_s = self.read_s()
        self._before_s += seconds - read_s

    def resume(self) -> None:
        """Begin a stretch of training, unless one has begun."""
        if self._since is None:
            self._since = self._moment(), self._excluded_s()

    def pause(self) -> None:
        """End the stretch of training, if one has begun."""
        if self._since is None:
            return
        begun, excluded_s = self._since
        self._since = None
        self._before_s -= self._excluded_s() - excluded_s
        self._stretches.append((begun, self._moment()))
        while self._stretches and self._is_over(self._stretches[0][1]):
            self._before_s += self._between_s(*self._stretches.popleft())

    @property
    def known_s(self) -> float:
        """Return the seconds of the stretches that the device is known to have ended; waits for nothing."""
        return self._before_s

    def read_s(self) -> float:
        """Return the seconds of training so far; waits for a GPU."""
        if runs := self._since is not None:
            self.pause()
        for _, end in self._stretches:
            end.synchronize()
        self._before_s += sum(self._between_s(*stretch) for stretch in self._stretches)
        self._stretches.clear()
        if runs:
            self.resume()
        return self._before_s

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _is_over(self, moment: Any) -> bool:
        return bool(self._device.type != "cuda" or moment.query())

    def _between_s(self, begin: Any, end: Any) -> float:
        return float(end - begin if self._device.type != "cuda" else begin.elapsed_time(end) / 1000)
