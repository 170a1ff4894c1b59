"""Layers that never move: a rule passes over them, as over layers that the user has frozen."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings

STEPS = 120

RULES = {
    "variance": Settings(watch=("linear",), start_itr=0, start_thr=0.97, mt_thr=0.97, slope_thr=0.97, samples=5),
    "gradient_norm": Settings(watch=("linear",), rule="gradient_norm", rule_interval=10, rule_percentile=70.0),
    "plasticity": Settings(watch=("linear",), rule="plasticity", rule_interval=5, rule_window=2, rule_tolerance=0.9),
}


class Network(nn.Module):
    """Three layers, two that may not move, then three that train.

    Args:
        way: why the first layers do not move.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.unused = nn.Linear(6, 6)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "no_grad":
            with torch.no_grad():
                features = self.backbone(x)
        else:
            features = self.backbone(x)
        return self.head(features.detach() if self.way == "detach" else features)


def attach(model: Network, settings: Settings) -> Any:
    front = [*model.unused.parameters(), *model.backbone.parameters()]
    groups = [{"params": front}, {"params": list(model.head.parameters())}]
    return SGD(groups, lr=0.05, weight_decay=0.1, settings=settings, model=model)  # whose weights shrink, and variances


def run(
    way: str,
    settings: Settings,
    steps: int = STEPS,
    *,
    lr_at: dict[int, float] | None = None,
    resume: int | None = None,
) -> Any:
    """Train, with a learning rate of the first layers from some steps on, and another process from a step on."""
    model = Network(way)
    if way == "frozen":
        model.backbone.requires_grad_(False)
        model.unused.requires_grad_(False)
    optimizer = attach(model, settings)
    if way == "lr":
        optimizer.param_groups[0]["lr"] = 0.0
    torch.manual_seed(1)
    for step in range(steps):
        if step == resume:
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            with torch.random.fork_rng():
                model = Network(way)
            optimizer = attach(model, settings)
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        if lr_at and step in lr_at:
            optimizer.param_groups[0]["lr"] = lr_at[step]
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore")
class TestPassedOver:
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("way", ["no_grad", "detach", "lr"])
    def test_what_trains_stops_as_where_the_user_has_frozen_the_rest(self, way: str, rule: str) -> None:
        settings = RULES[rule]
        head = set(range(6, 12))
        wanted = run("frozen", settings).gradskip
        found = run(way, settings).gradskip
        assert len(wanted.events) > 0
        assert head.intersection(found.stopped) == head.intersection(wanted.stopped)
        first = next(event for event in found.events if event.layer >= 6)
        # Noticed at the third measurement, after which the rule sees what it needs for a stop.
        assert 0 <= first.iteration - wanted.events[0].iteration <= 6 * settings.looks[1]

    def test_the_layers_are_named_once_with_the_way_out(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run("no_grad", RULES["variance"])
        (message,) = [str(w.message) for w in caught if "not move" in str(w.message)]
        assert message.startswith("unused.weight, backbone.0.weight, backbone.2.weight do not move (no gradient, or")
        assert "switch its requires_grad off until then" in message

    def test_a_layer_that_moves_later_is_watched_again(self) -> None:
        """A learning rate of 0 for 8 steps; measured at 0, 2 and 6, so passed over at 6."""
        slow = Settings(watch=("linear",), start_itr=0, start_thr=0.9, mt_thr=0.9, slope_thr=0.9, samples=2)
        assert run("lr", slow).gradskip.events[0].name == "head.0.weight"
        assert run("lr", slow, lr_at={8: 0.05}).gradskip.events[0].name == "backbone.0.weight"

    def test_a_warm_up_of_some_steps_passes_over_nothing(self) -> None:
        every = Settings(watch=("linear",), start_itr=0, start_thr=0.97, mt_thr=0.97, slope_thr=0.97, samples=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run("lr", every, 12, lr_at={3: 0.05})
        assert [str(w.message) for w in caught if "backbone.0.weight" in str(w.message)] == []
