"""What an optimizer counts of a user's own loop, against closed forms and torch's FlopCounterMode on single steps."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainables import gradskip
from trainables.gradskip import step_record
from trainables.gradskip.step_record import StepRecord, process_summary
from trainables.script.report_lines import read_report
from trainables.script.reporting import report

BATCH = 4


@pytest.fixture(autouse=True)
def own_records() -> Iterator[None]:
    """Records of this test alone; none is left at work."""
    yield
    for record in list(step_record._RECORDS.values()):
        record.close()
    step_record._RECORDS.clear()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip


def batch(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, 1, 6, 6), torch.randint(0, 3, (rows,))


def counted_step(net: nn.Module, rows: int = BATCH) -> tuple[int, int]:
    """Forward and backward FLOPs of a step of this model as it is now, by torch."""
    images, labels = batch(rows)
    with FlopCounterMode(display=False) as forward:
        loss = F.cross_entropy(net(images), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    net.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


def settings(*stops: tuple[int, int], **more: object) -> gradskip.Settings:
    numbers, iterations = zip(*stops, strict=True) if stops else ((), ())
    return gradskip.Settings(stop_layer_num=numbers, stop_layer_itr=iterations, **more) if stops else gradskip.Settings(
        start_thr=-1
    )  # fmt: skip


def train(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int, *, evaluate: bool = False) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        images, labels = batch()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        if evaluate:
            with torch.no_grad():
                net(batch(40)[0])


@pytest.mark.parametrize("evaluate", [False, True])
def test_flops_are_those_of_each_step(evaluate: bool) -> None:
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 5), (3, 11)), model=net)
    record = StepRecord(optimizer.gradskip)
    train(optimizer, net, 20, evaluate=evaluate)
    record.close()
    found = record.summary()
    for parameter in list(net.parameters())[:2]:
        parameter.requires_grad_(False)
    for parameter in list(net.parameters())[2:]:
        parameter.requires_grad_(True)
    one = counted_step(net)
    for parameter in list(net.parameters())[:4]:
        parameter.requires_grad_(False)
    two = counted_step(net)
    assert dense[1] > one[1] > two[1]
    # The step that decides still computes all gradients.
    assert found["backward_flops"] == 6 * dense[1] + 6 * one[1] + 8 * two[1]
    assert found["forward_flops"] == 20 * dense[0]
    assert found["dense_flops"] == 20 * sum(dense)
    assert found["steps"] == found["iteration"] == 20
    assert found["stopped_through"] == 3
    assert [event["iteration"] for event in found["events"]] == [5, 11]
    assert json.loads(json.dumps(found)) == found


def test_bytes_are_those_of_gradients_and_state() -> None:
    net = model()
    sizes = [p.numel() * 4 for p in net.parameters()]
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, momentum=0.9, settings=settings((1, 5)), model=net)
    record = StepRecord(optimizer.gradskip)
    train(optimizer, net, 12)
    found = record.summary()
    assert found["gradient_bytes"] == 6 * sum(sizes) + 6 * sum(sizes[2:])
    # Parameter, gradient and momentum.
    assert found["optimizer_bytes"] == 6 * 3 * sum(sizes) + 6 * 3 * sum(sizes[2:])
    record.close()


def test_a_smaller_last_batch_and_an_evaluation_with_gradients_are_outvoted() -> None:
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = StepRecord(optimizer.gradskip)
    for rows in (1, BATCH, BATCH, BATCH):
        images, labels = batch(rows)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rows == 1:
            net(batch(40)[0])  # somebody forgot no_grad
    assert record.summary()["forward_flops"] == 4 * dense[0]


def test_closures_accumulation_and_steps_that_are_not_looked_at() -> None:
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = StepRecord(optimizer.gradskip)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        images, labels = batch()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert record.summary()["dense_flops"] == 2 * sum(dense)
    train(optimizer, net, 5)
    assert record._since is None  # three looks were enough
    assert record.summary()["dense_flops"] == 7 * sum(dense)
    record.close()

    again = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = StepRecord(again.gradskip)
    for _ in range(3):
        again.zero_grad()
        for _ in range(2):
            images, labels = batch()
            F.cross_entropy(net(images), labels).backward()
        again.step()
    assert record.summary()["dense_flops"] == 3 * 2 * sum(dense)


def test_recomputed_activations_are_work_of_the_backward_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = StepRecord(optimizer.gradskip)
    for _ in range(3):
        optimizer.zero_grad()
        images, labels = batch()
        hidden = checkpoint(net[:4], images, use_reentrant=False)
        F.cross_entropy(net[4:](hidden), labels).backward()
        optimizer.step()
    found = record.summary()
    assert found["forward_flops"] == 3 * dense[0]
    # Recomputing stops as soon as the last tensor that is needed is there: the last convolution's output is not.
    first = 2 * BATCH * 4 * 36 * 9
    assert found["backward_flops"] - 3 * dense[1] in (3 * first, 3 * (first + 2 * BATCH * 4 * 36 * 36))


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
    assert told["gradskip"]["dense_flops"] == 3 * sum(dense)  # of the larger one
    assert told["gradskip"]["layer_names"][0] == "0.weight"
    del other


def test_counting_changes_no_training() -> None:
    def weights(counted: bool) -> list[torch.Tensor]:
        net = model()
        optimizer = gradskip.SGD(net.parameters(), lr=0.1, momentum=0.9, settings=settings((1, 4)), model=net)
        record = StepRecord(optimizer.gradskip) if counted else None
        torch.manual_seed(1)
        train(optimizer, net, 10)
        if record is not None:
            record.close()
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_two_optimizers_that_step_in_turn_are_each_counted_whole() -> None:
    """A step of one holds what the other does in between; neither takes the other's counter away."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    net, head = model(), nn.Linear(3, 3)
    first = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    second = gradskip.SGD(head.parameters(), lr=0.01, settings=settings(), model=head)
    records = [StepRecord(optimizer.gradskip) for optimizer in (first, second)]
    forward, backward = counted_step(net)
    product = 2 * BATCH * 9
    for _ in range(4):
        images, labels = batch()
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(head(net(images)), labels).backward()
        first.step()
        second.step()
    for record in records:
        found = record.summary()
        assert found["forward_flops"] == 4 * (forward + product)
        assert found["backward_flops"] == 4 * (backward + 2 * product)
    assert _get_current_dispatch_mode() is None


def test_an_optimizer_that_is_dropped_looks_no_longer() -> None:
    import gc

    from torch.utils._python_dispatch import _get_current_dispatch_mode

    net = model()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    step_record.start(optimizer.gradskip)
    assert _get_current_dispatch_mode() is not None
    del optimizer
    gc.collect()
    assert _get_current_dispatch_mode() is None


def test_attention_on_a_cpu_is_counted_and_what_has_no_formula_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(query, key, value)

    net = Attention()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = StepRecord(optimizer.gradskip)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.rand(2, 5, 8)).sum().backward()
        optimizer.step()
    linear, attention = 2 * 2 * 5 * 8 * 24, 2 * (2 * 2 * 2 * 5 * 5 * 4)
    found = record.summary()
    assert found["uncounted"] == []
    assert found["forward_flops"] == 3 * (linear + attention)
    assert found["backward_flops"] >= 3 * (linear + 2 * attention)
    lstm = nn.LSTM(4, 4)
    optimizer = gradskip.SGD(lstm.parameters(), lr=0.01, settings=settings())
    record = StepRecord(optimizer.gradskip)
    lstm(torch.rand(3, 2, 4))[0].sum().backward()
    optimizer.step()
    assert record.summary()["uncounted"]
