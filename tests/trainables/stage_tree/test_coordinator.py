"""Claims between real processes of a real Ray."""

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
from ray.exceptions import RaySystemError

from trainables.stage_tree import coordinator
from trainables.stage_tree.coordinator import RayLeases, find_coordinator, start_coordinator
from tune_cac.ray_backend.session import ray_session

pytestmark = pytest.mark.slow

#: Longer than any test takes: such a lease does not lapse in one.
LONG_S = 3600.0


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """As a search starts it."""
    with ray_session(cpus=2):
        yield


@pytest.fixture(autouse=True)
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


def test_the_calls_are_those_of_claims(name: str) -> None:
    claims = RayLeases(name)
    assert claims.claim("stage", "first", LONG_S)
    assert claims.claim("stage", "first", LONG_S)
    assert not claims.claim("stage", "second", LONG_S)
    claims.release("stage", "second")
    assert not claims.claim("stage", "second", LONG_S)
    claims.renew("first", 0.0)  # until now
    claims.renew("first", LONG_S)  # nobody has taken it meanwhile
    assert not claims.claim("stage", "second", LONG_S)
    claims.renew("first", 0.0)
    assert claims.claim("stage", "second", LONG_S)
    claims.release("stage", "second")
    assert claims.claim("stage", "first", LONG_S)


def test_starting_it_twice_is_one_coordinator(name: str) -> None:
    RayLeases(name).claim("stage", "first", LONG_S)
    again = start_coordinator(name)
    assert not ray.get(again.claim.remote("stage", "second", LONG_S))
    assert ray.get(again.claim.remote("stage", "first", LONG_S))
    assert pid_of(again) == pid_of(find_coordinator(name))
    assert find_coordinator(name + "-another") is None


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
