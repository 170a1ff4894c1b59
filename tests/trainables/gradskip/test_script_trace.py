"""What a script's run without a method leaves for replay: variances, layers, and costs of steps with layers stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from trainables import gradskip
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.replay import Blueprint
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting import process_record as script_trace
from trainables.gradskip.script_counting.process_record import ProcessRecord, ScriptTrace
from trainables.gradskip.script_counting.step_flops import StepFlops
from trainables.gradskip.script_counting.trace_file import (
    DEFAULT_WATCH,
    TRACE_FILE,
    TRACE_VARIABLE,
    TRIAL_FOLDER,
    ScriptFacts,
    from_bytes,
)
from trainables.runtime.operator_flops import flop_counter

OFF = gradskip.Settings(start_thr=-1)


def test_weights_that_share_a_storage_are_told_apart() -> None:
    """cuDNN lays the weights of an LSTM behind each other; here two layers' are, by hand."""
    numbers = torch.rand(5 * 4 + 3 * 5)
    first, second = (nn.Parameter(part) for part in (numbers[:20].view(5, 4), numbers[20:].view(3, 5)))
    counter = StepFlops()
    counter.attribute([first, second])
    counter.begin()
    try:
        counter.begin_step([])
        torch.rand(2, 4) @ first.t() @ second.t()
        counter.attribute_moved([first, second])
        counter.end_step()
    finally:
        counter.end()
    assert counter.shares(2) == [2 * 2 * 4 * 5, 2 * 2 * 5 * 3]


def test_a_weight_without_numbers_ends_no_training() -> None:
    weight, counter = nn.Parameter(torch.empty(3, 0)), StepFlops()
    counter.attribute([weight])
    counter.begin()
    try:
        counter.begin_step([])
        torch.rand(2, 0) @ weight.t()
        counter.end_step()
    finally:
        counter.end()
    assert counter.shares(1) == [0]


def left_and_computed(stopped: Sequence[nn.Parameter], run: Callable[[], Tensor]) -> tuple[float, int]:
    counter = StepFlops()
    for weight in stopped:
        weight.requires_grad_(False)
    counter.begin_step(stopped)
    counter.begin()
    try:
        run().sum().backward()
    except NotImplementedError:  # cuDNN's backward pass, without a GPU
        pass
    finally:
        counter.end()
    return counter.left_flops, counter.backward_flops


def test_what_checkpoints_compute_again_of_a_whole_stopped_body_is_left_out() -> None:
    """The head behind the last checkpoint trains: what it needs is in none."""
    blocks = [nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(3)]
    head, x = nn.Linear(4, 2), torch.rand(5, 4)

    def run() -> Tensor:
        out = x
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False)
        return torch.as_tensor(head(out))

    _, dense = left_and_computed([], run)
    for count in (1, 2, 3):
        assert sum(left_and_computed([p for block in blocks[:count] for p in block.parameters()], run)) == dense


@pytest.mark.parametrize(("layers", "times"), [(0, 0), (1, 0), (2, 2)])
def test_cudnn_computes_all_gradients_of_a_recurrent_network_or_none(layers: int, times: int) -> None:
    shapes = [(24, 4), (24, 6), (24,), (24,), (24, 6), (24, 6), (24,), (24,)]
    weights = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    x, state = torch.empty(5, 3, 4, device="meta"), torch.empty(2, 3, 6, device="meta")
    buffer, matrices = torch.empty(1, device="meta"), tuple(weights)

    def run() -> Tensor:
        found = torch._cudnn_rnn(x, matrices, 4, buffer, state, state, 2, 6, 0, 2, False, 0.0, True, False, [], None)
        return found[0] + torch.zeros((), device="meta", requires_grad=True)

    forward = 2 * 5 * 3 * (24 * 4 + 3 * 24 * 6)
    assert left_and_computed(weights[: 4 * layers], run)[0] == times * forward


class Residual(nn.Module):
    """Two convolutions beside a third, and a head: the first that train after a stop are two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first, self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.beside = nn.Conv2d(8, 12, 1, stride=2)
        self.last = nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.second(torch.relu(self.first(x))) + self.beside(x))
        return torch.as_tensor(self.head(torch.relu(self.last(x)).mean((2, 3))))


class Backwards(nn.Module):
    """Layers registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Conv2d(8, 5, 8), nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.c(torch.relu(self.b(torch.relu(self.a(x)))))).flatten(1)


def tied() -> nn.Module:
    """A linear network whose second and third layer have one weight."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16),
                        nn.ReLU(), nn.Linear(16, 5))  # fmt: skip
    net[5].weight = net[3].weight
    return net


def untied() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def loss_of(net: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(net(torch.ones(4, 3, 8, 8)), torch.zeros(4, dtype=torch.long))


def train(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be the process of a script that a search runs; yield the trial's folder."""
    monkeypatch.setenv(TRIAL_FOLDER, str(tmp_path))
    monkeypatch.setenv(TRACE_VARIABLE, DEFAULT_WATCH)
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    yield tmp_path
    end()
    assert not _get_current_dispatch_mode_stack()  # nothing counts any more


def end() -> None:
    """End what this process counts and records."""
    process_record._PROCESS.flops.end()
    if process_record._PROCESS.trace is not None:
        process_record._PROCESS.trace.drop()


def trace() -> ScriptTrace:
    found = process_record._PROCESS.trace
    assert found is not None
    return found


def written(folder: Path) -> tuple[ScriptFacts, np.ndarray]:
    trace().write()
    return from_bytes((folder / TRACE_FILE).read_bytes())


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return gradskip.SGD(net.parameters(), lr=0.1, weight_decay=0.1, settings=OFF, model=net)


def written_plainly(folder: Path) -> ScriptFacts:
    """Facts of a plain run in the process of another script."""
    end()
    process_record._PROCESS = ProcessRecord()
    net = Residual()
    train(sgd(net), net, 5)
    return written(folder)[0]


def test_an_evaluation_of_a_part_behind_the_last_step_is_no_cost_of_a_step(folder: Path) -> None:
    net = Residual()
    train(sgd(net), net, 2)
    assert process_record._PROCESS.flops.at_work  # for a third step
    net.last(torch.ones(400, 12, 8, 8))  # somebody forgot no_grad
    assert written(folder)[0].backward_flops == written_plainly(folder).backward_flops


@pytest.mark.parametrize("make", [Residual, Backwards, tied])
def test_the_layers_are_those_of_an_optimizer_whose_rule_is_on(folder: Path, make: Callable[[], nn.Module]) -> None:
    net = make()
    optimizer = sgd(net)
    train(optimizer, net, 6)
    facts, values = written(folder)
    on = make()
    watch = ("conv",) if make is not tied else ("linear",)
    settings = gradskip.Settings(watch=watch, start_itr=10**6)
    skipping = gradskip.SGD(on.parameters(), lr=0.1, weight_decay=0.1, settings=settings, model=on)
    train(skipping, on, 1)
    rules = {key[0]: Blueprint.from_dict(blueprint) for key, blueprint in facts.blueprints}
    assert rules[True] == skipping.gradskip.blueprint  # type: ignore[attr-defined]
    assert values.shape == (6, len(rules[True].plan.units))
    assert facts.layer_names == [name for name, _ in net.named_parameters()]
    assert facts.trains == "1" * len(facts.layer_names)


@pytest.mark.parametrize("make", [Residual, Backwards, untied])
def test_costs_are_those_of_a_counter_on_a_partly_frozen_model(folder: Path, make: Callable[[], nn.Module]) -> None:
    net = make()
    train(sgd(net), net, 5)
    facts, _ = written(folder)
    assert len(facts.backward_flops) > 2
    for mask, backward in facts.backward_flops.items():
        for parameter, digit in zip(net.parameters(), mask, strict=True):
            parameter.requires_grad_(digit == "1")
        with flop_counter() as counter:
            loss = loss_of(net)
            forward = counter.get_total_flops()
            loss.backward()
        assert facts.forward_flops == forward
        assert backward == pytest.approx(counter.get_total_flops() - forward, rel=1e-9), mask


def test_variances_are_those_at_the_beginning_of_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_trace, "_STEPS_ON_DEVICE", 4)
    net = Residual()
    optimizer = sgd(net)
    own = []
    for _ in range(10):
        own.append(
            [float(layer.weight.detach().double().var()) for layer in net.children() if isinstance(layer, nn.Conv2d)]
        )
        train(optimizer, net, 1)
    _, values = written(folder)
    assert np.sort(values, axis=1) == pytest.approx(np.sort(np.array(own), axis=1), rel=1e-5)


def test_recording_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    recorded = Residual()
    torch.manual_seed(0)
    alone = Residual()
    train(sgd(recorded), recorded, 8)
    monkeypatch.delenv(TRIAL_FOLDER)
    train(sgd(alone), alone, 8)
    for one, other in zip(recorded.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


class OfACopy(nn.Module):
    """As compiled code does it, which brings weights into another layout first: what a layer costs is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 8, bias=False), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        copied = self.conv.weight.contiguous(memory_format=torch.channels_last)
        return torch.as_tensor(self.head(nn.functional.conv2d(x, copied).flatten(1)))


def two_optimizers(net: Residual) -> None:
    first, _second = sgd(net), sgd(Residual())
    train(first, net, 5)


def a_run_that_goes_on(net: Residual) -> None:
    optimizer = sgd(net)
    train(optimizer, net, 5)
    state = optimizer.state_dict()
    end()
    process_record._PROCESS = ProcessRecord()
    again = sgd(net)
    again.load_state_dict(state)
    train(again, net, 5)


def a_group_that_comes_later(net: Residual) -> None:
    optimizer = sgd(net)
    optimizer.add_param_group({"params": list(nn.Linear(5, 5).parameters())})
    train(optimizer, net, 5)


def layers_frozen_and_thawed(net: Residual) -> None:
    optimizer = sgd(net)
    for trains, steps in ((True, 3), (False, 2), (True, 2)):
        net.stem.weight.requires_grad_(trains)
        train(optimizer, net, steps)


def a_parameter_outside_of_the_optimizer(net: Residual) -> None:
    train(gradskip.SGD(net.head.parameters(), lr=0.1, weight_decay=0.1, settings=OFF, model=net), net, 4)


def groups_in_an_unknown_order(net: Residual) -> None:
    rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
    groups = [{"params": list(net.head.parameters())}, {"params": rest}]
    train(gradskip.SGD(groups, lr=0.1, weight_decay=0.1, settings=OFF), net, 4)


def a_long_run(net: Residual) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_trace, "MOST_VALUES", 5)
        patch.setattr(script_trace, "_STEPS_ON_DEVICE", 2)
        train(sgd(net), net, 5)


def a_layer_of_unseen_cost(_: Residual) -> None:
    net = OfACopy()
    train(sgd(net), net, 5)


@pytest.mark.parametrize(
    "training",
    [
        sgd, two_optimizers, a_run_that_goes_on, a_group_that_comes_later, layers_frozen_and_thawed,
        a_parameter_outside_of_the_optimizer, groups_in_an_unknown_order, a_long_run, a_layer_of_unseen_cost,
    ],
)  # fmt: skip
def test_nothing_is_written_where_replay_could_not_rely_on_it(
    folder: Path, training: Callable[[Residual], object]
) -> None:
    training(Residual())
    trace().write()
    assert not (folder / TRACE_FILE).exists()


def test_one_of_several_processes_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    sgd(Residual())
    assert process_record._PROCESS.trace is None


def test_a_file_that_cannot_be_written_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Residual()
    train(sgd(net), net, 5)
    (folder / TRACE_FILE).mkdir()
    with pytest.warns(UserWarning, match="the run's variances were not kept for the search: "):
        trace().write()


def test_parameters_on_two_devices_end_the_record_not_the_training(folder: Path) -> None:
    net = Residual()
    net.elsewhere = nn.Conv2d(3, 3, 3, device="meta")
    optimizer = sgd(net)
    with pytest.warns(UserWarning, match="the run is not recorded for the search: "):
        train(optimizer, net, 3)
    assert trace().dropped


def test_shards_are_not_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone would wait for the others to gather them."""
    monkeypatch.setattr(Numbering, "is_sharded", property(lambda numbering: True))
    sgd(Residual())
    assert process_record._PROCESS.trace is None


def test_a_models_own_tensors_that_cannot_be_addressed_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("invalid python storage")

    monkeypatch.setattr(process_record, "ScriptTrace", refuse)
    net = Residual()
    with pytest.warns(UserWarning, match="the run is not recorded for the search: RuntimeError: invalid python"):
        optimizer = sgd(net)
    train(optimizer, net, 3)


def test_weights_that_move_once_the_optimizer_is_built_are_found_again(folder: Path) -> None:
    net = Residual()
    optimizer = sgd(net)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(optimizer, net, 5)
    moved, _ = written(folder)
    assert moved.backward_flops == written_plainly(folder).backward_flops


def test_copies_that_autocast_makes_are_not_kept(folder: Path) -> None:
    net = Residual()
    _optimizer = sgd(net)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(4, 3, 8, 8))
    for _ in range(16):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(net).backward()
    copies = [copy for _, copy in process_record._PROCESS.flops._copies.values()]
    assert copies
    assert not any(copy() is not None for copy in copies)
