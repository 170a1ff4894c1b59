"""What Gradient-Skip adds to a step, and what it says before and after a run of settings that stop nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conv_models import conv_model
from hypothesis import given
from hypothesis import strategies as st
from loops import OpCounter, train
from machine_runs import stops_of
from torch import nn

from trainables.gradskip import SGD, AdamW, Settings, wrap
from trainables.gradskip.nothing_stops import too_late, why_nothing_stopped
from trainables.gradskip.rules.choice import make_rule


@pytest.mark.parametrize("make", [
    lambda p, s: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=True, settings=s),
    lambda p, s: AdamW(p, lr=0.1, fused=True, settings=s),
    lambda p, s: wrap(torch.optim.RMSprop(p, lr=0.1, foreach=True), s),
])  # fmt: skip
def test_a_decision_step_is_one_kernel_and_one_read_more_than_a_plain_one(make: Any) -> None:
    model = conv_model()
    optimizer = make(model.parameters(), Settings(start_itr=2, samples=4, start_thr=1e-6))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    counts = []
    for _ in range(8):
        with OpCounter() as counter:
            optimizer.step()
        counts.append((list(counter.ops), counter.reads))
    plain_ops, plain_reads = counts[3]
    for step in (2, 5, 7):
        assert len(counts[step][0]) == len(plain_ops), step
    decision_ops, decision_reads = counts[4]
    extra = list(decision_ops)
    for op in plain_ops:
        extra.remove(op)
    kernels = [op for op in extra if not any(view in op for view in ("detach", "unsqueeze", "_local_scalar_dense"))]
    assert kernels == ["aten.var.correction"]
    assert decision_reads - plain_reads == 1


def test_off_adds_no_operator() -> None:
    off = Settings(start_thr=-1, start_itr=0, samples=1)  # on, it would look in every step
    ours, theirs = conv_model(), conv_model()
    ops = []
    for model, optimizer in (
        (ours, SGD(ours.parameters(), lr=0.1, foreach=True, settings=off)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, foreach=True)),
    ):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        with OpCounter() as counter:
            optimizer.step()
        ops.append(counter.ops)
    assert ops[0] == ops[1]


def test_nan_weights_stop_nothing() -> None:
    model = conv_model()
    settings = Settings(start_itr=0, samples=1, start_thr=1.0)
    optimizer = SGD(model.named_parameters(), lr=0.1, weight_decay=0.1, settings=settings)
    with torch.no_grad():
        next(model.parameters())[0] = torch.nan
    train(model, optimizer, 6)
    assert optimizer.gradskip.stopped_through == -1


def test_the_first_stop_that_is_told_can_happen() -> None:
    """Against the machine itself, with signals made for stopping."""
    for settings in (
        Settings(start_itr=3, samples=4, start_thr=1.0),
        Settings(rule="linear", rule_start_itr=3, rule_end_itr=20, rule_depth=1.0),
        Settings(rule="freezeout", rule_start_itr=7, rule_end_itr=20),
        Settings(rule="gradient_norm", rule_start_itr=3, rule_interval=4, rule_percentile=100),
        Settings(rule="grades", rule_start_itr=3, rule_interval=4, rule_tau=2),
        Settings(rule="plasticity", rule_start_itr=3, rule_interval=2, rule_window=3, rule_tolerance=0.9),
    ):
        rule = make_rule(settings, [0, 4, 9], stoppable=2)
        told = rule.first_stop()
        falling = [1000.0**-n for n in range(40)]
        signal = iter(falling)
        fired = [t for t in range(told + 1) if rule.decide(t, lambda _, s=signal: next(s)) is not None]  # type: ignore[misc]
        assert fired == [told], settings.rule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(), "may stop nothing: weight decay is 0 for every watched layer"),
        (
            Settings(rule="linear", rule_end_itr=9, rule_depth=0.1),
            "will stop nothing: CAC_RULE_DEPTH=0.1 of 3 layers is less than one layer",
        ),
    ],
)
def test_settings_that_hardly_fire_say_why(settings: Settings, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        SGD(conv_model().parameters(), lr=0.1, settings=settings)


def test_a_model_with_nothing_to_watch_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="CAC_WATCH=conv finds no layer to watch"):
        SGD(model.parameters(), lr=0.1, weight_decay=0.1, settings=Settings())
    only = nn.Conv2d(1, 1, 3, bias=False)
    with pytest.warns(UserWarning, match="the only watched layer is the last thing that trains"):
        SGD(only.parameters(), lr=0.1, weight_decay=0.1, settings=Settings())


def test_settings_that_can_fire_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    SGD(conv_model().parameters(), lr=0.1, weight_decay=0.1, settings=Settings(start_itr=49, samples=1), total_steps=51)
    SGD(conv_model().parameters(), lr=0.1, settings=Settings(start_thr=-1))
    copy.deepcopy(SGD(conv_model().parameters(), lr=0.1, weight_decay=1.0, settings=Settings()))
    assert len(recwarn) == 0


@given(st.integers(0, 60), st.integers(1, 30), st.integers(0, 9), st.integers(1, 80))
def test_it_is_too_late_exactly_where_the_rule_cannot_stop(start: int, samples: int, braking: int, steps: int) -> None:
    settings = Settings(start_itr=start, samples=samples, braking_distance=braking, start_thr=0.9)
    falls = bool(stops_of(settings, (0,), lambda iteration, _: 0.5**iteration, steps))
    assert (too_late(settings, steps) == "") == falls
    if not falls:
        found = why_nothing_stopped(settings, steps)
        assert found == too_late(settings, steps)
        assert f"the run has {steps} steps: set both lower, such as CAC_VAR_START_ITR={steps // 5} and " in found


def test_stops_that_wait_too_long_are_said_to() -> None:
    settings = Settings(start_itr=0, samples=1, stop_interval=50)
    assert too_late(settings, 50) == (
        "stops wait for iteration 50 (CAC_STOP_INTERVAL=50), the run has 50 steps: set it lower"
    )
    assert too_late(settings, 51) == ""
    with pytest.warns(UserWarning, match="is at iteration 50, and the run ends after 50; make CAC_STOP_INTERVAL, CAC_"):
        SGD(conv_model().parameters(), lr=0.1, weight_decay=0.1, settings=settings, total_steps=50)


def test_what_it_names_acts() -> None:
    for steps in (10, 300, 5000):
        names = too_late(Settings(), steps).partition("such as ")[2].split(" and ")
        begin, often = (int(name.partition("=")[2]) for name in names)
        settings = Settings(start_itr=begin, samples=often)
        assert stops_of(settings, (0,), lambda iteration, _: 0.5 ** (iteration / 9), steps)


def test_other_reasons() -> None:
    assert why_nothing_stopped(Settings(start_thr=-1.0), 300) == "CAC_VAR_START_THR is -1 (off)"
    assert why_nothing_stopped(Settings(rule="plasticity"), 300) == "rule plasticity named no layer within 300 steps"
    assert too_late(Settings(rule="plasticity"), 300) == ""
    assert why_nothing_stopped(Settings(start_itr=60, samples=5), 300).startswith(
        "at no decision (from iteration 60 on, every 5) had the first layer's weight variance fallen below "
        "CAC_VAR_START_THR=0.95 of its peak: raise it"
    )
