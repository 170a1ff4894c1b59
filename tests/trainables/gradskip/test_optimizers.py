"""`gradskip.SGD` against `torch.optim.SGD`, and states loaded from and into torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import OFF, train
from torch import nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings, wrap


def test_settings_come_from_the_environment_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAC_STOP_LAYER_NUM", "1")
    monkeypatch.setenv("CAC_STOP_LAYER_ITR", "3")
    model = conv_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("CAC_STOP_LAYER_ITR", "not a number")  # too late to matter
    train(model, optimizer, 5)
    assert optimizer.gradskip.stopped_through == 1


@pytest.mark.parametrize("kind", ["generator", "list", "named", "groups"])
def test_every_way_of_giving_parameters_stops(kind: str) -> None:
    model = conv_model()
    parameters = list(model.parameters())
    given: Any = {
        "generator": model.parameters(),
        "list": parameters,
        "named": model.named_parameters(),
        "groups": [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}],
    }[kind]
    optimizer = SGD(given, lr=0.1, settings=Settings(stop_layer_num=(4,), stop_layer_itr=(2,)))
    train(model, optimizer, 4)
    assert [p.requires_grad for p in model.parameters()] == [False] * 5 + [True] * (len(parameters) - 5)
    assert optimizer.gradskip.events[0].name == ("3.weight" if kind == "named" else None)


def test_the_update_of_a_braking_step_is_the_schedule_times_the_factor() -> None:
    """Closed form: plain SGD moves by lr * factor * gradient, lr being the schedule's, not the decision's."""
    parameter = nn.Parameter(torch.zeros(3))
    other = nn.Parameter(torch.zeros(3))
    settings = Settings(stop_layer_num=(0,), stop_layer_itr=(1,), braking_distance=4)
    optimizer = SGD([parameter, other], lr=1.0, settings=settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    moved = []
    for _ in range(6):
        before = parameter.detach().clone(), other.detach().clone()
        for p in (parameter, other):
            p.grad = torch.ones(3) if p.requires_grad else None
        optimizer.step()
        schedule.step()
        moved.append((float((before[0] - parameter)[0].detach()), float((before[1] - other)[0].detach())))
    schedule_lr = [1 / (step + 1) for step in range(6)]
    factors = [1, 9 / 16, 4 / 16, 1 / 16, 0, 0]
    assert [m[0] for m in moved] == pytest.approx(
        [lr * f for lr, f in zip(schedule_lr, factors, strict=True)], abs=1e-6
    )
    assert [m[1] for m in moved] == pytest.approx(schedule_lr, abs=1e-6)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 7)


def test_half_precision_weights_are_judged_in_single_precision() -> None:
    parameter = nn.Parameter(torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    settings = Settings(start_itr=0, samples=1, start_thr=0.999, slope_thr=0.999)
    optimizer = SGD([parameter, nn.Parameter(torch.zeros(2))], lr=0.1, settings=settings)
    for scale in (1.0, 0.9):
        parameter.data.mul_(scale)
        optimizer.step()
    expected = float(parameter.detach().float().var())
    ratio = optimizer.gradskip.events[0].ratio
    assert ratio is not None
    assert ratio == pytest.approx(expected / (expected / 0.81), rel=0.01)
    assert ratio != float(torch.tensor(ratio, dtype=torch.bfloat16))


def test_a_state_of_torch_sgd_loads_and_leaves_the_rule_alone() -> None:
    model = conv_model()
    theirs = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    train(model, theirs, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, settings=OFF)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.gradskip.iteration == 0


def test_our_state_loads_into_torch_sgd() -> None:
    model = conv_model()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9, settings=OFF)
    train(model, optimizer, 2)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 0.3


def test_a_state_of_a_larger_model_is_refused() -> None:
    large, small = conv_model(), nn.Linear(2, 2)
    optimizer = SGD(large.parameters(), lr=0.1, settings=Settings(stop_layer_num=(5,), stop_layer_itr=(0,)))
    train(large, optimizer, 1)
    target = SGD(small.parameters(), lr=0.1, settings=OFF)
    with pytest.raises(UserError, match="state to load is of 11 parameters, but this optimizer has 2"):
        target.gradskip.load_state_dict(optimizer.gradskip.state_dict())


FASTER = Settings(start_thr=-1, lr_factor=4.0)


lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "step": lambda o: lr.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 5),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "warm-up": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CosineAnnealingLR(o, 4)], [2]),
    "chained": lambda o: lr.ChainedScheduler([lr.LambdaLR(o, lambda step: 0.9**step), lr.StepLR(o, 2, 0.5)]),
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_learning_rates_are_the_optimizers_times_the_factor(kind: Any, schedule: str) -> None:
    make = SCHEDULERS[schedule]

    def trained(factor: float, settings: Settings | None, *, before: bool) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        parameters = list((model := conv_model()).parameters())
        groups = [{"params": parameters[:2], "lr": 0.01 * factor}, {"params": parameters[2:]}]
        optimizer = kind(groups, lr=0.03 * factor)
        scheduler = make(optimizer) if make and before else None
        if settings is not None:
            wrap(optimizer, settings, model=model, schedulers=[scheduler] if scheduler else ())
        scheduler = scheduler or (make(optimizer) if make else None)
        rates: list[float] = []

        def after(_: int) -> None:
            rates.extend(float(group["lr"]) for group in optimizer.param_groups)
            if scheduler is not None:
                scheduler.step(*([1.0] if schedule == "plateau" else []))

        train(model, optimizer, 6, each=after)
        return parameters, rates

    for before in (False, True):
        found, wanted = trained(1.0, FASTER, before=before), trained(4.0, None, before=before)
        assert found[1] == pytest.approx(wanted[1], rel=1e-12)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found[0], wanted[0], strict=True))


def test_a_group_added_later_and_a_copy_are_scaled_once() -> None:
    first, *rest = conv_model().parameters()
    optimizer = wrap(torch.optim.SGD([first], lr=0.125), FASTER)
    optimizer.add_param_group({"params": rest})
    again = wrap(copy.deepcopy(optimizer), FASTER)
    assert [group["lr"] for made in (optimizer, again) for group in made.param_groups] == [0.5] * 4


def test_a_factor_that_would_be_lost_is_refused() -> None:
    optimizer = torch.optim.SGD(conv_model().parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(UserError, match=r"CAC_LR_FACTOR=4 must come before the learning-rate scheduler.* or give wrap"):
        wrap(optimizer, FASTER)
    with pytest.raises(UserError, match="multiplies an optimizer's rates, and CyclicLR has its own: multiply those by"):
        wrap(optimizer, FASTER, schedulers=[lr.CyclicLR(optimizer, 0.1, 0.2)])
    assert not hasattr(optimizer, "gradskip")
    assert optimizer.param_groups[0]["lr"] == 0.1
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(UserError, match="CAC_LR_FACTOR=4 multiplies learning rates, of which SGD has none: leave"):
        wrap(optimizer, FASTER)


def test_a_loop_that_writes_rates_by_itself_has_them_scaled_or_is_refused() -> None:
    def trained(optimizer: Any, model: Any, rate: Callable[[dict[str, Any]], float]) -> list[torch.Tensor]:
        def write(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate(group) / (step + 2)

        write(-1)
        train(model, optimizer, 4, each=write)
        return list(model.parameters())

    torch.manual_seed(0)
    models = [conv_model()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    with pytest.raises(
        UserError, match=r"CAC_LR_FACTOR=4 has no effect where the loop, or .*got 0.01 in place of 0.04"
    ):
        trained(SGD(models[0].parameters(), lr=0.01, settings=FASTER), models[0], lambda _: 0.01)
    with pytest.warns(
        UserWarning, match=r"CAC_LR_FACTOR=4 has no effect on .*that of the first step is 0.03, not 0.04"
    ):
        trained(SGD(models[0].parameters(), lr=0.01, settings=FASTER), models[0], lambda _: 0.03)
    optimizer = SGD(models[1].parameters(), lr=0.01, settings=FASTER)
    optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    torch.manual_seed(0)
    found = trained(optimizer, models[1], lambda group: group["initial_lr"])
    torch.manual_seed(0)
    wanted = trained(torch.optim.SGD(models[2].parameters(), lr=0.04), models[2], lambda _: 0.04)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_loaded_state_has_its_rates_already() -> None:
    optimizer, again = (SGD(conv_model().parameters(), lr=0.125, settings=FASTER) for _ in range(2))
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.5]
