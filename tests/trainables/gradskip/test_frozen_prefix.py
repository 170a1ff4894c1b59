"""What stops with a layer: running statistics of norms, and the record kept for the backward pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from conv_models import LateNorms, conv_batches, conv_model
from loops import equal, train, weights
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings

#: Through the first norm (0..3), at the third step.
STOP = {"stop_layer_num": (3,), "stop_layer_itr": (2,)}


def statistics(model: nn.Module) -> list[Tensor]:
    return [b.clone() for n, b in model.named_buffers() if "running" in n]


class TestNormStatistics:
    @pytest.mark.parametrize("setting", ["go_on", "hold"])
    def test_go_on_or_hold_still(self, setting: str) -> None:
        model = conv_model()
        settings = Settings(**STOP, norm_statistics=setting)  # type: ignore[arg-type]
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        history: list[list[Tensor]] = []

        def each(_: int) -> None:
            history.append(statistics(model))
            model.eval()  # what an evaluation between steps does
            model(torch.ones(2, 1, 8, 8))
            model.train()

        train(model, optimizer, 8, each=each)
        for before, after in pairwise(history[2:]):
            assert torch.equal(before[0], after[0]) == (setting == "hold")  # of the stopped norm
            assert not torch.equal(before[2], after[2])  # of the other one

    def test_a_held_norm_normalises_by_what_it_holds(self) -> None:
        """So that training and evaluation see one function; every other module trains on in training mode."""
        model: Any = conv_model()
        settings = Settings(**STOP, norm_statistics="hold")  # type: ignore[arg-type]
        train(model, SGD(model.parameters(), lr=0.1, settings=settings, model=model), 4)
        x = torch.randn(5, 1, 8, 8) * 3 + 1
        conv, norm = model[0], model[1]
        held = (conv(x) - norm.running_mean.view(1, 3, 1, 1)) / (norm.running_var.view(1, 3, 1, 1) + norm.eps).sqrt()
        expected = held * norm.weight.view(1, 3, 1, 1) + norm.bias.view(1, 3, 1, 1)
        seen: list[Tensor] = []
        norm.register_forward_hook(lambda _m, _a, output: seen.append(output))
        model.train()
        model(x)
        torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
        assert [m.training for m in (conv, norm, model[4])] == [True, False, True]

    def test_statistics_that_are_collected_anew_are_collected(self) -> None:
        """As in a model without Gradient-Skip that has the same weights; held again afterwards."""
        model: Any = conv_model()
        settings = Settings(**STOP, norm_statistics="hold")  # type: ignore[arg-type]
        train(model, SGD(model.parameters(), lr=0.1, settings=settings, model=model), 4)
        plain: Any = conv_model()
        plain.load_state_dict(model.state_dict())
        batches = [x for x, _ in conv_batches(6)]
        for each in (model, plain):
            torch.optim.swa_utils.update_bn(batches, each.eval())
        assert equal(statistics(model), statistics(plain))
        model.train()
        before = statistics(model)
        model(batches[1])
        assert [torch.equal(a, b) for a, b in zip(before, statistics(model), strict=True)][::2] == [True, False]

    def test_an_earlier_state_lets_them_go_on_again_and_a_later_one_holds(self) -> None:
        def build() -> tuple[Any, SGD]:
            model = conv_model()
            settings = Settings(**STOP, norm_statistics="hold")  # type: ignore[arg-type]
            return model, SGD(model.parameters(), lr=0.1, settings=settings, model=model)

        def moves(model: Any, norm: int) -> bool:
            before = model[norm].running_mean.clone()
            model(torch.randn(5, 1, 8, 8))
            return not torch.equal(before, model[norm].running_mean)

        model, optimizer = build()
        early = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 4)
        assert (moves(model, 1), moves(model, 4)) == (False, True)
        assert moves(copy.deepcopy(model).train(), 1)  # a copy is somebody else's
        late = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(early)
        assert (moves(model, 1), moves(model, 4)) == (True, True)
        other, other_optimizer = build()
        other_optimizer.load_state_dict(late)
        assert (moves(other, 1), moves(other, 4)) == (False, True)


class TestWhichNormsHold:
    def model(self) -> Any:
        """Norms registered first; the second has no parameters of its own."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.norm0, self.norm1 = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)
                self.conv0, self.conv1 = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3)
                self.head = nn.Linear(48, 5)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.norm1(self.conv1(self.norm0(self.conv0(x)))).flatten(1))

        return Model()

    @pytest.mark.parametrize(
        ("number", "held"),
        [
            (1, (False, False)),  # norm0 alone has stopped: the convolution before it goes on
            (3, (True, False)),  # norm0 and conv0
            (5, (True, True)),  # and conv1: norm1, which has nothing to stop, is in the prefix now
        ],
    )
    def test_those_before_which_nothing_trains(self, number: int, held: tuple[bool, bool]) -> None:
        model = self.model()
        settings = Settings(stop_layer_num=(number,), stop_layer_itr=(1,), norm_statistics="hold")
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, 3)
        before = [model.norm0.running_mean.clone(), model.norm1.running_mean.clone()]
        train(model, optimizer, 2, start=3)
        after = [model.norm0.running_mean, model.norm1.running_mean]
        assert tuple(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == held


class Backbone(nn.Module):
    """Norms of all kinds: trained, without parameters, and with parameters that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(3, 4, 3))
        self.bare, self.foreign = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(64, 5)
        for number, norm in enumerate(self.norms):
            norm.running_mean += 0.1 + number  # as after another training

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.foreign(self.bare(self.body(x))).flatten(1))

    @property
    def norms(self) -> list[Any]:
        return [m for m in self.modules() if isinstance(m, nn.BatchNorm2d)]

    @property
    def given(self) -> list[nn.Parameter]:
        return [*self.body.parameters(), *self.head.parameters()]


def train_with_evaluations(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, before: Callable[[int], None] = lambda _: None
) -> None:
    """Train as a script does that evaluates after every step; ``before(step)`` follows ``model.train()``."""
    for step, (x, y) in enumerate(conv_batches(steps)):
        model.train()
        before(step)
        torch.manual_seed(step)  # of dropout
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(x)


class TestAllNormsHold:
    """`hold_all`, against a plain torch loop that calls ``eval()`` on all norms after each ``model.train()``."""

    @pytest.mark.parametrize("rule", [{"start_thr": -1}, STOP])
    def test_from_the_first_step_on_whatever_stops(self, rule: dict[str, Any]) -> None:
        model, plain = Backbone(), Backbone()
        settings = Settings(norm_statistics="hold_all", **rule)
        before = statistics(model)
        train_with_evaluations(model, SGD(model.given, lr=0.1, momentum=0.9, model=model, settings=settings), 6)

        def hold(step: int) -> None:
            for norm in plain.norms:
                norm.eval()
            if rule is STOP and step == 3:
                plain.body[:2].requires_grad_(False)

        train_with_evaluations(plain, torch.optim.SGD(plain.given, lr=0.1, momentum=0.9), 6, before=hold)
        assert equal(statistics(model), before)
        assert equal(weights(model), weights(plain))

    def test_statistics_are_collected_by_who_asks_for_it_and_a_copy_is_somebody_elses(self) -> None:
        model, plain = Backbone(), Backbone()
        optimizer = SGD(model.given, lr=0.1, model=model, settings=Settings(start_thr=-1, norm_statistics="hold_all"))
        train_with_evaluations(model, optimizer, 2)
        plain.load_state_dict(model.state_dict())
        for each in (model, plain):
            torch.manual_seed(0)
            torch.optim.swa_utils.update_bn([x for x, _ in conv_batches(4)], each.eval())
        assert equal(statistics(model), statistics(plain))
        copied = copy.deepcopy(model).train()
        before = statistics(copied)
        copied(torch.randn(5, 1, 8, 8))
        assert not any(torch.equal(a, b) for a, b in zip(before, statistics(copied), strict=True))

    def test_a_loaded_state_holds_and_another_optimizer_lets_go(self) -> None:
        settings = Settings(**STOP, norm_statistics="hold_all")
        whole, model = Backbone(), Backbone()
        optimizers = [SGD(m.given, lr=0.1, momentum=0.9, model=m, settings=settings) for m in (whole, model)]
        train_with_evaluations(whole, optimizers[0], 4)
        model.load_state_dict(whole.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            train_with_evaluations(each, optimizer, 3)
        assert equal(weights(whole), weights(model))
        assert equal(statistics(whole), statistics(Backbone()))
        model.train()
        later = SGD(list(model.head.parameters()), lr=0.1, settings=Settings(start_thr=-1))  # takes a part of them
        assert all(norm.training for norm in model.norms)
        train_with_evaluations(model, later, 1)
        assert not any(torch.equal(a, b) for a, b in zip(statistics(whole), statistics(model), strict=True))


class SavedBytes:
    """Bytes of activations kept for the backward pass; parameters are there anyway."""

    def __init__(self, model: nn.Module) -> None:
        self.storages: dict[int, int] = {}
        self._own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    saved = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        loss = model(x).square().sum()
    total = saved.total
    if loss.requires_grad:
        loss.backward()
    return total


class TestAutogradOfThePrefix:
    def trained(self, **settings: Any) -> tuple[nn.Module, SGD]:
        """Stopped through the last convolution; the second norm is registered last, so that it is left training."""

        model = LateNorms()
        optimizer = SGD(
            model.parameters(), lr=0.1, model=model,
            settings=Settings(stop_layer_num=(3,), stop_layer_itr=(1,), **settings),
        )  # fmt: skip
        return model, optimizer

    def test_a_stopped_prefix_keeps_nothing(self) -> None:
        x = torch.randn(6, 1, 8, 8)
        dense = saved_bytes(conv_model(), x)
        model = conv_model()
        train(model, SGD(model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(8,), stop_layer_itr=(0,))), 2)
        # What is left: the linear layer's input, 6 x 16 numbers, and the square's, 6 x 5.
        assert saved_bytes(model, x) == 4 * 6 * (16 + 5) < dense / 10

    def test_whatever_is_left_stops_with_it(self) -> None:
        x = torch.randn(6, 1, 8, 8)
        model, optimizer = self.trained()
        with pytest.warns(UserWarning, match=r"norm0.weight, norm0.bias still train before stopped layers"):
            train(model, optimizer, 4)
        left = saved_bytes(model, x)
        model, optimizer = self.trained(prefix_autograd=False)
        train(model, optimizer, 4)
        assert saved_bytes(model, x) == 4 * 6 * (64 + 5) < left / 3
        assert [n for n, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
        before = weights(model)
        train(model, optimizer, 3, start=4)
        assert equal(before[:6], weights(model)[:6])
        assert not torch.equal(before[6], weights(model)[6])

    def test_an_earlier_state_opens_the_prefix_again(self) -> None:
        model, optimizer = self.trained(prefix_autograd=False)
        early = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 3)
        optimizer.load_state_dict(early)
        assert all(p.requires_grad for p in model.parameters())
        nn.functional.cross_entropy(model(next(conv_batches(1))[0]), torch.zeros(6, dtype=torch.int64)).backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_weights_that_the_optimizer_lacks_let_no_gradient_through_either(self) -> None:
        """Adapters beside frozen weights, and inputs that need a gradient, as in adversarial training."""

        class Adapted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.base(x) + self.adapter(x)

        model, x = nn.Sequential(*(Adapted() for _ in range(3))), torch.randn(6, 4, requires_grad=True)
        adapters = [weight for weight in model.parameters() if weight.requires_grad]
        settings = Settings(watch=("linear",), stop_layer_num=(1,), stop_layer_itr=(0,), prefix_autograd=False)
        optimizer = SGD(adapters, lr=0.1, model=model, settings=settings)
        for stopped in (False, True):
            optimizer.zero_grad()
            x.grad = None
            model(x).square().sum().backward()
            assert [tensor.grad is None for tensor in (x, *adapters)] == [stopped] * 3 + [False] * 4
            optimizer.step()
