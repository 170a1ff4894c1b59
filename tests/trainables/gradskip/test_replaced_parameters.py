"""Parameters that take the places of others in the optimizer: smaller vocabularies, splats that split, sharding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import EAGER, SHRINKING, equal, train, weights
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Adam, Settings, wrap

RULES = [
    Settings(stop_layer_num=(4,), stop_layer_itr=(5,)),
    Settings(stop_layer_num=(4,), stop_layer_itr=(5,), braking_distance=2),
    Settings(**EAGER),
    Settings(**EAGER, whole_units=True),
    Settings(rule="linear", rule_end_itr=8, rule_depth=1.0),
    Settings(rule="freezeout", rule_end_itr=8),
    Settings(rule="gradient_norm", rule_interval=2, rule_percentile=80),
    Settings(rule="plasticity", rule_interval=1, rule_window=2, rule_tolerance=0.9),
]


def replace(optimizer: torch.optim.Optimizer, module: nn.Module, name: str, new: Tensor) -> nn.Parameter:
    """Put a parameter in the place of another, as scripts do it by hand."""
    old = getattr(module, name)
    parameter = nn.Parameter(new)
    setattr(module, name, parameter)
    for group in optimizer.param_groups:
        for index, known in enumerate(group["params"]):
            if known is old:
                group["params"][index] = parameter
    if old in optimizer.state:
        optimizer.state[parameter] = optimizer.state.pop(old)
    return parameter


def run(settings: Settings, at: int | None, make: Any = SGD) -> tuple[list[Any], list[list[Tensor]], list[bool]]:
    """Train ten steps; before step ``at`` every parameter is replaced by one of the same values."""
    model: Any = conv_model()
    optimizer = make(model.parameters(), **SHRINKING, momentum=0.5, settings=settings, model=model)
    seen = []

    def each(step: int) -> None:
        seen.append(weights(model))
        if step + 1 == at:
            for module in model.modules():
                for name, old in list(module.named_parameters(recurse=False)):
                    replace(optimizer, module, name, old.detach().clone())

    train(model, optimizer, 10, each=each)
    return optimizer.gradskip.events, seen, [p.requires_grad for p in model.parameters()]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("settings", RULES, ids=lambda s: f"{s.mode}{'-brake' * (s.braking_distance > 0)}")
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_a_run_goes_on_bit_for_bit_where_all_parameters_are_replaced_by_equal_ones(settings: Settings, at: int) -> None:
    events, seen, trains = run(settings, None)
    assert events
    assert not all(trains)
    replaced_events, replaced_seen, replaced_trains = run(settings, at)
    assert replaced_events == events
    assert replaced_trains == trains
    assert all(equal(a, b) for a, b in zip(seen, replaced_seen, strict=True))


@pytest.mark.usefixtures("quiet")
def test_before_the_first_step_everything_is_numbered_anew() -> None:
    events, seen, _ = run(RULES[0], None)
    model: Any = conv_model()
    optimizer = SGD(model.parameters(), **SHRINKING, momentum=0.5, settings=RULES[0], model=model)
    for module in (model[0], model[3]):
        replace(optimizer, module, "weight", module.weight.detach().clone())
    train(model, optimizer, 10)
    assert optimizer.gradskip.events == events
    assert equal(weights(model), seen[-1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_replaces_a_stopped_parameter_has_stopped(set_to_none: bool) -> None:
    """Also in an optimizer that torch does not have, and for gradients that are there already."""
    model: Any = conv_model()
    settings = Settings(stop_layer_num=(4,), stop_layer_itr=(1,))
    optimizer = wrap(torch.optim.Rprop(model.parameters()), settings, model=model)
    train(model, optimizer, 3)
    new = replace(optimizer, model[0], "weight", torch.ones(3, 1, 3, 3))
    optimizer.state[new] = {"step": torch.tensor(3.0)}
    train(model, optimizer, 3, start=3, set_to_none=set_to_none)
    assert torch.equal(model[0].weight, torch.ones(3, 1, 3, 3))
    assert (new.requires_grad, new.grad, new in optimizer.state) == (False, None, False)


def test_held_norms_and_cut_outputs_stay_so() -> None:
    model: Any = conv_model()
    settings = Settings(stop_layer_num=(3,), stop_layer_itr=(1,), norm_statistics="hold", prefix_autograd=False)
    optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
    train(model, optimizer, 3)
    replace(optimizer, model[1], "weight", torch.full((3,), 2.0))
    train(model, optimizer, 1, start=3)
    before = model[1].running_mean.clone()
    train(model, optimizer, 2, start=4)
    assert torch.equal(model[1].running_mean, before)
    assert torch.equal(model[1].weight, torch.full((3,), 2.0))
    assert not model[:3](next(conv_batches(1))[0]).requires_grad


class TestOtherShapes:
    def test_a_vocabulary_with_fewer_rows(self) -> None:
        """The rule begins anew with it: its peak was that of other rows."""
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20))
        settings = Settings(start_itr=0, samples=1, start_thr=0.999, slope_thr=0.999, watch=("Embedding", "Linear"))
        optimizer = Adam(model.parameters(), lr=0.01, settings=settings, model=model)
        tokens = torch.arange(6)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()

        step()
        old = model[0].weight.detach()
        model[0].weight.data[:10] *= 3  # its variance falls by the reduction alone
        step()
        peak = optimizer.gradskip.machine.rule.state_dict()["peak"]
        new = replace(optimizer, model[0], "weight", torch.full((10, 4), 0.5) + old[10:] / 100)
        optimizer.state[new] = {k: v[10:] if v.dim() else v for k, v in optimizer.state[new].items()}
        with pytest.warns(UserWarning, match=r"another shape than before: 0.weight.* the rule begins anew"):
            step()
        assert optimizer.gradskip.events == []
        assert 0 < optimizer.gradskip.machine.rule.state_dict()["peak"] < peak / 10

    def test_splats_that_split_without_a_model(self) -> None:
        """Groups of one parameter each, as in the code of 3-D Gaussian splatting; what has stopped stays stopped."""
        parts = {name: nn.Parameter(torch.ones(5, width)) for name, width in {"xyz": 3, "color": 4}.items()}
        groups = [{"params": [p], "name": name, "lr": 0.1} for name, p in parts.items()]
        optimizer = Adam(groups, settings=Settings(stop_layer_num=(0,), stop_layer_itr=(1,)))
        for steps in range(5):
            for group in optimizer.param_groups if steps == 3 else ():
                old = group["params"][0]
                state = optimizer.state.pop(old, None)
                group["params"][0] = nn.Parameter(torch.cat([old.detach(), torch.ones_like(old[:2])]))
                if state is not None:
                    longer = {k: torch.cat([v, torch.zeros_like(v[:2])]) if v.dim() else v for k, v in state.items()}
                    optimizer.state[group["params"][0]] = longer
            optimizer.zero_grad()
            loss = sum(group["params"][0].square().sum() for group in optimizer.param_groups)
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            if steps == 2:
                held = optimizer.param_groups[0]["params"][0].detach().clone()
        xyz, color = (group["params"][0] for group in optimizer.param_groups)
        assert xyz.shape == (7, 3)
        assert color.shape == (7, 4)
        assert torch.equal(xyz, torch.cat([held, torch.ones(2, 3)]))
        assert (color[:5] < 0.65).all()

    @pytest.mark.parametrize("rule", ["gradient_norm", "plasticity"])
    @pytest.mark.usefixtures("quiet")
    def test_signals_of_the_old_shape_are_forgotten(self, rule: str) -> None:
        model: Any = conv_model()
        settings = Settings(rule=rule, rule_interval=3, rule_percentile=1)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        train(model, optimizer, 4)
        replace(optimizer, model[6], "weight", torch.randn(6, 4, 3, 3))
        replace(optimizer, model[6], "bias", torch.zeros(6))
        replace(optimizer, model[9], "weight", torch.randn(5, 24))
        train(model, optimizer, 6, start=4)
        assert optimizer.gradskip.iteration == 10


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        "what",
        ["another shape", "another place", "no place", "not in the model"],
    )
    def test_a_parameter_that_fits_no_place(self, what: str) -> None:
        model: Any = conv_model()
        optimizer = SGD(
            model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(0,), stop_layer_itr=(1,)),
            model=model if what == "not in the model" else None,
        )  # fmt: skip
        train(model, optimizer, 3)
        params = optimizer.param_groups[0]["params"]
        if what == "another shape":
            params[0] = nn.Parameter(torch.ones(3, 3))
        elif what == "another place":
            params[0], params[4] = nn.Parameter(torch.ones_like(params[4])), nn.Parameter(torch.ones_like(params[0]))
        elif what == "no place":
            params.append(nn.Parameter(torch.ones(3)))
        else:
            params[0] = nn.Parameter(torch.ones_like(params[0]))
        with pytest.raises(UserError, match="cannot tell which layer a parameter of shape") as error:
            train(model, optimizer, 1, start=3)
        assert "\n" not in str(error.value)

    def test_nothing_where_parameters_only_change_places_or_go(self) -> None:
        model: Any = conv_model()
        optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(1,), stop_layer_itr=(1,)))
        train(model, optimizer, 3)
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:-1][::-1]
        before = weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 2, start=3)
        moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
        assert moved[:3] + moved[4:] == [False, False, True] + [True] * 6 + [False]  # 3: a bias before a norm
