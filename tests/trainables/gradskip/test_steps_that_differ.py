"""Loops whose steps differ, as their optimizers count them, against torch's counter over the same loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_loops import record_of, settings, summary_of
from thorough import rest_thorough
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainables import gradskip

pytestmark = pytest.mark.usefixtures("own_records")

#: Makes the optimizer of a model: a stop of the layer with this number behind step 20, of -1 none.
Make = Callable[[nn.Module, int], torch.optim.Optimizer]
STEPS = 45


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for n in (3, 8, 8) for part in (nn.Conv2d(n, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 4))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 6, 6), torch.arange(4)


def learn(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = images()
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def whole_after_its_head(make: Make) -> None:
    net = convolutions()
    net[:6].requires_grad_(False)
    optimizer = make(net, 1)
    for step in range(STEPS):
        if step == 10:
            net.requires_grad_(True)
        learn(net, optimizer)


def head_but_in_every_tenth_step(make: Make) -> None:
    net = convolutions()
    optimizer = make(net, -1)
    for step in range(STEPS):
        net[:6].requires_grad_(step % 10 == 9)
        learn(net, optimizer)


def user_that_freezes_what_has_stopped(make: Make) -> None:
    net = convolutions()
    optimizer = make(net, 1)
    for step in range(STEPS):
        if step == 25:
            net[:6].requires_grad_(False)
        learn(net, optimizer)


def penalty_every_third_step(make: Make) -> None:
    net = convolutions()
    optimizer = make(net, 1)
    for step in range(STEPS):
        x, y = images()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if step % 3 == 0:
            loss = loss + net(x).square().mean()
        loss.backward()
        optimizer.step()


class Heads(nn.Module):
    """A body with a head, and another one, much larger."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head, self.other = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, x: Tensor, beside: bool) -> list[Tensor]:
        body = self.body(x)
        return [head(body) for head in ((self.head, self.other) if beside else (self.head,))]


def with_another_head(optimizer: torch.optim.Optimizer, net: Heads, steps: int, beside: Callable[[int], bool]) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        losses = [F.cross_entropy(scores, torch.arange(4)) for scores in net(torch.randn(4, 8), beside(step))]
        torch.stack(losses).sum().backward()
        optimizer.step()


def another_head_in_every_second_phase(make: Make) -> None:
    net = Heads()
    with_another_head(make(net, 1), net, 240, lambda step: step // 60 % 2 == 0)


def another_head_in_step_1_and_late(make: Make) -> None:
    net = Heads()
    with_another_head(make(net, 1), net, 200, lambda step: step == 1 or step >= 100)


def with_dropped_layers(make: Make, stop: int, drops: Callable[[int], float]) -> None:
    torch.manual_seed(0)
    first, layers, last = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2)
    optimizer = make(nn.ModuleList([first, layers, last]), stop)
    for step in range(200):
        optimizer.zero_grad()
        x = first(torch.randn(4, 8))
        for layer in layers:
            if torch.rand(()) >= drops(step):
                x = x + F.relu(layer(x))
        last(x).square().mean().backward()
        optimizer.step()


def layers_that_are_dropped_more_and_more(make: Make) -> None:
    with_dropped_layers(make, -1, lambda step: step / 250)


def layers_that_are_dropped_before_a_stop_has_seen_them_all(make: Make) -> None:
    with_dropped_layers(make, 3, lambda step: 0.3)


def images_that_grow_behind_a_stop(make: Make) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*convolutions()[:6], nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    optimizer = make(net, 1)
    for step in range(60):
        optimizer.zero_grad()
        side = 6 if step < 30 else 12
        F.cross_entropy(net(torch.randn(4, 3, side, side)), torch.arange(4)).backward()
        optimizer.step()


def evaluation_with_gradients_behind_a_stop(make: Make) -> None:
    evaluation_with_gradients(make, 3, 30)


def evaluation_with_gradients(make: Make, stop: int = -1, every: int = 20) -> None:
    net = convolutions()
    optimizer = make(net, stop)
    for step in range(2 * STEPS):
        learn(net, optimizer)
        if step % every == every - 1 and step < 80:
            for _ in range(5):
                net(images()[0])


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.inner(self.table(tokens))))
        return scores

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sentences(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        length = int(torch.randint(3, 12, (), generator=generator))
        yield torch.randint(0, 20, (4, length), generator=generator)


def model_that_is_not_called_itself(make: Make) -> None:
    net = Language()
    optimizer = make(net, 2)
    for tokens in sentences(0):
        optimizer.zero_grad()
        net.loss(tokens).backward()
        optimizer.step()


def folds(make: Make) -> None:
    for fold in range(3):
        net = Language()
        optimizer = make(net, 2)
        for tokens in sentences(fold):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()


def encoder_and_decoder(make: Make) -> None:
    torch.manual_seed(0)
    encoder, cell, out = nn.Linear(6, 8), nn.GRUCell(6, 8), nn.Linear(8, 6)
    optimizers = [make(encoder, 0), make(nn.ModuleList([cell, out]), 1)]
    for tokens in sentences(1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        state, loss = encoder(torch.randn(4, 6)), torch.zeros(())
        for _ in range(tokens.shape[1]):
            state = cell(torch.randn(4, 6), state)
            loss = loss + out(state).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def critic_that_is_switched_off_for_the_generator(make: Make) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)), convolutions()
    optimizer, other = make(critic, 3), make(generator, -1)
    for _ in range(STEPS):
        fake = generator(torch.randn(4, 3, 6, 6))
        critic.requires_grad_(False)
        other.zero_grad()
        critic(fake).mean().backward()
        other.step()
        critic.requires_grad_(True)
        optimizer.zero_grad()
        (critic(images()[0]) - critic(fake.detach())).square().mean().backward()
        optimizer.step()


def flops_of(loop: Callable[[Make], None], make: Make) -> int:
    with FlopCounterMode(display=False) as counter:
        loop(make)
    return counter.get_total_flops()


#: Loops, with the relative tolerance of what is counted; the other ones are run by `make all-tests`.
LOOPS: list[tuple[Callable[[Make], None], float]] = [
    (evaluation_with_gradients_behind_a_stop, 0.01),
]
THOROUGH_LOOPS: list[tuple[Callable[[Make], None], float]] = [
    (images_that_grow_behind_a_stop, 0),
    (another_head_in_every_second_phase, 0),
    (encoder_and_decoder, 0.001),
    (evaluation_with_gradients, 0),
    (whole_after_its_head, 0),
    (head_but_in_every_tenth_step, 0),
    (user_that_freezes_what_has_stopped, 0),
    (penalty_every_third_step, 0.01),
    (model_that_is_not_called_itself, 0),
    (folds, 0),
    (critic_that_is_switched_off_for_the_generator, 0.015),
    (another_head_in_step_1_and_late, 0),
    (layers_that_are_dropped_more_and_more, 0),
    (layers_that_are_dropped_before_a_stop_has_seen_them_all, 0.01),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "tolerance"), [*LOOPS, *(pytest.param(*loop, marks=pytest.mark.thorough) for loop in THOROUGH_LOOPS)]
)
def test_what_is_counted_is_what_torch_counts(loop: Callable[[Make], None], tolerance: float) -> None:
    record = record_of()

    def stopping(net: nn.Module, layer: int) -> torch.optim.Optimizer:
        stop = [(layer, 20)] if layer >= 0 else []
        return gradskip.SGD(net.parameters(), lr=0.01, model=net, settings=settings(*stop))

    def recorded(net: nn.Module, layer: int) -> torch.optim.Optimizer:
        optimizer = stopping(net, layer)
        record.add(optimizer.gradskip, net)  # type: ignore[attr-defined]
        return optimizer

    loop(recorded)
    found = summary_of(record)
    executed = flops_of(loop, stopping)
    dense = flops_of(loop, lambda net, layer: torch.optim.SGD(net.parameters(), lr=0.01))
    assert found["forward_flops"] + found["backward_flops"] == pytest.approx(executed, rel=tolerance)
    assert found["dense_flops"] == pytest.approx(dense, rel=tolerance)
    without_stops = (head_but_in_every_tenth_step, layers_that_are_dropped_more_and_more, evaluation_with_gradients)
    assert executed < dense or loop in without_stops


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("until", [True, False])
def test_a_stop_behind_a_change_of_the_loop_is_beside_what_the_stop_before_saved(until: bool) -> None:
    """The other head trains until step 100, or from it on, so without stops one of both loops was never measured."""
    stops = {40: 1, 150: 3}
    net, record = Heads(), record_of()
    optimizer = gradskip.SGD(
        net.parameters(), lr=0.01, model=net, settings=settings(*((n, at) for at, n in stops.items()))
    )
    record.add(optimizer.gradskip, net)
    with FlopCounterMode(display=False) as executed:
        with_another_head(optimizer, net, 240, lambda step: (step < 100) == until)
    found, plain = summary_of(record), Heads()
    with FlopCounterMode(display=False) as dense:
        with_another_head(torch.optim.SGD(plain.parameters(), lr=0.01), plain, 240, lambda step: (step < 100) == until)
    assert found["forward_flops"] + found["backward_flops"] == executed.get_total_flops() < dense.get_total_flops()
    assert found["dense_flops"] == dense.get_total_flops()


@pytest.mark.thorough
@pytest.mark.slow
def test_what_was_counted_before_a_change_of_the_loop_stands() -> None:
    """A second phase, of another optimizer whose model is not called itself, and an additional pass from step 60 on."""
    net, record = convolutions(), record_of()
    first, second = (gradskip.SGD(net.parameters(), lr=0.01, model=one, settings=settings()) for one in (net, None))

    def phases() -> None:
        for rows in (2, 2, 2, 8, 5, 8, 3):
            net(torch.randn(rows, 3, 6, 6)).square().mean().backward()
            first.step()
        record.add(second.gradskip)
        for _ in range(5):
            F.linear(torch.randn(4, 8 * 36), net[-1].weight).square().mean().backward()
            second.step()
        for step in range(600):
            out = net(x := torch.randn(2, 3, 6, 6))
            (out.square().mean() + (net(x).mean() if step >= 300 else 0)).backward()
            first.step()

    record.add(first.gradskip, net)
    phases()
    found = summary_of(record)
    with FlopCounterMode(display=False) as counter:
        for rows in (2, 2, 2, 8, 5, 8, 3, *[2] * 300, *[4] * 300):  # twice 2 rows cost what 4 do
            net(torch.randn(rows, 3, 6, 6)).square().mean().backward()
        for _ in range(5):
            F.linear(torch.randn(4, 8 * 36), net[-1].weight).square().mean().backward()
    assert found["forward_flops"] + found["backward_flops"] == pytest.approx(counter.get_total_flops(), rel=0.1)


def assert_dense_is_what_torch_counts(
    make: Callable[[], nn.Module], stop: tuple[int, int], trained: Callable[[Any, torch.optim.Optimizer], None]
) -> None:
    """Of a training with a stop against torch's counter over the same one without."""
    net, plain, record = make(), make(), record_of()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, model=net, settings=settings(stop))
    record.add(optimizer.gradskip, net)
    trained(net, optimizer)
    with FlopCounterMode(display=False) as counter:
        trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    found = summary_of(record)
    assert found["dense_flops"] == counter.get_total_flops()
    assert found["forward_flops"] + found["backward_flops"] < found["dense_flops"]


def test_a_stop_behind_the_first_step_is_beside_that_step_alone() -> None:
    """The only dense step was measured before the sizes of a model that is not called itself were seen."""

    def trained(net: Language, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(12):
            optimizer.zero_grad()
            net.loss(torch.arange(20).reshape(4, 5)).backward()
            optimizer.step()

    assert_dense_is_what_torch_counts(Language, (2, 0), trained)


class Residual(nn.Module):
    """An operation in place, a sum of two branches, and a product of a tensor with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        x = x + self.middle(x)
        rows = x.flatten(2)
        return self.head(self.last(x + (rows @ rows.mT @ rows).view_as(x)).mean((2, 3)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x[:, 0, 0].abs().mul(5).long() % 20)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Detached(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.stem(x).detach().mean((2, 3)))


@pytest.mark.parametrize(
    ("net", "last"),
    rest_thorough([(convolutions, 3), (Residual, 3), (Attending, 24), (Attending, 12)], of_several=True),
)
@pytest.mark.parametrize("dtype", rest_thorough([torch.float32, torch.bfloat16]))
def test_a_run_that_is_frozen_from_its_first_step_on_knows_its_dense_steps(
    net: Callable[[], nn.Module], last: int, dtype: torch.dtype
) -> None:
    """What its backward passes leave out is seen in its forward passes; of torch's own loop."""

    def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = F.cross_entropy(net(images()[0]).float(), images()[1])
            loss.backward()
            optimizer.step()

    assert_dense_is_what_torch_counts(net, (last, -1), trained)


@pytest.mark.parametrize("last", rest_thorough([4, 8, -1]))
def test_recurrent_layers_are_counted_whole_whatever_is_frozen(last: int) -> None:
    """Parameters 1 to 8 are those of two layers of 20 steps: four products a weight, of which none is left out."""
    net, record = nn.ModuleList([nn.Embedding(30, 8), nn.LSTM(8, 6, num_layers=2), nn.Linear(6, 4)]), record_of()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, model=net, settings=settings(*[(last, -1)] * (last >= 0)))
    record.add(optimizer.gradskip, net)
    for _ in range(3):
        optimizer.zero_grad()
        outputs, _ = net[1](net[0](torch.arange(60).view(20, 3) % 30))
        net[2](outputs[-1]).square().sum().backward()
        optimizer.step()
    first, second, head = 2 * 60 * 24 * (8 + 6), 2 * 60 * 24 * (6 + 6), 2 * 3 * 6 * 4
    found, backward = summary_of(record), {-1: 2 * (first + second + head), 4: 2 * (second + head), 8: head}[last]
    assert found["uncounted"] == []
    assert found["dense_flops"] == pytest.approx(3 * 3 * (first + second + head), rel=0.03)  # without oneDNN, less
    assert found["backward_flops"] == pytest.approx(3 * backward, rel=0.03)


@pytest.mark.parametrize("covers", [False, True])
def test_what_the_user_freezes_behind_a_stop_may_be_a_prefix_that_covers_it(covers: bool) -> None:
    """Nobody sees whether a stopped layer is frozen, too; it is taken for that where the next one is."""

    def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(10):
            if step == 5:
                net[: 3 if covers else 5][0 if covers else 4 :].requires_grad_(False)  # type: ignore[index]
            learn(net, optimizer)

    assert_dense_is_what_torch_counts(convolutions, (1, -1), trained)


class Checkpointed(nn.Module):
    """Parts that are computed again, the first of which ends in a product behind which nothing is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Linear(36, 8)
        first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.parts = nn.ModuleList([first, *(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x.flatten(2))
        for part in self.parts:
            x = checkpoint(lambda value, part=part: value + part(value), x, use_reentrant=False)
        return self.head(x.mean(1))


@pytest.mark.parametrize("last", rest_thorough([5, 9, 16]))
def test_a_frozen_prefix_would_be_computed_again_where_activations_are(last: int) -> None:
    """Of which a part is, that is, one that some of trains is computed again as it is."""

    def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            learn(net, optimizer)

    assert_dense_is_what_torch_counts(Checkpointed, (last, -1), trained)


@pytest.mark.parametrize("is_behind", [False, True])
def test_weights_that_are_detached_beside_a_step_hide_nothing(is_behind: bool) -> None:
    """As a trainer does that saves a checkpoint before a step, or logs the weights' norms behind a backward pass."""

    def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            if not is_behind:
                net.state_dict()
            optimizer.zero_grad()
            F.cross_entropy(net(images()[0]), images()[1]).backward()
            if is_behind:
                assert all(weight.detach().norm() >= 0 for weight in net.parameters())
            optimizer.step()

    assert_dense_is_what_torch_counts(convolutions, (3, -1), trained)


def test_what_is_detached_in_a_frozen_prefix_is_not_guessed() -> None:
    net, record = Detached(), record_of()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, model=net, settings=settings((3, -1)))
    record.add(optimizer.gradskip, net)
    for _ in range(5):
        learn(net, optimizer)
    found = summary_of(record)
    assert found["forward_flops"] + found["backward_flops"] == found["dense_flops"]


def learn_with_cached_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Train by gradients of outputs that were computed without any, and count it; inputs have varying lengths.

    As losses do that compare many samples: these are computed again, a few at a time, in a hook of the backward pass.
    """
    total = 0
    for step in range(steps):
        pieces = [torch.randn(2, 3, 6, 6 + step * 7 % 5) for _ in range(2)]
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = [net(piece).requires_grad_() for piece in pieces]
        with FlopCounterMode(display=False) as counter:
            loss = F.cross_entropy(torch.cat(outputs) @ torch.randn(4, 4), torch.arange(4))
            gradients = torch.autograd.grad(loss, outputs)
            loss = loss.detach().requires_grad_()

            def train(_: Tensor, pieces: list[Tensor] = pieces, gradients: tuple[Tensor, ...] = gradients) -> None:
                with torch.enable_grad():
                    for piece, gradient in zip(pieces, gradients, strict=True):
                        (net(piece) * gradient).sum().backward()

            loss.register_hook(train)
            loss.backward()
        total += counter.get_total_flops()
        optimizer.step()
    return total


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("at", [-1, 4])
def test_a_model_that_trains_within_a_backward_pass_is_counted(at: int) -> None:
    net, plain, record = Residual(), Residual(), record_of()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, model=net, settings=settings((3, at)))
    record.add(optimizer.gradskip, net)
    executed = learn_with_cached_gradients(net, optimizer, 40)
    dense = learn_with_cached_gradients(plain, torch.optim.SGD(plain.parameters(), lr=0.01), 40)
    found = summary_of(record)
    assert found["forward_flops"] + found["backward_flops"] == pytest.approx(executed, rel=0.01)
    assert found["dense_flops"] == pytest.approx(dense, rel=0.01)
    assert found["measured_steps"] < 20
    assert optimizer.gradskip.numbering.trace is not None
