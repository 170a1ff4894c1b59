"""The clock of training steps on a stream whose work takes longer than the host needs to queue it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainables.training.clock import TrainingClock


class Stream:
    """A simulated GPU: work is queued at once and done in its order, in seconds of a simulated time."""

    def __init__(self) -> None:
        self.host_s = self.done_s = 0.0

    def work(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.done_s = max(self.done_s, self.host_s) + device_s

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self, stream: Stream) -> None:
        self.at_s = max(stream.done_s, stream.host_s)

    def query(self) -> bool:
        return self.at_s <= self.stream.host_s

    def synchronize(self) -> None:
        self.stream.host_s = max(self.stream.host_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1000 * (end.at_s - self.at_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def steps(clock: TrainingClock, gpu: Stream, count: int, step: Callable[[], None], between: Callable[[], None]) -> None:
    for _ in range(count):
        clock.resume()
        step()
        clock.pause()
        between()


def test_on_a_gpu_it_is_the_time_of_the_steps_kernels_and_nothing_waits(gpu: Stream) -> None:
    clock = TrainingClock(torch.device("cuda"), lambda: 0.0)
    steps(clock, gpu, 40, lambda: gpu.work(0.001, 0.05), lambda: gpu.work(0.002, 0.01))
    assert gpu.host_s == pytest.approx(40 * 0.003)  # the host ran ahead
    # The device waits for the host before the first step alone.
    assert clock.read_s() == pytest.approx(40 * 0.05 + 0.001)
    assert gpu.host_s == pytest.approx(0.001 + 40 * 0.05 + 39 * 0.01)  # to read it is to wait for it


def test_where_the_device_waits_for_the_host_it_is_the_hosts_time(gpu: Stream) -> None:
    clock = TrainingClock(torch.device("cuda"), lambda: 0.0)
    steps(clock, gpu, 40, lambda: gpu.work(0.02, 0.001), lambda: gpu.work(0.5, 0.0))
    assert clock.read_s() == pytest.approx(40 * 0.021)


def test_counting_within_a_step_is_excluded_and_a_saved_time_is_gone_on_from(gpu: Stream) -> None:
    counted_s = [0.0]
    clock = TrainingClock(torch.device("cuda"), lambda: counted_s[0])

    def step() -> None:
        gpu.work(0.3, 0.0)
        counted_s[0] += 0.2

    clock.resume()
    step()
    clock.set(7.0)
    step()
    assert clock.read_s() == pytest.approx(7.1)
    clock.pause()
    gpu.work(5.0, 1.0)
    assert clock.read_s() == pytest.approx(7.1)
