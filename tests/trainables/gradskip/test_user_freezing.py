"""Freezing and unfreezing by the user around the stops of a rule: gradual unfreezing, frozen towers, frozen heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import EAGER, OFF, SHRINKING, equal, train, weights
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings, wrap
from trainables.gradskip.stops import Reason

pytestmark = pytest.mark.usefixtures("quiet")


class TestUnfreezing:
    @pytest.mark.parametrize("prefix_autograd", [True, False])
    def test_what_the_user_has_frozen_trains_again_when_the_user_says_so(self, prefix_autograd: bool) -> None:
        """Gradual unfreezing around a stop: layer 0 is frozen, a later one stops, layer 0 is unfrozen."""
        model: Any = conv_model()
        model[0].requires_grad_(False)
        settings = Settings(stop_layer_num=(4,), stop_layer_itr=(1,), prefix_autograd=prefix_autograd)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, settings=settings, model=model)
        train(model, optimizer, 3)
        assert optimizer.gradskip.stopped == (2, 3, 4)
        assert optimizer.gradskip.stops.of(Reason.USER) == (0, 1)
        model[0].requires_grad_(True)
        before = weights(model)
        if prefix_autograd:
            train(model, optimizer, 3, start=3)
        else:
            with pytest.warns(UserWarning, match="requires_grad of 0.weight, which has stopped, was switched on again"):
                train(model, optimizer, 3, start=3)
        moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
        # Without autograd in the prefix no gradient can reach it: it is stopped with the rest, and that is said.
        assert moved[:1] + moved[2:] == [prefix_autograd] + [False] * 3 + [True] * 6  # 1: a bias before a norm
        assert model[0].weight.requires_grad == prefix_autograd

    @pytest.mark.parametrize("make", [lambda p: SGD(p, settings=OFF), lambda p: wrap(torch.optim.SGD(p), OFF)])
    def test_a_group_that_trains_later_as_the_refusal_of_a_late_one_says(self, make: Any) -> None:
        """Bit for bit as torch's own optimizer with the group added then."""

        def later_group(model: Any) -> dict[str, Any]:
            return {"params": list(model[:3].parameters()), "lr": 0.02}

        plain: Any = conv_model()
        theirs = torch.optim.SGD([{"params": list(plain[3:].parameters()), "lr": 0.1, "momentum": 0.9}])
        model: Any = conv_model()
        model[:3].requires_grad_(False)
        plain[:3].requires_grad_(False)
        early = {"params": list(model[3:].parameters()), "lr": 0.1, "momentum": 0.9}
        optimizer = make([early, later_group(model)])
        train(plain, theirs, 3)
        train(model, optimizer, 3)
        with pytest.raises(RuntimeError, match=r"give all parameters at the start, .* with requires_grad off, and"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        model[:3].requires_grad_(True)
        plain[:3].requires_grad_(True)
        theirs.add_param_group(later_group(plain))
        train(plain, theirs, 3, start=3)
        train(model, optimizer, 3, start=3)
        assert equal(weights(model), weights(plain))

    def test_what_trains_before_stopped_layers_again_is_told_at_the_next_look(self) -> None:
        model: Any = conv_model()
        model[0].requires_grad_(False)
        optimizer = SGD(model.parameters(), **SHRINKING, settings=Settings(**EAGER), model=model)
        train(model, optimizer, 4)
        assert [event.layer for event in optimizer.gradskip.events] == [4]
        model[0].requires_grad_(True)
        with pytest.warns(UserWarning, match=r"0.weight, 0.bias still train before stopped layers"):
            train(model, optimizer, 4, start=4)

    @pytest.mark.parametrize(
        "settings",
        [
            Settings(**EAGER),
            Settings(rule="gradient_norm", rule_interval=2, rule_percentile=80),
            Settings(rule="plasticity", rule_interval=1, rule_window=2, rule_tolerance=0.9),
        ],
        ids=lambda settings: settings.mode,
    )
    @pytest.mark.parametrize("frozen", [(0,), (0, 3), (0, 3, 6)])
    def test_layers_unfrozen_one_by_one_are_watched_then(self, settings: Settings, frozen: tuple[int, ...]) -> None:
        """From the last to the first, as in ULMFiT; where all were frozen the rule had nothing to begin with."""
        model: Any = conv_model()
        for index in frozen:
            model[index].requires_grad_(False)
        optimizer = SGD(model.parameters(), **SHRINKING, settings=settings, model=model)
        step = 0
        for index in reversed(frozen):
            train(model, optimizer, 1, start=step)
            model[index].requires_grad_(True)
            step += 1
        train(model, optimizer, 40, start=step)
        numbers = {0: 0, 3: 4, 6: 7}
        first = optimizer.gradskip.events[0].layer
        assert first in [numbers[index] for index in frozen]

    def test_a_resumed_run_lets_it_train_on(self) -> None:
        """And what the user has frozen, before or after, stays frozen through a load, whatever the saved run did."""
        model: Any = conv_model()
        settings = Settings(stop_layer_num=(4,), stop_layer_itr=(1,))
        model[0].requires_grad_(False)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        train(model, optimizer, 3)
        model[0].requires_grad_(True)
        model[9].requires_grad_(False)
        resumed: Any = conv_model()
        resumed[9].requires_grad_(False)
        again = SGD(resumed.parameters(), lr=0.1, settings=settings, model=resumed)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again.gradskip.stops.reasons == optimizer.gradskip.stops.reasons
        assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in model.parameters()]
        assert optimizer.gradskip.stopped == (2, 3, 4)

    def test_a_head_that_is_unfrozen_later_lets_the_last_layer_stop(self) -> None:
        model: Any = conv_model()
        for part in (model[6].bias, *model[9].parameters()):
            part.requires_grad_(False)
        optimizer = SGD(model.parameters(), **SHRINKING, settings=Settings(**EAGER), model=model)
        train(model, optimizer, 10)
        assert [event.layer for event in optimizer.gradskip.events] == [0, 4]  # the last one would leave nothing
        model[9].requires_grad_(True)
        train(model, optimizer, 12, start=10)
        assert [event.layer for event in optimizer.gradskip.events] == [0, 4, 7]

    def test_a_parameter_of_a_container_that_is_used_before_its_children(self) -> None:
        """Frozen in the first pass, so that autograd shows nothing of it."""

        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.pos = nn.Parameter(torch.zeros(6))
                self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.a(x + self.pos))

        model = Positions()
        model.pos.requires_grad_(False)
        settings = Settings(stop_layer_num=(2,), stop_layer_itr=(1,), prefix_autograd=False)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        for step in range(6):
            if step == 3:
                model.pos.requires_grad_(True)
            optimizer.zero_grad()
            model(torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
        assert optimizer.gradskip.stops.reasons[0] == Reason.UPSTREAM  # said, not lost

    def test_everything_stopped_keeps_what_the_loss_reaches(self) -> None:
        class Auxiliary(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.head, self.aux = nn.Conv2d(1, 4, 3), nn.Linear(4, 2), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                features = self.conv(x).mean((2, 3))
                return self.head(features), self.aux(features)

        model = Auxiliary()
        settings = Settings(stop_layer_num=(5,), stop_layer_itr=(1,))
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 1, 6, 6))[0].square().mean().backward()  # the second head is in no loss
            optimizer.step()
        assert optimizer.gradskip.stops.of(Reason.KEPT) == (3,)
        resumed = Auxiliary()
        again = SGD(resumed.parameters(), lr=0.1, settings=settings, model=resumed)
        again.load_state_dict(optimizer.state_dict())
        resumed(torch.ones(2, 1, 6, 6))[0].square().mean().backward()


class TestFreezing:
    def test_the_next_layer_begins_with_a_peak_of_its_own(self) -> None:
        """At a learning rate of nearly nothing no variance falls, and nothing may stop."""
        model: Any = conv_model()
        settings = Settings(**{**EAGER, "start_thr": 0.9})
        optimizer = SGD(model.parameters(), lr=1e-7, weight_decay=1e-3, settings=settings, model=model)
        train(model, optimizer, 5)
        model[0].weight.requires_grad_(False)
        assert float(model[3].weight.var()) < 0.9 * float(model[0].weight.var())
        train(model, optimizer, 20, start=5)
        assert optimizer.gradskip.events == []

    @pytest.mark.parametrize("rule", ["linear", "freezeout"])
    def test_a_schedule_keeps_its_times(self, rule: str) -> None:
        events = []
        for freezes in (False, True):
            model: Any = conv_model()
            settings = Settings(rule=rule, rule_end_itr=30, rule_depth=1.0)
            optimizer = SGD(model.parameters(), lr=0.01, settings=settings, model=model)
            train(model, optimizer, 3)
            model[3].requires_grad_(not freezes)
            train(model, optimizer, 30, start=3)
            events.append([(event.iteration, event.layer) for event in optimizer.gradskip.events])
        assert events[0] == events[1]

    @pytest.mark.parametrize("units", [{}, {"whole_units": True}], ids=["numbers", "whole units"])
    @pytest.mark.parametrize(
        "settings",
        [
            {**EAGER, "samples": 4},
            {"rule": "gradient_norm", "rule_interval": 4, "rule_percentile": 80},
            {"rule": "plasticity", "rule_interval": 4, "rule_window": 2, "rule_tolerance": 0.9},
        ],
        ids=lambda settings: settings.get("rule", "variance"),
    )
    def test_the_layer_that_a_rule_looks_at_does_not_hold_it_up(
        self, settings: dict[str, Any], units: dict[str, Any]
    ) -> None:
        """Frozen by the user after the rule's first look; nothing of it changes any more."""
        model: Any = conv_model()
        optimizer = SGD(model.parameters(), **SHRINKING, settings=Settings(**settings, **units), model=model)
        train(model, optimizer, 2)
        model[0].weight.requires_grad_(False)
        train(model, optimizer, 40, start=2)
        assert 4 in [event.layer for event in optimizer.gradskip.events]
        assert 0 not in [event.layer for event in optimizer.gradskip.events]

    def test_the_stops_are_those_of_a_run_that_never_had_it(self) -> None:
        """Against an independent run in which the layer was frozen from the begin, weights equal at that time."""
        settings = Settings(**{**EAGER, "samples": 3})
        late: Any = conv_model()
        optimizer = SGD(late.parameters(), lr=0.0, weight_decay=2.0, settings=settings, model=late)
        train(late, optimizer, 1)  # a look, at a learning rate of 0
        late[0].weight.requires_grad_(False)
        early: Any = conv_model()
        early.load_state_dict(late.state_dict())
        early[0].weight.requires_grad_(False)
        other = SGD(early.parameters(), lr=0.0, weight_decay=2.0, settings=settings, model=early)
        train(early, other, 1)
        early.load_state_dict(late.state_dict())
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = 0.02
        train(late, optimizer, 20, start=1)
        train(early, other, 20, start=1)
        found = [(event.layer, event.rule) for event in optimizer.gradskip.events]
        assert found == [(event.layer, event.rule) for event in other.gradskip.events] != []
