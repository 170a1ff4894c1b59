"""What an optimizer counts of a user's own loop, against closed forms and torch's FlopCounterMode on single steps."""

from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from counted_loops import BATCH, batch, counted_step, end_counting, model, record_of, settings, summary_of, train
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainables import gradskip
from trainables.gradskip.script_counting import process_record
from trainables.gradskip.script_counting.process_record import ProcessRecord, process_summary
from trainables.gradskip.script_counting.stretches import Stretch, totals_of

pytestmark = pytest.mark.usefixtures("own_records")


@pytest.mark.parametrize("evaluate", [False, True])
def test_flops_are_those_of_each_step(evaluate: bool) -> None:
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 5), (3, 11)), model=net)
    record = record_of(optimizer)
    train(optimizer, net, 20, evaluate=evaluate)
    found = summary_of(record)
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
    record = record_of(optimizer)
    train(optimizer, net, 12)
    found = summary_of(record)
    assert found["gradient_bytes"] == 6 * sum(sizes) + 6 * sum(sizes[2:])
    # Parameter, gradient and momentum.
    assert found["optimizer_bytes"] == 6 * 3 * sum(sizes) + 6 * 3 * sum(sizes[2:])
    end_counting(record)


def test_norms_of_an_earlier_training_are_known() -> None:
    for trained in (True, False):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if trained:
            net(torch.rand(5, 3))
        record = record_of()
        record.add(gradskip.SGD(net.parameters(), lr=0.1, model=net).gradskip, net)
        assert summary_of(record)["has_norms"] is trained
        end_counting(record)


@pytest.mark.slow
@pytest.mark.thorough
def test_units_end_behind_their_norms_where_the_model_is_known() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    linear = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    for one, given, ends in ((net, None, [0, 4]), (net, net, [3, 7]), (linear, linear, [3]), (linear, None, [])):
        record = record_of(gradskip.SGD(one.parameters(), lr=0.01, settings=settings(), model=given))
        assert summary_of(record)["unit_ends"] == ends
    optimizers = [gradskip.SGD(one.parameters(), lr=0.01, settings=settings(), model=one) for one in (net, linear)]
    assert summary_of(record_of(*optimizers))["unit_ends"] == [3]  # the smaller one has six parameters


class Prompted(nn.Module):
    """A prompt that is registered behind the head, as PEFT does, in front of layers that train or do not."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(trains)
        self.head, self.prompts = nn.Linear(4, 2), nn.ParameterList([torch.zeros(1, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.layers(x + self.prompts[0])))


class LateNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layers[1:](self.norm(self.layers[0](x))))


@pytest.mark.parametrize("rule", [(), ((1, 3),)])
def test_no_unit_ends_where_something_trains_before_it(
    rule: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a stop saves next to nothing, so that a search must not try it; norms that are left cost less."""
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", str(tmp_path))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    for net, ends in ((plain, [1, 3]), (LateNorm(), [1, 3]), (Prompted(True), []), (Prompted(False), [])):
        weights = [weight for weight in net.parameters() if weight.requires_grad]
        optimizer = gradskip.SGD(weights, lr=0.01, settings=settings(*rule), model=net)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                net(torch.randn(3, 4)).sum().backward()
                optimizer.step()
        found = process_summary()
        assert found is not None
        assert found["unit_ends"] == ends
        assert any("prompts.0 run before every layer" in str(one.message) for one in seen) is isinstance(net, Prompted)
        assert ("front" in found["warned"]) is isinstance(net, Prompted)  # for the search to say
        end_counting(process_record._PROCESS)


@pytest.mark.parametrize("given", [True, False])
def test_a_smaller_batch_and_an_evaluation_with_gradients_cost_what_they_do(given: bool) -> None:
    net = model()
    costs = {rows: counted_step(net, rows) for rows in (1, BATCH, 40)}
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net if given else None)
    record = record_of(optimizer)
    for rows in (1, BATCH, BATCH, BATCH, BATCH, 1):
        images, labels = batch(rows)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rows == 1:
            net(batch(40)[0])  # somebody forgot no_grad: work of the step that follows
    found = summary_of(record)
    assert found["forward_flops"] == 2 * costs[1][0] + 4 * costs[BATCH][0] + costs[40][0]
    assert found["backward_flops"] == 2 * costs[1][1] + 4 * costs[BATCH][1]


class Padded(nn.Module):
    """A causal transformer on batches that are padded to their longest."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.blocks = nn.Sequential(*(self.block() for _ in range(layers)))
        self.head = nn.Linear(16, 50)

    @staticmethod
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        with sdpa_kernel(SDPBackend.MATH):  # torch's counter does not know the fused attention of CPUs
            hidden = self.blocks(hidden)
        return cast(torch.Tensor, self.head(hidden))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "lengths", "accumulated"),
    [
        ((), "all", 1),
        *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((((13, 40),), "all", 2), ((), "two", 2))),
    ],
)
def test_inputs_of_varying_length_are_counted_within_2_percent(
    stops: tuple[tuple[int, int], ...], lengths: str, accumulated: int
) -> None:
    """Against torch's counter over all steps; the first three steps are far from the mean."""
    net = Padded()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(*stops), model=net)
    record = record_of(optimizer)
    generator = torch.Generator().manual_seed(0)
    forward = backward = 0
    for step in range(100):
        optimizer.zero_grad()
        for _ in range(accumulated):
            choice = int(torch.randint(2, 60, (), generator=generator))
            length = 5 if step < 3 else choice if lengths == "all" else (10, 40)[choice % 2]
            ids = torch.randint(0, 50, (4 if step % 50 else 2, length), generator=generator)
            with FlopCounterMode(display=False) as first:
                loss = F.cross_entropy(net(ids).transpose(1, 2), ids)
            with FlopCounterMode(display=False) as second:
                loss.backward()
            forward, backward = forward + first.get_total_flops(), backward + second.get_total_flops()
        optimizer.step()
    found = summary_of(record)
    assert found["forward_flops"] == pytest.approx(forward, rel=0.02)
    assert found["backward_flops"] == pytest.approx(backward, rel=0.02)
    assert found["steps"] == 100
    assert found["measured_steps"] <= 60


def test_closures_accumulation_and_steps_that_are_not_looked_at() -> None:
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        images, labels = batch()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert summary_of(record)["dense_flops"] == 2 * sum(dense)
    train(optimizer, net, 7)
    assert not record.flops.at_work  # three looks were enough, until a later one
    assert summary_of(record)["dense_flops"] == 9 * sum(dense)
    end_counting(record)

    again = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(again)
    for _ in range(3):
        again.zero_grad()
        for _ in range(2):
            images, labels = batch()
            F.cross_entropy(net(images), labels).backward()
        again.step()
    assert summary_of(record)["dense_flops"] == 3 * 2 * sum(dense)


def test_recomputed_activations_are_work_of_the_backward_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        images, labels = batch()
        hidden = checkpoint(net[:4], images, use_reentrant=False)
        F.cross_entropy(net[4:](hidden), labels).backward()
        optimizer.step()
    found = summary_of(record)
    assert found["forward_flops"] == 3 * dense[0]
    # Recomputing stops as soon as the last tensor that is needed is there: the last convolution's output is not.
    first = 2 * BATCH * 4 * 36 * 9
    assert found["backward_flops"] - 3 * dense[1] in (3 * first, 3 * (first + 2 * BATCH * 4 * 36 * 36))


def test_optimizers_that_step_after_one_backward_pass_share_its_cost() -> None:
    net, head = model(), nn.Linear(3, 3)
    first = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    second = gradskip.SGD(head.parameters(), lr=0.01, settings=settings(), model=head)
    forward, backward = counted_step(net)
    record = record_of(first, second)
    product = 2 * BATCH * 9
    for _ in range(4):
        images, labels = batch()
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(head(net(images)), labels).backward()
        first.step()
        second.step()
    found = summary_of(record)
    assert found["forward_flops"] == 4 * (forward + product)
    assert found["backward_flops"] == 4 * (backward + 2 * product)
    assert (found["steps"], found["iteration"], found["longest_iteration"]) == (8, 8, 4)
    assert len(found["layer_names"]) == 6  # of the larger one


def flops_of(training: Callable[[], object]) -> int:
    """All FLOPs of a training, by torch."""
    with FlopCounterMode(display=False) as counter:
        training()
    return int(counter.get_total_flops())


@pytest.mark.slow
@pytest.mark.thorough
def test_folds_are_summed_and_those_that_are_gone_stay_counted() -> None:
    net = model()
    dense = counted_step(net)
    record = record_of()
    for steps in (2, 10, 10):
        net = model()
        optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 5)), model=net)
        record.add(optimizer.gradskip)
        train(optimizer, net, steps)
    del optimizer, net
    gc.collect()
    found = summary_of(record)
    assert (found["steps"], found["iteration"], found["longest_iteration"]) == (22, 22, 10)
    assert found["dense_flops"] == 22 * sum(dense)
    assert [(event["optimizer"], event["iteration"]) for event in found["events"]] == [(1, 5), (2, 5)]
    stopped = model()
    for parameter in list(stopped.parameters())[:2]:
        parameter.requires_grad_(False)
    assert found["backward_flops"] == 14 * dense[1] + 8 * counted_step(stopped)[1]
    assert found["stopped_through"] == 1


def test_what_another_optimizer_trains_between_two_of_ours_is_no_part_of_a_step() -> None:
    """While the first one's next step is still waited for, to be measured."""
    net, record = model(), record_of()
    dense = counted_step(net)
    for _ in range(2):
        optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
        ours = record.add(optimizer.gradskip)
        begin = ours.state_dict()
        train(optimizer, net, 1)
        train(torch.optim.SGD(net.parameters(), lr=0.01), net, 3)
    assert summary_of(record)["dense_flops"] == 2 * sum(dense)
    ours.load_state_dict(begin)
    train(optimizer, net, 1)
    assert summary_of(record)["dense_flops"] == 2 * sum(dense)


def test_a_generator_and_its_critic_are_counted_whole() -> None:
    """Two critic steps for one of the generator; what both executed is what torch counts of the same loop."""
    torch.manual_seed(0)
    maker, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 1)
    of_critic = gradskip.SGD(critic.parameters(), lr=0.01, settings=settings())
    of_maker = gradskip.SGD(maker.parameters(), lr=0.01, settings=settings(), model=maker)

    def rounds(count: int) -> None:
        for _ in range(count):
            for _ in range(2):
                of_critic.zero_grad()
                (critic(maker(torch.rand(6, 4)).detach()).mean() - critic(torch.rand(6, 8)).mean()).backward()
                of_critic.step()
            of_maker.zero_grad()
            critic(maker(torch.rand(6, 4))).mean().backward()
            of_maker.step()

    record = record_of(of_critic, of_maker)
    rounds(5)
    found = summary_of(record)
    assert found["dense_flops"] == found["forward_flops"] + found["backward_flops"] == flops_of(lambda: rounds(5))
    assert found["steps"] == 15


def test_a_process_that_resumes_counts_what_was_executed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where layers have stopped already: the dense cost is that of the run's beginning."""
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model()
        return net, gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 4)), model=net)

    net, optimizer = build()
    train(optimizer, net, 12)
    whole = process_summary()
    end_counting(process_record._PROCESS)
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    net, optimizer = build()
    train(optimizer, net, 7)
    state = copy.deepcopy(optimizer.state_dict())
    end_counting(process_record._PROCESS)
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    net, optimizer = build()
    optimizer.load_state_dict(state)
    train(optimizer, net, 5)
    found = process_summary()
    assert found is not None
    assert whole is not None
    for name in ("steps", "iteration", "forward_flops", "backward_flops", "dense_flops", "optimizer_bytes", "events"):
        assert found[name] == whole[name], name
    net, optimizer = build()  # in the process whose steps count already: what was measured says what its own cost
    optimizer.load_state_dict(state)
    train(optimizer, net, 5)
    again = process_summary()
    assert again is not None
    assert again["dense_flops"] * 12 == whole["dense_flops"] * (12 + 5)
    optimizer.load_state_dict(state)  # back to a checkpoint: what was executed since then was
    rolled_back = process_summary()
    assert rolled_back is not None
    assert (rolled_back["steps"], rolled_back["dense_flops"]) == (again["steps"], again["dense_flops"])


def body_with_gradients(net: nn.Sequential) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A frozen body before the only part that is watched, as with `SGD(net.fc.parameters())`."""
    net[:-1].requires_grad_(False)
    return net[-1], net


def other_than_the_first_call(net: nn.Sequential) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    whole = [net]
    return net, lambda x: cast(torch.Tensor, whole.pop()(x) if whole else net[3:](net[:3](x)))


def parts_of_it(net: nn.Sequential) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    return net, lambda x: cast(torch.Tensor, net[3:](net[:3](x)))


def compiled(net: nn.Sequential) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """After its optimizer was made."""
    made: list[Callable[[torch.Tensor], torch.Tensor]] = []
    return net, lambda x: (made or made.append(torch.compile(net, backend="aot_eager")) or made)[0](x)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "parts",
    [
        body_with_gradients,
        other_than_the_first_call,
        parts_of_it,
        pytest.param(compiled, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_before_each_step_hides_nothing_of_it(
    parts: Callable[[nn.Sequential], tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]],
) -> None:
    """Where a step does not begin with a call of what is watched, it was counted from that call on, or never."""
    net = model()
    trained, call = parts(net)
    dense = counted_step(net)
    optimizer = gradskip.SGD(trained.parameters(), lr=0.01, settings=settings())
    record = record_of(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.no_grad():
            net(batch(7)[0])
        images, labels = batch()
        F.cross_entropy(call(images), labels).backward()
        optimizer.step()
    found = summary_of(record)
    assert found["dense_flops"] == found["forward_flops"] + found["backward_flops"] == 20 * sum(dense)
    assert 3 <= found["measured_steps"] <= 12
    end_counting(record)


def test_a_state_of_2026_11_28_counts_what_it_had_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stretches had fewer fields, and sizes of three numbers."""
    monkeypatch.setenv("TUNE_CAC_TRIAL_DIR", "anywhere")
    net = model()
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 4)), model=net)
    train(optimizer, net, 7)
    state = copy.deepcopy(optimizer.state_dict())
    stopped = counted_step(net)
    end_counting(process_record._PROCESS)
    monkeypatch.setattr(process_record, "_PROCESS", ProcessRecord())
    fields = (
        "steps",
        "dense",
        "forward_flops",
        "backward_flops",
        "sizes",
        "counts",
        "gradient_bytes",
        "optimizer_bytes",
    )
    for stretch in state["gradskip"]["step_record"]["stretches"]:
        for name in stretch.keys() - fields:
            del stretch[name]
        stretch["sizes"] = [size[:3] for size in stretch["sizes"]]
        stretch["counts"] = {size[:3]: count for size, count in stretch["counts"].items()}
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings((1, 4)), model=net)
    optimizer.load_state_dict(state)
    train(optimizer, net, 5)
    found = process_summary()
    assert found is not None
    assert (found["steps"], found["dense_flops"]) == (12, 12 * sum(dense))
    assert found["backward_flops"] == 5 * dense[1] + 7 * stopped[1]


def test_the_forward_pass_of_a_reentrant_checkpoint_is_counted() -> None:
    """It runs with gradients switched off, but it is no evaluation, as another call of the same modules is."""
    from torch.utils.checkpoint import checkpoint

    net = model()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)

    def step() -> None:
        optimizer.zero_grad()
        images, labels = batch()
        hidden = checkpoint(net[:4], images.requires_grad_(), use_reentrant=True)
        F.cross_entropy(net[4:](hidden), labels).backward()
        optimizer.step()

    record = record_of(optimizer)
    for _ in range(3):
        step()
        with torch.no_grad():
            net(batch()[0])
    found = summary_of(record)
    assert found["dense_flops"] == 3 * flops_of(step)


def test_a_scripted_part_and_a_half_made_module_end_no_training() -> None:
    class HalfMade(nn.Module):
        def __init__(self) -> None:
            self.keep = 1

    half_made, net = HalfMade(), model()
    net[0] = torch.jit.script(net[0])
    dense = counted_step(net)
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net.forward(batch()[0]), batch()[1]).backward()
        optimizer.step()
    assert summary_of(record)["dense_flops"] == 3 * sum(dense)
    assert half_made.keep == 1


def test_attention_on_a_cpu_is_counted_and_what_has_no_formula_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(query, key, value)

    @torch.library.custom_op("tune_cac_test::dot_product", mutates_args=())
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    product.register_autograd(lambda ctx, gradient: (gradient, gradient))
    net = Attention()
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (net(torch.rand(2, 5, 8)).sum() + product(net.qkv.weight, torch.eye(8)).sum()).backward()
        optimizer.step()
    linear, attention = 2 * 2 * 5 * 8 * 24, 2 * (2 * 2 * 2 * 5 * 5 * 4)
    found = summary_of(record)
    assert found["uncounted"] == ["tune_cac_test.dot_product"]
    assert found["forward_flops"] == 3 * (linear + attention)
    assert found["backward_flops"] >= 3 * (linear + 2 * attention)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_layers_of_nested_tensors_cost_what_their_rows_do(layout: torch.layout) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = gradskip.SGD(net.parameters(), lr=0.01, settings=settings(), model=net)
    record = record_of(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        rows = torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(2, 4)], layout=layout)
        torch.cat(net(rows).unbind()).sum().backward()
        optimizer.step()
    found, first, second = summary_of(record), 2 * 5 * 4 * 6, 2 * 5 * 6 * 3
    assert (found["forward_flops"], found["uncounted"]) == (3 * (first + second), [])
    assert found["backward_flops"] == 3 * (first + 2 * second)


@pytest.mark.parametrize(("later", "calls"), [(25, 16), (2, 1)])
def test_more_calls_than_any_measured_step_has_are_steps_of_a_loop_that_has_grown_unless_they_are_rare(
    later: int, calls: int
) -> None:
    """Episodes that grow cost as many times as much; a few steps with an evaluation with gradients cost one."""
    short, long = (10, 100, 1000, 0), (160, 1600, 16000, 0)
    steps = Stretch(
        steps=60 + later, forward_flops=[10] * 3, backward_flops=[20] * 3, sizes=[short] * 3,
        counts={short: 60, long: later},
    )  # fmt: skip
    assert totals_of([steps])["forward_flops"] == 10 * (60 + calls * later)
