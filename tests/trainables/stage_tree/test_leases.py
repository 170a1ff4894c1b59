"""Leases on a clock that only the test moves, and against a second implementation."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lease_holders import HOLDERS, holder_of

from trainables.stage_tree.leases import Leases


class Clock:
    """Time in seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stage_has_one_holder_until_it_is_released() -> None:
    claims = Leases(Clock())
    assert holder_of(claims, "stage") is None
    assert claims.claim("stage", "first", 10)
    assert not claims.claim("stage", "second", 10)
    assert claims.claim("another", "second", 10)
    claims.release("stage", "second")  # not its own
    assert holder_of(claims, "stage") == "first"
    claims.release("stage", "first")
    assert holder_of(claims, "stage") is None
    assert claims.claim("stage", "second", 10)


def test_a_lease_lapses_and_is_free_for_anyone() -> None:
    clock = Clock()
    claims = Leases(clock)
    claims.claim("stage", "first", 10)
    clock.now_s += 9.5
    assert not claims.claim("stage", "second", 10)
    clock.now_s += 0.5
    assert holder_of(claims, "stage") is None
    assert claims.claim("stage", "second", 10)


def test_renewing_keeps_all_of_a_holders_stages_and_no_others() -> None:
    clock = Clock()
    claims = Leases(clock)
    for stage, holder in [("a", "first"), ("b", "first"), ("c", "second")]:
        claims.claim(stage, holder, 10)
    clock.now_s += 9
    claims.renew("first", 10)
    clock.now_s += 9
    assert [holder_of(claims, stage) for stage in "abc"] == ["first", "first", None]
    assert claims.claim("a", "first", 20)  # claiming again renews too
    clock.now_s += 5
    assert [holder_of(claims, stage) for stage in "abc"] == ["first", None, None]


def test_a_lapsed_lease_counts_again_if_nobody_took_it_and_is_lost_if_one_did() -> None:
    clock = Clock()
    claims = Leases(clock)
    claims.claim("free", "first", 10)
    claims.claim("taken", "first", 10)
    clock.now_s += 10
    assert claims.claim("taken", "second", 10)
    claims.renew("first", 10)
    assert holder_of(claims, "free") == "first"
    assert holder_of(claims, "taken") == "second"
    assert not claims.claim("taken", "first", 10)


def test_releasing_all_frees_a_holders_stages_and_no_others() -> None:
    claims = Leases(Clock())
    for stage, holder in [("a", "first"), ("b", "first"), ("c", "second")]:
        claims.claim(stage, holder, 10)
    claims.release_all("first")
    assert [holder_of(claims, stage) for stage in "abc"] == [None, None, "second"]


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
