"""`Settings(reference=True)` against the published package itself, step by step and bit for bit.

`make test` installs ``cac`` 1.0.0; its optimizer's file is loaded alone, because the package imports apex.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conv_models import conv_batches, conv_model
from torch import nn

from trainables.gradskip import SGD, Settings


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """The published optimizer's module."""
    package = importlib.util.find_spec("cac")
    assert package is not None, "cac 1.0.0 is missing: run `make test`, which installs it"
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "gradskip" / "cac_sgd.py"
    spec = importlib.util.spec_from_file_location("published_cac_sgd", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(model: nn.Module, optimizer: Any, *, steps: int, decay: float, set_to_none: bool) -> list[Any]:
    """Weights and requires_grad after every step, under a decaying learning rate."""
    history = []
    dtype = next(model.parameters()).dtype
    for x, y in conv_batches(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= decay
        history.append([(p.detach().clone(), p.requires_grad) for p in model.parameters()])
    return history


def random_case(seed: int) -> tuple[dict[str, str], dict[str, Any], bool]:
    """Variables, optimizer arguments and how gradients are cleared."""
    draw = random.Random(seed)
    variables = {"CAC_BRAKING_DISTANCE": str(draw.choice([0, 0, 1, 3, 7]))}
    if draw.random() < 0.4:
        stops = draw.randint(1, 3)
        variables["CAC_STOP_LAYER_NUM"] = ",".join(map(str, sorted(draw.sample(range(8), stops))))
        variables["CAC_STOP_LAYER_ITR"] = ",".join(map(str, sorted(draw.sample(range(35), stops))))
    else:
        variables["CAC_VAR_START_ITR"] = str(draw.randint(0, 12))
        variables["CAC_VAR_START_THR"] = str(draw.choice([0.9, 0.97, 0.999, 1.0]))
        variables["CAC_VAR_MT_COUNT_THR"] = str(draw.randint(0, 3))
        variables["CAC_VAR_MT_THR"] = str(draw.choice([0.95, 0.99, 1.0]))
        variables["CAC_VAR_SLOPE_THR"] = str(draw.choice([0.95, 0.99, 1.0]))
        if draw.random() < 0.7:
            variables["CAC_VAR_SAMPLES"] = str(draw.randint(1, 5))
    options = {
        "lr": draw.choice([0.02, 0.1]),
        "momentum": draw.choice([0.0, 0.9]),
        "weight_decay": draw.choice([0.0, 0.05, 0.5]),
    }
    if options["momentum"] and draw.random() < 0.3:
        options["nesterov"] = True
    return variables, options, draw.random() < 0.5


def take_the_published_steps(
    published: ModuleType,
    settings: Settings,
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    decay: float = 1.0,
    set_to_none: bool = True,
) -> SGD:
    """Train with the variables of the environment, which the published optimizer reads; ours, after equal steps."""
    theirs, ours = conv_model().to(dtype), conv_model().to(dtype)
    optimizer = SGD(ours.parameters(), **options, settings=settings)
    expected, actual = (
        train(model, one, steps=40, decay=decay, set_to_none=set_to_none)
        for model, one in ((theirs, published.SGD(list(theirs.parameters()), **options)), (ours, optimizer))
    )
    for step, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert [flag for _, flag in want] == [flag for _, flag in got], step
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(want, got, strict=True)), step
    return optimizer


#: Random cases with stops of every kind.
SEEDS = (*range(16), 23, 24, 27, 31, 38)


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        pytest.param(seed, dtype, marks=[pytest.mark.slow, pytest.mark.thorough] * (seed >= 8))
        for dtype, seeds in ((torch.float32, SEEDS), (torch.float64, SEEDS[:8]))
        for seed in seeds
    ],
)
def test_reference_takes_the_published_steps(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype
) -> None:
    variables, options, set_to_none = random_case(seed)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_environment(reference=True)
    take_the_published_steps(published, settings, options, dtype=dtype, decay=0.97, set_to_none=set_to_none)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_random_cases_cover_stops_of_every_kind() -> None:
    wanted = {(rule, braked) for rule in ("manual", "start", "slope", "mountain") for braked in (True, False)}
    rules: set[tuple[str, bool]] = set()
    for seed in SEEDS[::-1]:
        if rules == wanted:
            break
        variables, options, set_to_none = random_case(seed)
        settings = Settings.from_environment(variables, reference=True)
        model = conv_model()
        optimizer = SGD(model.parameters(), **options, settings=settings)
        train(model, optimizer, steps=40, decay=0.97, set_to_none=set_to_none)
        rules |= {(event.rule, settings.braking_distance > 0) for event in optimizer.gradskip.events}
    assert rules == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(3, 10))]
)
@pytest.mark.parametrize("reference", [True, False])
def test_layer_numbers_alone_are_what_the_auto_rule_looks_at(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, reference: bool
) -> None:
    """Weights of any kind: convolutions, norms, biases. Our default differs in nothing where no fault is met."""
    draw = random.Random(seed)
    numbers = sorted(draw.sample(range(10), draw.randint(1, 4)))
    monkeypatch.setenv("CAC_STOP_LAYER_NUM", ",".join(map(str, numbers)))
    monkeypatch.setenv("CAC_VAR_START_ITR", str(draw.randint(0, 9)))
    monkeypatch.setenv("CAC_VAR_SAMPLES", str(draw.randint(1, 3)))
    for name in ("START", "MT", "SLOPE"):
        monkeypatch.setenv(f"CAC_VAR_{name}_THR", str(draw.choice([0.97, 0.999, 1.0])))
    monkeypatch.setenv("CAC_BRAKING_DISTANCE", str(draw.choice([0, 0, 3])))
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.3}
    optimizer = take_the_published_steps(published, Settings.from_environment(reference=reference), options)
    assert {event.layer for event in optimizer.gradskip.events} <= set(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4, 16))]
)
def test_the_default_takes_the_same_steps_where_no_fault_is_met(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Gradients set to None, a constant learning rate and no stop due while braking: nothing is left to differ."""
    variables, options, _ = random_case(seed)
    if "CAC_STOP_LAYER_NUM" in variables and variables["CAC_BRAKING_DISTANCE"] != "0":
        variables["CAC_STOP_LAYER_NUM"] = variables["CAC_STOP_LAYER_NUM"].split(",")[0]
        variables["CAC_STOP_LAYER_ITR"] = variables["CAC_STOP_LAYER_ITR"].split(",")[0]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    take_the_published_steps(published, Settings.from_environment(), options)
