"""Attach Gradient-Skip: refusals, traces left behind, and objects kept alive."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import equal, train, weights
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings, wrap
from trainables.gradskip.layers import make_plan

MANUAL = Settings(stop_layer_num=(3,), stop_layer_itr=(2,))


pytestmark = pytest.mark.usefixtures("quiet")


class Lookahead(Optimizer):
    """An optimizer around another one in the form of timm's: it shares the groups and never calls torch's constructor.

    Every k-th step moves the weights to slow + alpha (fast - slow), and slow there.
    """

    def __init__(self, base: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        self.base, self.alpha, self.k, self.steps = base, alpha, k, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.base.step(closure)
        self.steps += 1
        for group in self.base.param_groups:
            for p in group["params"]:
                if p.grad is None or self.steps % self.k:
                    continue
                slow = self.base.state[p].setdefault("slow", p.clone())
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class TestAroundAnother:
    def test_the_outer_one_is_refused_before_anything_is_attached(self) -> None:
        model = conv_model()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Lookahead(base)
        attributes, inner = dict(vars(outer)), dict(vars(base))
        with pytest.raises(UserError, match=r"Lookahead around SGD: wrap the inner one, .* or Lookahead's base$"):
            wrap(outer, MANUAL, model=model)
        assert vars(outer) == attributes
        assert vars(base) == inner
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_around_a_wrapped_one_stopped_layers_hold_still(self) -> None:
        model = conv_model()
        optimizer = Lookahead(wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), MANUAL, model=model))
        train(model, optimizer, 3)
        before = weights(model)
        train(model, optimizer, 7, start=3)
        assert equal(before[:4], weights(model)[:4])
        assert not equal(before[4:], weights(model)[4:])

    @pytest.mark.parametrize(
        "refused",
        [
            lambda m: wrap(torch.optim.LBFGS(m.parameters()), MANUAL, model=m),
            lambda m: SGD(
                m.parameters(), lr=0.1, settings=Settings(stop_layer_num=(99,), stop_layer_itr=(1,)), model=m
            ),
            lambda m: SGD(m.parameters(), lr=0.1, settings=MANUAL, model=m, example_inputs=3),
            lambda m: SGD(m.parameters(), lr=0.1, settings=Settings(watch=("Nobody",)), model=m),
        ],
        ids=["LBFGS", "a layer past the last", "example inputs", "a class that is not there"],
    )
    def test_whatever_is_refused_leaves_no_hook_on_the_model(self, refused: Any) -> None:
        model = conv_model()
        with pytest.raises(UserError):
            refused(model)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_a_warning_made_an_error_leaves_no_hook_on_the_model(self) -> None:
        model = conv_model()
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="weight decay is 0"):
            SGD(model.parameters(), lr=0.1, settings=Settings(), model=model)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_parameters_of_the_groups_may_move_or_go_but_none_may_come_after_the_first_step() -> None:
    model = conv_model()
    optimizer = SGD(model.parameters(), lr=0.1, settings=MANUAL, model=model)
    train(model, optimizer, 3)
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:-1][::-1]
    before = weights(model)
    train(model, optimizer, 2, start=3)
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [False] * 4 + [True] * 6 + [False]
    group["params"].append(torch.nn.Parameter(torch.ones(2, 3)))
    with pytest.raises(UserError, match=r"does not know a parameter of shape \(2, 3\)"):
        train(model, optimizer, 1, start=5)


class TestWhatIsKeptAlive:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "settings",
        [
            Settings(rule="plasticity", rule_interval=1, rule_window=2, rule_tolerance=0.9),
            Settings(start_itr=0, samples=2, start_thr=1.0),
            Settings(stop_layer_num=(6,), stop_layer_itr=(1,), prefix_autograd=False, norm_statistics="hold"),
        ],
        ids=lambda settings: settings.mode,
    )
    def test_an_optimizer_that_nobody_holds_is_collected(self, settings: Settings) -> None:
        model = conv_model()
        optimizer = SGD(model.parameters(), lr=0.02, weight_decay=2.0, settings=settings, model=model)
        train(model, optimizer, 4)
        gone = weakref.ref(optimizer)
        skip = weakref.ref(optimizer.gradskip)
        del optimizer
        gc.collect()
        assert gone() is None
        assert skip() is None
        model(torch.ones(2, 1, 8, 8))
        assert not any(m._forward_pre_hooks for m in model.modules() if settings.mode == "plasticity")

    def test_a_group_added_later_has_its_place_in_the_trace(self) -> None:
        model: Any = conv_model()
        parameters = list(model.parameters())
        settings = Settings(whole_units=True, stop_layer_num=(0,), stop_layer_itr=(1,))
        whole = SGD(parameters, lr=0.1, settings=settings, model=model, example_inputs=torch.ones(2, 1, 8, 8))
        optimizer = SGD(parameters[4:], lr=0.1, settings=settings, model=model, example_inputs=torch.ones(2, 1, 8, 8))
        assert optimizer.gradskip.numbering.trace != whole.gradskip.numbering.trace
        optimizer.add_param_group({"params": parameters[:4]})
        assert optimizer.gradskip.numbering.trace == whole.gradskip.numbering.trace
        assert optimizer.gradskip.plan == whole.gradskip.plan
        train(model, optimizer, 3)
        assert optimizer.gradskip.iteration == 3


class TestParametrizedWeights:
    def model(self, kind: str) -> nn.Sequential:
        torch.manual_seed(0)

        def layer(*sizes: int) -> nn.Module:
            conv = nn.Conv2d(*sizes)  # type: ignore[arg-type]
            if kind == "plain":
                return conv
            return parametrizations.weight_norm(conv) if kind == "parametrized" else weight_norm(conv)

        return nn.Sequential(layer(1, 3, 3), nn.ReLU(), layer(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))

    @pytest.mark.parametrize("kind", ["parametrized", "hooked"])
    @pytest.mark.parametrize("whole_units", [False, True])
    def test_a_weight_in_parts_is_one_layer(self, kind: str, whole_units: bool) -> None:
        model = self.model(kind)
        plan = make_plan(list(model.parameters()), ("conv",), model=model, whole_units=whole_units)
        names = [name for name, _ in model.named_parameters()]
        assert [{names[n].split(".")[0] for n in unit.watched} for unit in plan.units] == [{"0"}, {"2"}]
        assert [len(unit.watched) for unit in plan.units] == [2, 2]  # length and direction
        # Its bias is registered before it and stops with it, not with the layer before.
        assert all(names[plan.order[unit.end]].split(".")[0] == names[unit.number].split(".")[0] for unit in plan.units)

    @pytest.mark.parametrize("kind", ["plain", "parametrized", "hooked"])
    @pytest.mark.parametrize("settings", [
        {"start_itr": 0, "samples": 2, "start_thr": 1.0, "slope_thr": 1.0, "mt_thr": 1.0},
        {"rule": "plasticity", "rule_interval": 1, "rule_window": 2, "rule_tolerance": 0.9},
    ], ids=["variance", "plasticity"])  # fmt: skip
    def test_its_layers_stop_one_after_the_other_and_nothing_is_left(self, kind: str, settings: dict[str, Any]) -> None:
        model = self.model(kind)
        wanted = Settings(**settings, whole_units=True)
        optimizer = SGD(model.parameters(), lr=0.02, weight_decay=2.0, settings=wanted, model=model)
        train(model, optimizer, 24)
        skip = optimizer.gradskip
        assert skip.names is not None
        assert [event.name.split(".")[0] for event in skip.events if event.name] == ["0", "2"]
        assert {skip.names[n].split(".")[0] for n in skip.stopped} == {"0", "2"}
        assert skip.left_upstream() == []
        before = weights(model)
        train(model, optimizer, 3, start=24)
        assert all(torch.equal(before[n], weights(model)[n]) for n in skip.stopped)


def test_example_inputs_are_let_go_of_after_the_first_step() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(start_itr=100), model=model, example_inputs=inputs)
    kept = weakref.ref(inputs)
    model(inputs).sum().backward()
    del inputs
    optimizer.step()
    gc.collect()
    assert kept() is None
