"""Warnings of a gradient-skip optimizer: at the user's line, once; which setting helps; layers that never move."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_models import LateNorms, conv_batches, conv_model
from loops import train
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings, wrap


def warned(settings: Settings, model: nn.Module | None = None) -> list[str]:
    model = model or LateNorms()
    optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer, 4)
    return [str(warning.message) for warning in said]


#: Through the second convolution of `LateNorms`.
STOP: dict[str, Any] = {"stop_layer_num": (3,), "stop_layer_itr": (1,)}


class TestLeftBefore:
    def test_recommends_what_helps(self) -> None:
        (said,) = warned(Settings(**STOP))
        assert said == (
            "norm0.weight, norm0.bias still train before stopped layers, so the backward pass runs on through them: "
            "CAC_WHOLE_UNITS=1 stops layers with their norms in execution order; CAC_PREFIX_AUTOGRAD=0 stops whatever "
            "is left"
        )
        assert warned(Settings(**STOP, whole_units=True)) == []
        assert warned(Settings(**STOP, prefix_autograd=False)) == []

    def test_example_inputs_that_were_given_are_not_asked_for(self) -> None:
        model = conv_model()
        with pytest.warns(UserWarning, match="could not be seen"):
            optimizer = SGD(
                model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(3,), stop_layer_itr=(1,)), model=model,
                example_inputs=torch.ones(3),
            )  # fmt: skip
        with pytest.warns(UserWarning, match="never seen.*example_inputs= could not be run, as was warned of"):
            train(model, optimizer, 3)


def test_a_warning_points_at_the_users_line() -> None:
    """At the call of `step()`, of the class or of `wrap`; torch's and our own frames are skipped."""
    model = LateNorms()
    settings = Settings(stop_layer_num=(3,), stop_layer_itr=(1,))
    optimizers = [SGD(model.parameters(), lr=0.1, settings=settings, model=model)]
    optimizers.append(wrap(torch.optim.SGD(LateNorms().parameters(), lr=0.1), settings))  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)  # torch wraps the step once more
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in conv_batches(3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizers[0].step()
        schedule.step()
        SGD(conv_model().parameters(), lr=0.1, settings=Settings())
        wrap(torch.optim.SGD(conv_model().parameters(), lr=0.1), Settings())
    assert len(said) == 3
    assert {warning.filename for warning in said} == {__file__}
    lines = [Path(__file__).read_text().split("\n")[warning.lineno - 1].strip() for warning in said]
    assert [line.partition("(")[0] for line in lines] == ["optimizers[0].step", "SGD", "wrap"]


RULES = {
    "variance": Settings(watch=("linear",), start_itr=0, start_thr=0.97, mt_thr=0.97, slope_thr=0.97, samples=5),
    "gradient_norm": Settings(watch=("linear",), rule="gradient_norm", rule_interval=10, rule_percentile=70.0),
    "grades": Settings(watch=("linear",), rule="grades", rule_interval=5, rule_tau=1e-9),
    "plasticity": Settings(watch=("linear",), rule="plasticity", rule_interval=5, rule_window=2, rule_tolerance=0.9),
}


class Network(nn.Module):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.first, self.rest = nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(x) if self.moves else self.first(x).detach())
        return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("moves", [True, False])
def test_a_layer_that_never_moves_is_named_once(rule: str, moves: bool) -> None:
    torch.manual_seed(0)
    model = Network(moves)
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=0.1, settings=RULES[rule], model=model)
    inputs = torch.randn(16, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(60):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    still = [str(one.message) for one in said if "does not move" in str(one.message)]
    assert len(still) == (0 if moves else 1)
    assert all(text.startswith("first.weight does not move (no gradient, or a learning rate of 0)") for text in still)
