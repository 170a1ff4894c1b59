"""Stops and their reasons: every parameter said to be stopped holds still, whatever anybody does to it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_models import Reversed, conv_batches, conv_model
from loops import EAGER, DecayInside, train, weights
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings, wrap
from trainables.gradskip import stops as stops_module
from trainables.gradskip.stops import LOOKS_A_STEP, OURS, Reason

pytestmark = pytest.mark.usefixtures("quiet")


def test_a_parameter_that_is_said_to_be_stopped_never_moves() -> None:
    """The stop of conv2.weight takes the head, and without autograd all that runs before the head: everything."""
    model = Reversed()
    settings = Settings(stop_layer_num=(2,), stop_layer_itr=(0,), prefix_autograd=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3, settings=settings, model=model)
    history: list[tuple[tuple[int, ...], list[Tensor]]] = []
    train(model, optimizer, 6, each=lambda _: history.append((optimizer.gradskip.stopped, weights(model))))
    for (stopped, before), (_, after) in pairwise(history):
        assert stopped
        assert all(torch.equal(before[number], after[number]) for number in stopped)


@pytest.mark.parametrize(
    ("make", "number", "frozen", "knows_order"),
    [(conv_model, 2, {0, 1, 2}, False), (conv_model, 2, {0, 1, 2}, True), (Reversed, 2, {2, 3, 4, 5}, True)],
)
def test_a_stop_before_the_first_step_is_freezing_by_hand(
    make: Callable[[], nn.Module], number: int, frozen: set[int], knows_order: bool
) -> None:
    model, by_hand, how = make(), make(), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    settings = Settings(stop_layer_num=(number, 5), stop_layer_itr=(-1, 4), whole_units=make is Reversed)
    example = next(iter(conv_batches(1)))[0] if knows_order else None
    optimizer = SGD(model.parameters(), **how, settings=settings, model=model, example_inputs=example)
    assert set(optimizer.gradskip.stopped) == frozen
    for place, parameter in enumerate(by_hand.parameters()):
        parameter.requires_grad_(place not in frozen)
    train(model, optimizer, 3)
    train(by_hand, torch.optim.SGD(by_hand.parameters(), **how), 3)
    assert all(map(torch.equal, weights(model), weights(by_hand)))
    state = optimizer.state_dict()
    again = SGD(model.parameters(), **how, settings=settings, model=model, example_inputs=example)
    again.load_state_dict(state)
    for one in (again, optimizer):
        assert set(one.gradskip.stopped) == frozen
        assert [event.iteration for event in one.gradskip.events] == [-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "other", "torch, closure", "other, closure"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_user_toggles_what_is_said_is_what_is_done(seed: int, kind: str) -> None:
    """Random freezing, unfreezing, gradients set by hand and old graphs, over every reason there is."""
    draw = random.Random(seed)
    model = conv_model()
    parameters = list(model.parameters())
    settings = Settings(
        **{**EAGER, "samples": draw.randint(1, 3)},
        braking_distance=draw.choice([0, 0, 2]),
        whole_units=draw.random() < 0.5,
        prefix_autograd=draw.random() < 0.5,
    )
    optimizer: Any = (
        SGD(parameters, lr=0.02, momentum=0.9, weight_decay=2.0, settings=settings, model=model)
        if kind.startswith("torch")
        else wrap(DecayInside(parameters), settings, model=model)
    )
    stops = optimizer.gradskip.stops
    switched_on: set[int] = set()
    for x, y in conv_batches(30):
        for number in draw.sample(range(11), draw.randint(0, 2)):
            parameters[number].requires_grad_(draw.random() < 0.5)
            switched_on |= {number} if parameters[number].requires_grad else set()
        held = list(optimizer.gradskip.stopped)
        before = weights(model)
        set_to_none, by_hand = draw.random() < 0.5, draw.random() < 0.2

        def backward(x: Tensor = x, y: Tensor = y, set_to_none: bool = set_to_none, by_hand: bool = by_hand) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = nn.functional.cross_entropy(model(x), y)
            if loss.requires_grad:
                loss.backward()
            if by_hand:
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
            return loss

        frozen = [n for n, p in enumerate(parameters) if not p.requires_grad]
        if "closure" in kind:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        after = weights(model)
        assert all(torch.equal(before[n], after[n]) for n in held), (seed, held)
        assert optimizer.gradskip.stopped == tuple(sorted(n for n, r in stops.reasons.items() if r & OURS))
        for number, parameter in enumerate(parameters):
            reason = stops.reasons.get(number, Reason(0))
            if reason & OURS:
                kept = bool(reason & Reason.KEPT)
                # Switched on by the user, and no gradient has reached it yet: it is undone when one does.
                assert parameter.requires_grad == kept or number in switched_on
                assert parameter.grad is None or "closure" in kind
                assert parameter not in optimizer.state
            if reason & Reason.USER:
                assert number in frozen
                assert not reason & OURS
        assert len(optimizer.param_groups[0]["params"]) == 11


@pytest.mark.parametrize("kind", ["torch", "other"])
def test_one_of_many_that_is_switched_on_is_found_and_never_moves(kind: str) -> None:
    """Of an optimizer of torch's a part of them is looked at in each step."""
    count = 3 * LOOKS_A_STEP + 10
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    settings = Settings(stop_layer_num=(count - 3,), stop_layer_itr=(0,))
    optimizer: Any = (
        SGD(parameters, lr=0.1, settings=settings) if kind == "torch" else wrap(DecayInside(parameters), settings)
    )
    optimizer.step()
    woken = parameters[2 * LOOKS_A_STEP + 5]
    woken.requires_grad_(True)
    looks = []
    for _ in range(8):
        torch.stack(parameters).sum().backward()
        optimizer.step()
        looks.append(woken.requires_grad)
        assert torch.equal(woken.detach(), torch.ones(2))
    assert looks[-1] is False
    assert sum(looks) == (2 if kind == "torch" else 0)
    assert woken.grad is None
    assert float(parameters[-1].detach()[0]) < 1


def test_what_a_loop_switches_on_in_each_step_stays_on_once_it_was_let_go() -> None:
    """Then it is switched off before each training forward pass, but not when a trainer's training has ended."""
    model: Any = conv_model()
    optimizer = SGD(
        model.parameters(), lr=0.1, model=model, settings=Settings(stop_layer_num=(4,), stop_layer_itr=(0,))
    )
    train(model, optimizer, 4, each=lambda _: model.requires_grad_(True))
    assert model[0].weight.grad is None
    optimizer.gradskip.stops.let_go()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_nobody_else_writes_what_it_owns() -> None:
    """Of the package's files, by what they call; what a copy of the model is traced with is not the user's."""
    writes = re.compile(r"requires_grad_\(|\.requires_grad = |\.grad = |\.state\.pop\(|zero_grad\(")
    root = Path(stops_module.__file__).parent
    found = {path.name for path in root.rglob("*.py") if writes.search(path.read_text())}
    assert found == {"stops.py", "execution_order.py"}
    copied = (root / "execution_order.py").read_text()
    begin, end = copied.index("def trace_model("), copied.index("class ExecutionRecorder")
    assert not writes.search(copied[:begin] + copied[end:])
