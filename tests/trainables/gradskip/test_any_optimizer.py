"""Adam, AdamW and `wrap` for any optimizer, against torch's own and against closed forms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import OFF, DecayInside, equal, train, weights
from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip import SGD, Adam, AdamW, Settings, wrap
from trainables.gradskip.step import is_linear_in_lr

MANUAL = Settings(stop_layer_num=(3, 6), stop_layer_itr=(3, 8))
BRAKING = Settings(stop_layer_num=(3, 6), stop_layer_itr=(3, 8), braking_distance=4)

#: Ours beside torch's own.
PAIRS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "SGD, nesterov": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD, maximize": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adam": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-3, "amsgrad": True}),
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}),
}
PATHS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


#: Wrapped optimizers: how each is built on a model.
WRAPPED: dict[str, Callable[[nn.Module], Optimizer]] = {
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, weight_decay=1e-3),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, lr_decay=1e-2),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, lambd=1e-2, t0=2),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3),
    "not in torch": lambda m: DecayInside(m.parameters(), lr=0.05),
}


@pytest.mark.parametrize("settings", [OFF, Settings(start_itr=0, samples=1, start_thr=1e-6)], ids=["off", "looking"])
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_torch_bit_for_bit_while_nothing_stops(name: str, path: dict[str, Any], settings: Settings) -> None:
    ours_of, theirs_of, options = PAIRS[name]
    ours, theirs = conv_model(), conv_model()
    optimizer = ours_of(ours.parameters(), **options, **path, settings=settings)
    train(ours, optimizer, 8)
    train(theirs, theirs_of(theirs.parameters(), **options, **path), 8)
    assert optimizer.gradskip.iteration == 8  # type: ignore[attr-defined]
    assert equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_optimizer_equals_itself_while_nothing_stops(name: str) -> None:
    ours, theirs = conv_model(), conv_model()
    plain = WRAPPED[name](ours)
    optimizer = wrap(plain, Settings(stop_layer_num=(1,), stop_layer_itr=(99,)))
    assert optimizer is plain
    train(ours, optimizer, 6)
    train(theirs, WRAPPED[name](theirs), 6)
    assert equal(weights(ours), weights(theirs))


def every_optimizer(name: str, model: nn.Module, settings: Settings, path: dict[str, Any]) -> Optimizer:
    if name in PAIRS:
        ours_of, _, options = PAIRS[name]
        return ours_of(model.parameters(), **options, **path, settings=settings)
    return wrap(WRAPPED[name](model), settings)


@pytest.mark.parametrize("settings", [MANUAL, BRAKING], ids=["at once", "braking"])
@pytest.mark.parametrize("name", [*PAIRS, *WRAPPED])
def test_stopped_layers_hold_still_and_the_others_move(name: str, settings: Settings) -> None:
    model = conv_model()
    optimizer = every_optimizer(name, model, settings, {})
    history = [weights(model)]
    train(model, optimizer, 16, each=lambda _: history.append(weights(model)))
    for step in range(16):
        moved = [not torch.equal(a, b) for a, b in zip(history[step], history[step + 1], strict=True)]
        # The step of the decision (3, 8) still moves what stops, braking for 4 steps, the last of them by nothing.
        last = {3: 3, 6: 8} if settings is MANUAL else {3: 5, 6: 10}
        assert (moved[0], any(moved[:4])) == (step <= last[3],) * 2, step
        assert (moved[4], any(moved[4:7])) == (step <= last[6],) * 2, step
        assert any(moved[7:])
    assert [p.requires_grad for p in model.parameters()] == [False] * 7 + [True] * 4
    assert all(p not in optimizer.state for p in list(model.parameters())[:7])


class Averaging(torch.optim.SGD):
    """SGD whose `eval` swaps the weights for their means over the steps, and `train` back, as schedule-free ones do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["mean"] = self.state[p].get("mean", p.detach().clone()).lerp(p.detach(), 0.25)

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                moving = p.clone()
                p.copy_(self.state[p]["mean"])
                self.state[p]["mean"] = moving

    train = eval


def test_a_stopped_layer_is_evaluated_by_the_averages_that_its_optimizer_keeps() -> None:
    ours, theirs = conv_model(), conv_model()
    optimizer, plain = (Averaging(m.parameters(), lr=0.05) for m in (ours, theirs))

    def freeze(step: int) -> None:
        for number, p in enumerate(theirs.parameters()):
            if number < 4 * (step >= 3) or number < 7 * (step >= 8):
                p.requires_grad_(False).grad = None

    train(ours, wrap(optimizer, MANUAL), 12)
    train(theirs, plain, 12, each=freeze)
    for mode in (Averaging.eval, Averaging.train):
        mode(optimizer)
        mode(plain)
        assert equal(weights(ours), weights(theirs))


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name in PAIRS for path in PATHS] + [(name, {}) for name in WRAPPED], ids=str
)
def test_a_braking_update_is_the_factor_times_the_plain_one(name: str, path: dict[str, Any]) -> None:
    """Fixed gradients, so that what the plain optimizer would do at each step is known from a run of its own.

    From the same state the braking step must do the same to the optimizer's state, and move by the factor of it.
    """
    settings = Settings(stop_layer_num=(0,), stop_layer_itr=(2,), braking_distance=5)
    model = nn.ParameterList([nn.Parameter(torch.linspace(-1, 1, 6)), nn.Parameter(torch.ones(3))])
    optimizer = every_optimizer(name, model, settings, path)
    generator = torch.Generator().manual_seed(3)
    for step in range(7):
        gradients = [torch.randn(p.shape, generator=generator) for p in model]
        plain_model = copy.deepcopy(model)
        plain = (
            PAIRS[name][1](plain_model.parameters(), **PAIRS[name][2], **path)
            if name in PAIRS
            else WRAPPED[name](plain_model)
        )
        state = optimizer.state_dict()
        state.pop("gradskip")
        plain.load_state_dict(copy.deepcopy(state))
        before = [p.detach().clone() for p in model]
        for parameters in (model, plain_model):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone() if p.requires_grad else None
        optimizer.step()
        plain.step()
        factor = {2: 16 / 25, 3: 9 / 25, 4: 4 / 25, 5: 1 / 25, 6: 0.0}.get(step, 1.0)
        expected = before[0] + factor * (plain_model[0].detach() - before[0])
        torch.testing.assert_close(model[0].detach(), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(model[1], plain_model[1])
        if step < 6:  # after the last step its state is gone, for the layer has stopped
            for key, value in plain.state[plain_model[0]].items():
                assert torch.equal(torch.as_tensor(optimizer.state[model[0]][key]), torch.as_tensor(value)), key
        assert [g["params"] for g in optimizer.param_groups] == [list(model)]
    assert not model[0].requires_grad


def test_linear_ones_are_told_from_the_rest() -> None:
    weight = [nn.Parameter(torch.zeros(2, 2))]
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Muon"):
        assert is_linear_in_lr(getattr(torch.optim, name)(weight, lr=0.1)), name
    assert is_linear_in_lr(AdamW(weight, settings=OFF))
    for name in ("ASGD", "Rprop"):
        assert not is_linear_in_lr(getattr(torch.optim, name)(weight, lr=0.1)), name
    assert not is_linear_in_lr(DecayInside(weight))

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert not is_linear_in_lr(Own(weight))


def test_counters_in_groups_survive_braking() -> None:
    model = conv_model()
    optimizer = wrap(DecayInside(model.parameters()), BRAKING)
    train(model, optimizer, 14)
    assert optimizer.param_groups[0]["k"] == 14
    assert len(optimizer.param_groups) == 1


class TestBadInput:
    def test_lbfgs_is_refused(self) -> None:
        with pytest.raises(UserError, match="leaves parameters without gradient alone, got LBFGS"):
            wrap(torch.optim.LBFGS(conv_model().parameters()))

    def test_wrapping_twice_is_refused(self) -> None:
        optimizer = wrap(torch.optim.Adam(conv_model().parameters()), OFF)
        with pytest.raises(UserError, match="has Gradient-Skip already: wrap it once"):
            wrap(optimizer, OFF)
        with pytest.raises(UserError, match="wrap it once"):
            wrap(SGD(conv_model().parameters(), lr=0.1, settings=OFF))

    @pytest.mark.parametrize("make", [lambda p, s: SGD(p, settings=s), lambda p, s: wrap(torch.optim.Adam(p), s)])
    def test_groups_are_added_before_the_first_step_only(self, make: Any) -> None:
        a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        optimizer: Any = make([a], Settings(stop_layer_num=(0,), stop_layer_itr=(0,)))
        optimizer.add_param_group({"params": [b]})
        assert len(optimizer.gradskip.parameters) == 2
        for p in (a, b):
            p.grad = torch.ones(2)
        optimizer.step()
        assert (a.requires_grad, b.requires_grad) == (False, True)
        with pytest.raises(RuntimeError, match="must be added before the first step of a gradient-skip optimizer"):
            optimizer.add_param_group({"params": [c]})

    def test_not_an_optimizer(self) -> None:
        with pytest.raises(UserError, match=r"wrap takes a torch.optim.Optimizer, got Sequential"):
            wrap(conv_model())  # type: ignore[type-var]

    def test_a_model_of_other_parameters(self) -> None:
        with pytest.raises(UserError, match="model= must be the model whose parameters the optimizer has"):
            SGD(conv_model().parameters(), lr=0.1, settings=OFF, model=conv_model())


class TestNothingLeft:
    """All layers stopped: training goes on with nothing to do and says so once."""

    @pytest.mark.parametrize("braking", [0, 2])
    @pytest.mark.parametrize("name", ["SGD", "AdamW", "not in torch", "without autograd"])
    def test_goes_on_and_says_so_once(self, name: str, braking: int) -> None:
        model = conv_model()
        settings = Settings(stop_layer_num=(10,), stop_layer_itr=(2,), braking_distance=braking)
        if name == "without autograd":
            settings = replace(settings, prefix_autograd=False)
            optimizer: Optimizer = SGD(model.parameters(), lr=0.05, settings=settings, model=model)
        else:
            optimizer = every_optimizer(name, model, settings, {})
        history: list[Any] = []
        with pytest.warns(UserWarning, match="every parameter of this optimizer is stopped") as told:
            train(model, optimizer, 8, each=lambda _: history.append(weights(model)))
        assert sum("nothing to do" in str(w.message) for w in told) == 1
        assert equal(history[4], history[7])
        assert sum(p.requires_grad for p in model.parameters()) == 1  # so that backward() has something to do

    def test_the_auto_rule_never_takes_the_last_unit(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), nn.Conv2d(2, 5, 6, bias=False), nn.Flatten())
        settings = Settings(start_itr=0, samples=1, start_thr=1.0, slope_thr=1.0, mt_thr=1.0)
        optimizer = SGD(model.parameters(), lr=0.01, weight_decay=5.0, settings=settings)
        train(model, optimizer, 10)
        assert [event.layer for event in optimizer.gradskip.events] == [0]
