"""Execution order of a model's layers, and what runs before them."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conv_models import EXECUTION, Shuffled, conv_model
from counted_loops import record_of
from loops import equal, train, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainables.gradskip import SGD, Settings
from trainables.gradskip.execution_order import ExecutionRecorder, trace_model


class Kept:
    """A tensor that a graph saves for its backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output would keep its graph by itself


class TestTrace:
    def test_execution_order_and_what_is_upstream(self) -> None:
        model = Shuffled()
        names = [name for name, _ in model.named_parameters()]
        trace = trace_model(model, list(model.parameters()), lambda m: m(torch.randn(2, 1, 8, 8)))
        ordered = sorted(range(len(names)), key=lambda n: (trace.ranks[n], n))
        assert [names[n] for n in ordered] == EXECUTION
        for number, name in enumerate(names):
            module = name.rsplit(".", 1)[0]
            before = EXECUTION[: next(i for i, n in enumerate(EXECUTION) if n.rsplit(".", 1)[0] == module)]
            assert {names[n] for n in range(len(names)) if trace.upstream[number] >> n & 1} == set(before), name

    def test_reentrant_checkpoints_of_a_chain_hide_nothing(self) -> None:
        """One of a part behind something else, one of the whole, one in another, or one behind another."""
        first, second = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.Sequential(nn.Conv2d(2, 2, 3))
        layers = nn.Sequential(first, nn.ReLU(), second)
        model = nn.Sequential(nn.Conv2d(1, 1, 3), layers, nn.Flatten(), nn.Linear(8, 2))

        def again(parts: list[nn.Module]) -> Callable[[nn.Module], Tensor]:
            def forward(twin: nn.Module) -> Tensor:
                again = [dict(zip(model.modules(), twin.modules(), strict=True))[part] for part in parts]
                for part in again:
                    part.forward = partial(checkpoint, part.forward, use_reentrant=True)
                return twin(torch.randn(2, 1, 8, 8, requires_grad=True))

            return forward

        plain, *others = (
            trace_model(model, list(model.parameters()), again(parts))
            for parts in ([], [layers], [model], [layers, second], [first, second])
        )
        assert plain.left_upstream({5}) == {0, 1, 2, 3}
        assert [other.upstream for other in others] == [plain.upstream] * 4

    def test_parallel_branches_are_not_upstream_of_each_other(self) -> None:
        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem = nn.Linear(3, 3, bias=False)
                self.left = nn.Linear(3, 3, bias=False)
                self.right = nn.Linear(3, 3, bias=False)
                self.head = nn.Linear(3, 1, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                return self.head(self.left(x) + self.right(x))

        model = Branches()
        trace = trace_model(model, list(model.parameters()), lambda m: m(torch.randn(2, 3)))
        assert trace.ranks == tuple(sorted(trace.ranks))
        assert list(trace.upstream) == [0b0000, 0b0001, 0b0001, 0b0111]
        assert trace.left_upstream({2}) == {0}

    def test_a_model_that_returns_nothing_is_seen_and_one_that_raises_is_tried_again(self) -> None:
        class Kept(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last, self.first = nn.Linear(2, 1), nn.Linear(3, 2)

            def forward(self, x: Tensor) -> None:
                self.out = self.last(self.first(x))

        seen: list[str] = []
        model = Kept()

        class Listener:
            def complete(self) -> None:
                seen.append("complete")

        listener = Listener()
        recorder = ExecutionRecorder(model, list(model.parameters()), listener.complete)
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 7))
        assert seen == []
        model(torch.zeros(1, 3))
        assert seen == ["complete"]
        trace = recorder.trace()
        recorder.remove()
        assert trace.ranks[0] > trace.ranks[2]  # the last layer was registered first

    def test_a_model_called_in_parts_is_walked_once(self) -> None:
        """A recurrent cell's graph was walked from its begin at every step: minutes for a thousand of them."""
        cell, head = nn.Linear(4, 4), nn.Linear(4, 2)
        model = nn.ModuleList([head, cell])
        recorder = ExecutionRecorder(model, list(model.parameters()))
        walked = 0
        real = recorder._masks._of_leaf

        def counted(leaf: Any) -> int:
            nonlocal walked
            walked += 1
            return real(leaf)

        recorder._masks._of_leaf = counted  # type: ignore[method-assign]
        state, steps = torch.zeros(1, 4), 200
        encoded = cell(state)
        for _ in range(steps):
            state = torch.tanh(cell(state + encoded))
        head(state)
        trace = recorder.trace()
        recorder.remove()
        assert walked < 12 * steps  # nodes: a few a step
        assert trace.upstream[0] == 0b1100  # the head's: the cell's weights

    def test_a_model_called_in_parts_and_never_stepped_holds_few_graphs(self) -> None:
        """As in an evaluation with gradients on, before the first step."""
        encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model = nn.ModuleList([encoder, nn.Linear(4, 2)])
        recorder = ExecutionRecorder(model, list(model.parameters()))
        alive: weakref.WeakSet[Kept] = weakref.WeakSet()

        def pack(tensor: Tensor) -> Kept:
            alive.add(kept := Kept(tensor))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            for _ in range(300):
                encoder(torch.zeros(1, 4))
        assert 0 < len(alive) < 300
        recorder.remove()
        assert not alive

    def test_the_first_training_step_shows_it_at_no_one_elses_cost(self) -> None:
        """Weights after training with the model given equal those without, and copies of the model carry no hook."""
        plain, watched = conv_model(), conv_model()
        settings = Settings(stop_layer_num=(6,), stop_layer_itr=(2,))
        theirs = SGD(plain.parameters(), lr=0.1, settings=settings)
        ours = SGD(watched.parameters(), lr=0.1, settings=settings, model=watched)
        copied = copy.deepcopy(watched)
        train(plain, theirs, 4)
        train(watched, ours, 4)
        assert equal(weights(plain), weights(watched))
        assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), watched.buffers(), strict=True))
        assert ours.gradskip.numbering.trace is not None
        assert not any(m._forward_pre_hooks for m in watched.modules())
        copied(torch.ones(2, 1, 8, 8))
        assert ours.gradskip.left_upstream() == []

    def test_the_first_training_pass_shows_what_a_pass_in_which_everything_trains_does(self) -> None:
        model = Shuffled()
        optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(whole_units=True), model=model)
        with torch.no_grad():
            model(torch.randn(2, 1, 8, 8))  # an evaluation shows nothing
        assert optimizer.gradskip.numbering.trace is None
        model(torch.randn(2, 1, 8, 8)).sum().backward()
        whole = trace_model(model, list(model.parameters()), lambda m: m(torch.randn(2, 1, 8, 8)))
        assert optimizer.gradskip.numbering.trace == whole
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_a_model_that_is_called_in_parts_is_seen_at_its_first_step(self) -> None:
        model = nn.ModuleDict({"head": nn.Linear(4, 2), "body": nn.Linear(3, 4)})
        optimizer = SGD(model.parameters(), lr=0.1, model=model)
        for _ in range(2):  # gradients of two batches
            model["head"](model["body"](torch.randn(2, 3)).relu()).sum().backward()
        optimizer.step()
        assert optimizer.gradskip.numbering.trace is not None
        assert optimizer.gradskip.numbering.trace.ranks == (1, 1, 0, 0)
        assert list(optimizer.gradskip.numbering.trace.upstream) == [0b1100, 0b1100, 0, 0]
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_a_model_is_saved_scripted_and_traced_as_without_hooks(self, own_records: None) -> None:
        model = conv_model()
        settings = Settings(stop_layer_num=(3,), stop_layer_itr=(0,), norm_statistics="hold", prefix_mode="eval")
        optimizer = SGD(model.parameters(), lr=0.1, model=model, settings=settings)
        record_of().add(optimizer.gradskip, model)  # as in a search
        x = torch.ones(2, 1, 8, 8)
        for _ in range(3):
            before = optimizer.gradskip.numbering.trace
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            with torch.serialization.safe_globals(list({type(module) for module in model.modules()})):
                loaded = torch.load(buffer)
            model.eval()
            expected = model(x).detach()
            for made in (loaded.eval(), copy.deepcopy(model), torch.jit.script(model), torch.jit.trace(model, x)):
                assert torch.allclose(made(x), expected, atol=1e-6)
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in loaded.modules())
            assert before is not None or optimizer.gradskip.iteration == 0
            model.train()
            train(model, optimizer, 1)
            assert any(m._forward_pre_hooks for m in model.modules())
        assert optimizer.gradskip.stopped

    def test_hooks_of_a_compiled_part_stay(self) -> None:
        model = conv_model()
        seen: list[str] = []
        model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
        model[0].register_forward_hook(lambda *_: seen.append("after"))
        model[0] = torch.compile(model[0], backend="eager")
        optimizer = SGD(model.parameters(), lr=0.1, model=model, settings=Settings())
        train(model, optimizer, 2)
        assert seen == ["before", "after"] * 2

    def test_a_users_hook_is_saved_and_removed_as_ever(self) -> None:
        model = conv_model()
        seen: list[str] = []
        early = model[0].register_forward_pre_hook(lambda *_: seen.append("early"))
        SGD(model.parameters(), lr=0.1, model=model)
        late = model[1].register_forward_pre_hook(lambda *_: seen.append("late"))
        copy.deepcopy(model)(x := torch.ones(2, 1, 8, 8))
        assert seen == ["early", "late"]
        early.remove()
        late.remove()
        model(x)
        assert seen == ["early", "late"]
