"""Leases on a clock that only the test moves, against a second implementation; and between processes of a real Ray."""

from __future__ import annotations

import os
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lease_holders import HOLDERS, holder_of
from ray.exceptions import RaySystemError

from trainables.stage_tree import coordinator
from trainables.stage_tree.coordinator import RayLeases, find_coordinator, start_coordinator
from trainables.stage_tree.leases import Leases
from tune_cac.ray_backend.session import ray_session


class Clock:
    """Time in seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class ManyHolders(RuleBasedStateMachine):
    """Random calls, against a history of (stage, holder, until) whose last line of a stage decides."""

    holders = st.sampled_from(HOLDERS)
    stage_names = st.sampled_from(["a", "b"])
    leases_s = st.integers(1, 5)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.claims = Leases(self.clock)
        self.history: list[tuple[str, str | None, float]] = []
        # What each holder was promised by its own claims, and has not given up.
        self.promised: dict[tuple[str, str], float] = {}

    def last(self, stage: str) -> tuple[str | None, float]:
        lines = [(holder, until) for at, holder, until in self.history if at == stage]
        return lines[-1] if lines else (None, 0.0)

    @rule(stage=stage_names, holder=holders, lease_s=leases_s)
    def claim(self, stage: str, holder: str, lease_s: float) -> None:
        owner, until = self.last(stage)
        free = owner is None or until <= self.clock.now_s or owner == holder
        assert self.claims.claim(stage, holder, lease_s) is free
        if free:
            self.history.append((stage, holder, self.clock.now_s + lease_s))
            self.promised[stage, holder] = self.clock.now_s + lease_s

    @rule(holder=holders, lease_s=leases_s)
    def renew(self, holder: str, lease_s: float) -> None:
        self.claims.renew(holder, lease_s)
        for stage in "ab":
            if self.last(stage)[0] == holder:
                self.history.append((stage, holder, self.clock.now_s + lease_s))
                self.promised[stage, holder] = self.clock.now_s + lease_s

    @rule(stage=stage_names, holder=holders)
    def release(self, stage: str, holder: str) -> None:
        self.claims.release(stage, holder)
        if self.last(stage)[0] == holder:
            self.history.append((stage, None, 0.0))
        self.promised.pop((stage, holder), None)

    @rule(holder=holders)
    def release_all(self, holder: str) -> None:
        self.claims.release_all(holder)
        for stage in "ab":
            if self.last(stage)[0] == holder:
                self.history.append((stage, None, 0.0))
            self.promised.pop((stage, holder), None)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds

    @invariant()
    def at_most_one_holder_has_a_live_promise_and_it_is_the_one_named(self) -> None:
        for stage in "ab":
            live = [holder for (at, holder), until in self.promised.items() if at == stage and until > self.clock.now_s]
            assert len(live) <= 1
            assert holder_of(self.claims, stage) == (live[0] if live else None)


TestManyHolders = ManyHolders.TestCase
TestManyHolders.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


# --- the coordinator --------------------------------------------------------------------------------------------------


#: A test on a Ray that was started as a search starts it.
def of_ray(test: Any) -> Any:
    marked = pytest.mark.usefixtures("_ray", "_each_test_is_a_process_of_its_own")(test)
    return pytest.mark.slow(pytest.mark.thorough(marked))


#: Longer than any test takes: such a lease does not lapse in one.
LONG_S = 3600.0


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    """As a search starts it."""
    with ray_session(cpus=2):
        yield


@pytest.fixture
def _each_test_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the warning that comes once a process."""
    monkeypatch.setattr(coordinator, "_warned", False)


@pytest.fixture
def name() -> Iterator[str]:
    """A coordinator of the test's own."""
    name = f"stages-{uuid.uuid4().hex}"
    actor = start_coordinator(name)
    yield name
    ray.kill(actor)


def start_holder(name: str) -> Any:
    """A process that claims, as a trial does."""

    class Holder:
        """Local, so that Ray sends it by value."""

        def __init__(self) -> None:
            from trainables.stage_tree.coordinator import RayLeases

            self.claims = RayLeases(name)

        def call(self, method: str, *arguments: Any) -> Any:
            return getattr(self.claims, method)(*arguments)

        def pid(self) -> int:
            import os

            return os.getpid()

    return ray.remote(num_cpus=0)(Holder).remote()


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: __import__("os").getpid())))


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; a minute means never."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@of_ray
def test_one_of_two_processes_gets_a_stage(name: str) -> None:
    holders = [start_holder(name) for _ in range(2)]
    pids = {ray.get(holder.pid.remote()) for holder in holders}
    assert len(pids | {os.getpid(), pid_of(find_coordinator(name))}) == 4
    for stage in range(20):  # asked at the same time
        answers = ray.get(
            [holder.call.remote("claim", f"s{stage}", f"h{i}", LONG_S) for i, holder in enumerate(holders)]
        )
        assert sorted(answers) == [False, True]
        assert RayLeases(name).claim(f"s{stage}", f"h{answers.index(True)}", LONG_S)
        assert not RayLeases(name).claim(f"s{stage}", "h2", LONG_S)
    ray.get(holders[0].call.remote("release_all", "h0"))
    assert all(ray.get(holders[1].call.remote("claim", f"s{stage}", "h1", LONG_S)) for stage in range(20))


@of_ray
def test_starting_it_twice_is_one_coordinator(name: str) -> None:
    RayLeases(name).claim("stage", "first", LONG_S)
    again = start_coordinator(name)
    assert not ray.get(again.claim.remote("stage", "second", LONG_S))
    assert ray.get(again.claim.remote("stage", "first", LONG_S))
    assert pid_of(again) == pid_of(find_coordinator(name))
    assert find_coordinator(name + "-another") is None


@of_ray
def test_a_killed_holders_stage_is_free_after_its_lease(name: str) -> None:
    claims = RayLeases(name)
    holder = start_holder(name)
    assert ray.get(holder.call.remote("claim", "stage", "first", LONG_S))
    assert not claims.claim("stage", "second", LONG_S)
    ray.get(holder.call.remote("renew", "first", 1.0))  # its last sign of life
    os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    until(lambda: claims.claim("stage", "second", LONG_S))
    assert not claims.claim("stage", "first", LONG_S)
    claims.renew("first", LONG_S)
    assert not claims.claim("stage", "first", LONG_S)
    assert claims.claim("stage", "second", LONG_S)


@of_ray
def test_a_killed_coordinator_is_restarted_without_claims(name: str) -> None:
    claims = RayLeases(name, timeout_s=60)
    claims.claim("stage", "first", LONG_S)
    pid = pid_of(find_coordinator(name))
    os.kill(pid, signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a call in flight may not be answered, and is granted
        until(lambda: claims.claim("stage", "second", LONG_S) and not claims.claim("stage", "third", LONG_S))
    assert not claims.claim("stage", "first", LONG_S)
    assert pid_of(find_coordinator(name)) != pid


@of_ray
def test_a_coordinator_that_is_gone_grants_everything_and_says_so_once(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    claims = RayLeases(name)
    assert claims.claim("stage", "first", LONG_S)
    ray.kill(find_coordinator(name))
    until(lambda: claims.claim("stage", "second", LONG_S))
    assert claims.claim("stage", "first", LONG_S)
    claims.renew("first", LONG_S)
    claims.release("stage", "first")
    claims.release_all("first")
    assert RayLeases("never started").claim("stage", "third", LONG_S)
    (warning,) = recwarn.list
    assert "training goes on, and some stretches may be trained twice" in str(warning.message)
    kept = start_coordinator(name)  # another under this name is found
    assert ray.get(kept.claim.remote("stage", "first", LONG_S))
    assert not claims.claim("stage", "second", LONG_S)


@of_ray
def test_a_coordinator_that_does_not_answer_grants_everything_and_is_left_alone(name: str) -> None:
    claims = RayLeases(name, timeout_s=0.5)
    pid = pid_of(find_coordinator(name))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match=r"did not answer within 0\.5 s"):
            assert claims.claim("stage", "second", LONG_S)
        # 100 calls with a timeout each would take nearly a minute; left alone, none of them asks.
        assert all(claims.claim("stage", str(i), LONG_S) for i in range(100))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not claims.claim("stage", "third", LONG_S))  # it answers again, and "second" had been heard


class Cancelled:
    """An actor's class whose first starts Ray cancels."""

    def __init__(self, times: int) -> None:
        self.left = times

    def options(self, **_: Any) -> Cancelled:
        return self

    def remote(self) -> str:
        if self.left:
            self.left -= 1
            raise RaySystemError("Actor creation cancelled.")
        return "actor"


@of_ray
def test_a_start_that_ray_cancels_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen of a head that had just come back, which no test can have when it wants."""
    monkeypatch.setattr(coordinator, "_BETWEEN_STARTS_S", 0.0)
    for times in (2, 3):
        monkeypatch.setattr(coordinator.ray, "remote", lambda times=times, **_: lambda kind: Cancelled(times))
        if times == 2:
            assert start_coordinator("again") == "actor"
        else:
            with pytest.raises(RaySystemError, match="Actor creation cancelled"):
                start_coordinator("again")
