"""Counting changes nothing of a user's training, modes or compiled models, and ends with its optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_loops import batch, counted_step, end_counting, model, record_of, settings, summary_of, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from trainables import gradskip
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting.process_record import process_summary
from trainables.script.report_lines import read_report, report

pytestmark = pytest.mark.usefixtures("own_records")


def test_only_a_script_that_a_search_runs_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    assert process_summary() is None
    report(accuracy=0.5)
    assert read_report(capsys.readouterr().out) == {"accuracy": 0.5}
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
    dense = counted_step(net)
    small = nn.Linear(2, 2)
    other = gradskip.SGD(small.parameters(), lr=0.01, settings=settings())
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    train(optimizer, net, 3)
    report(accuracy=torch.tensor(0.75), loss=1.5, step=3)
    told = read_report(capsys.readouterr().out)
    assert told is not None
    assert (told["accuracy"], told["step"], told["loss"]) == (0.75, 3, 1.5)
    assert told["gradskip"]["dense_flops"] == 3 * sum(dense)
    assert told["gradskip"]["layer_names"][0] == "0.weight"
    del other


def test_counting_changes_no_training() -> None:
    def weights(counted: bool) -> list[torch.Tensor]:
        net = model()
        optimizer = gradskip.SGD(net.parameters(), lr=0.1, momentum=0.9, settings=settings((1, 4)), model=net)
        record = record_of(optimizer) if counted else None
        torch.manual_seed(1)
        train(optimizer, net, 10)
        if record is not None:
            end_counting(record)
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


class Seen(TorchDispatchMode):
    """A mode of the user's, which counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recorded", [False, True])
def test_modes_of_the_user_are_left_where_the_user_leaves_them(recorded: bool) -> None:
    """Entered before an optimizer is made or between two steps, left in the middle of a step that is looked at."""
    net = model()
    dense = counted_step(net)
    record = record_of()
    one, two, three = Seen(), Seen(), Seen()
    with one:
        optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 4)), model=net)
        if recorded:
            record.add(optimizer.gradskip)
    assert one not in _get_current_dispatch_mode_stack()
    seen_once = one.operations
    train(optimizer, net, 1)
    with two, three:
        train(optimizer, net, 1)
    assert not {two, three} & set(_get_current_dispatch_mode_stack())
    seen = two.operations
    assert seen == three.operations
    two.__enter__()
    train(optimizer, net, 3)
    two.__exit__(None, None, None)
    train(optimizer, net, 12)
    assert one.operations == seen_once
    assert two.operations < 5 * seen
    if recorded:
        assert summary_of(record)["dense_flops"] == 17 * sum(dense)
    assert _get_current_dispatch_mode_stack() == []


def test_an_optimizer_that_steps_no_more_is_not_waited_for() -> None:
    idle_net, net = model(), model()
    idle = gradskip.SGD(idle_net.parameters(), lr=0.01, settings=settings(), model=idle_net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    dense = counted_step(net)
    record = record_of(idle, optimizer)
    train(optimizer, net, 3)
    assert record.flops.at_work
    train(optimizer, net, process_record._PATIENCE)
    assert not record.flops.at_work
    train(idle, idle_net, 3)
    assert summary_of(record)["dense_flops"] == (6 + process_record._PATIENCE) * sum(dense)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_evaluation_is_neither_looked_at_nor_counted(gradients: bool) -> None:
    """While a step to be measured is waited for; where somebody forgot no_grad, it is looked at for some batches."""
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    train(optimizer, net, 2)
    assert record.flops.at_work
    with torch.set_grad_enabled(gradients):
        for _ in range(100 if gradients else 1):
            net(batch(7)[0])
    assert _get_current_dispatch_mode_stack() == []
    train(optimizer, net, 3)
    found = summary_of(record)
    assert found["dense_flops"] == found["forward_flops"] + found["backward_flops"] == 5 * sum(dense)
    assert found["measured_steps"] == 4


def test_torch_goes_on_after_an_evaluation_in_inference_mode() -> None:
    """Leaving that mode restores torch's note of active modes, whose operations fail if none is there any more."""
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    train(optimizer, net, 2)
    assert record.flops.at_work
    with torch.inference_mode():
        net(batch(7)[0])
        optimizer.load_state_dict(optimizer.state_dict())
    with torch.profiler.record_function("as data loaders do"):
        torch.rand(2)
    with torch.no_grad():
        net(batch(7)[0])
    assert _get_current_dispatch_mode_stack() == []
    train(optimizer, net, 3)
    found = summary_of(record)
    assert found["dense_flops"] == found["forward_flops"] + found["backward_flops"] == 5 * sum(dense)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_stays_compiled_and_is_counted(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    net = model()
    dense = counted_step(net)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(net, backend=counter)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=compiled)
    record = record_of(optimizer)
    train(optimizer, compiled, 6, evaluate=True)
    assert counter.frame_count > 0
    frames = counter.frame_count
    found = summary_of(record)
    assert found["forward_flops"] == 6 * dense[0]
    assert found["dense_flops"] == 6 * sum(dense)
    train(optimizer, compiled, 2, evaluate=True)
    assert counter.frame_count == frames
