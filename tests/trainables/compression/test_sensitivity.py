"""Sensitivity analysis against plain loops, and proposals against the error function on Gaussian weights."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import pytest
import torch
from tiny_workload import Tiny
from torch import Tensor, nn

import tune_cac as cac
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.sensitivity import (
    Kind,
    Proposal,
    Row,
    evaluate_workload,
    proposed_sensitivities,
    pruners_section,
    sensitivity_analysis,
    sensitivity_at,
)
from trainables.errors import UserError


def small() -> nn.Sequential:
    """Five parameters, three of them with two dimensions or more, two with three or more."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3, bias=False), nn.Linear(5, 3))


def by_loop(weight: Tensor, level: float, kind: Kind) -> Tensor:
    """The weight with its smallest elements, filters or channels zeroed, by sorting plain numbers."""
    values: Any = weight.detach().tolist()

    def flat(part: Any) -> list[float]:
        return [part] if isinstance(part, float) else [x for inner in part for x in flat(inner)]

    result = weight.detach().clone()
    if kind == "element":
        sizes = [abs(x) for x in flat(values)]
        for i in sorted(range(len(sizes)), key=sizes.__getitem__)[: int(level * len(sizes))]:
            result.view(-1)[i] = 0
        return result
    parts = values if kind == "filter" else [[one[c] for one in values] for c in range(weight.shape[1])]
    sizes = [sum(map(abs, flat(part))) / len(flat(part)) for part in parts]
    for i in sorted(range(len(sizes)), key=sizes.__getitem__)[: int(level * len(sizes))]:
        result[(i,) if kind == "filter" else (slice(None), i)] = 0
    return result


@pytest.mark.parametrize("kind", ["element", "filter", "channel"])
def test_one_parameter_at_a_time_is_pruned_to_each_level(kind: Kind) -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[dict[str, Tensor]] = []

    def evaluate(model: nn.Module) -> float:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return len(seen) / 100

    levels = [0.0, 0.25, 0.3, 0.75, 1.0]
    rows = sensitivity_analysis(model, evaluate, levels=levels, kind=kind)
    names = ["0.weight", "2.weight", "3.weight"] if kind == "element" else ["0.weight", "2.weight"]
    assert [(row.parameter, row.sparsity) for row in rows] == [(name, level) for name in names for level in levels]
    pruned = iter(seen[1:])
    assert all(torch.equal(seen[0][key], before[key]) for key in before)
    for row in rows:
        if row.sparsity == 0:
            assert row.top1 == 0.01
            continue
        expected = before | {row.parameter: by_loop(before[row.parameter], row.sparsity, kind)}
        state = next(pruned)
        assert all(torch.equal(state[key], expected[key]) for key in expected), row
    assert list(pruned) == []
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_the_weights_come_back_where_the_evaluation_fails() -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    calls: list[int] = []

    def evaluate(_: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("no data")
        return 1.0

    with pytest.raises(KeyError):
        sensitivity_analysis(model, evaluate)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levels": [0.5, 1.3]}, r"levels of a sensitivity analysis must be in \[0, 1\], got 1.3"),
        ({"levels": [float("nan")]}, r"levels of a sensitivity analysis must be in \[0, 1\], got nan"),
        ({"kind": "row"}, "kind of a sensitivity analysis must be one of element, filter, channel, got 'row'"),
        ({"layers": ["4.weight"]}, "unknown parameter '4.weight': did you mean .*Valid: 0.weight, 2.weight, 3.weight"),
        ({"layers": ["layer*"]}, r"'layer\*' matches no parameter; there are 0.weight, 2.weight, 3.weight"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        sensitivity_analysis(small(), lambda _: 1.0, **given)


def test_s_of_gaussian_weights_is_the_quantile_of_a_half_normal() -> None:
    """P(|w| <= s sigma) = erf(s / sqrt 2)."""
    weight = torch.randn(400_000, generator=torch.Generator().manual_seed(1)) * 3
    for level in (0.05, 0.1974, 0.4680, 0.6184, 0.95):
        expected = NormalDist().inv_cdf((1 + level) / 2)
        assert math.erf(expected / math.sqrt(2)) == pytest.approx(level, abs=1e-12)
        assert sensitivity_at(weight, level) == pytest.approx(expected, rel=0.01)
    assert sensitivity_at(weight, 0.1974) == pytest.approx(0.25, rel=0.01)  # as published for s = 0.25


@pytest.mark.parametrize(("kind", "weight"), [("element", nn.Linear(18, 10)), ("filter", nn.Conv2d(1, 180, 1))])
def test_a_level_prunes_as_many_as_in_a_schedule(kind: Kind, weight: nn.Module) -> None:
    zeros: list[int] = []

    def evaluate(model: nn.Module) -> float:
        zeros.append(int((model.weight == 0).sum()))
        return 0.5

    sensitivity_analysis(weight, evaluate, levels=[0.35], kind=kind)  # 0.35 * 180 is 62.99999999999999
    arguments = {"levels": {"weight": 0.35}}
    if kind == "filter":
        arguments = pruners_section([Proposal("weight", 180, 0.35, 0.5, 0.0)], kind)["proposed_35"]
    pruner = getattr(cac.compression, arguments.pop("class", "SparsityLevelParameterPruner"))(weight, **arguments)
    mask = pruner.masks({"weight": weight.weight.detach()}, {}, Moment(epoch=0, timing=Timing()))["weight"]
    assert zeros == [0, int((mask == 0).sum())]


@pytest.mark.parametrize("level", [0.0, 0.001, 0.05, 0.29, 0.5, 0.95, 1.0])
def test_the_threshold_prunes_exactly_the_level_also_when_rounded(level: float) -> None:
    generator = random.Random(2)
    numbers = [generator.gauss(0.1, 0.5) for _ in range(500)]
    weight = torch.tensor(numbers, dtype=torch.float64).view(20, 25)
    mean = sum(numbers) / 500
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / 499)
    threshold = round(sensitivity_at(weight, level), 6) * deviation
    assert sum(abs(x) <= threshold for x in numbers) == int(500 * level)


def rows_of(parameter: str, accuracies: Sequence[float]) -> list[Row]:
    return [Row(parameter, 0.25 * i, top1) for i, top1 in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("accuracies", "level"),
    [
        ([0.9, 0.9, 0.895, 0.5], 0.5),  # a drop of exactly what is allowed, which floats miss by 4e-17
        ([0.9, 0.89, 0.9, 0.9], 0.0),  # recovers later: not trusted
        ([0.9, 0.95, 0.9, 0.899], 0.75),  # gains do not raise what is compared with
        ([0.9, 0.9, float("nan"), 0.9], 0.25),
    ],
)
def test_the_largest_level_up_to_which_none_loses_more(accuracies: list[float], level: float) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    (found,) = proposed_sensitivities(rows_of("a.weight", accuracies), {"a.weight": weight}, allowed_drop=0.005)
    assert (found.parameter, found.elements, found.level) == ("a.weight", 64, level)
    assert found.top1 == accuracies[int(4 * level)]
    assert found.sensitivity == sensitivity_at(weight, level)


def proposal(name: str, level: float, s: float = 0.0) -> Proposal:
    return Proposal(parameter=name, elements=10, level=level, top1=0.9, sensitivity=s)


@pytest.mark.parametrize("kind", ["element", "filter", "channel"])
def test_the_pruners_that_are_proposed_are_a_schedules(kind: Kind) -> None:
    given = [proposal("a.weight", 0.5, 0.67448975), proposal("b.weight", 0.0), proposal("c.weight", 0.25, 0.31863936)]
    section = pruners_section([*given, proposal("d.weight", 0.5, 0.7)], kind)
    models = {}
    for name, arguments in section.items():
        rest = {key: value for key, value in arguments.items() if key != "class"}
        models[name] = PRUNERS[arguments["class"]](**rest)  # strict: an argument of another type raises
    found: list[Any] = list(models.values())
    if kind == "element":
        assert found[0].sensitivities == {"a.weight": 0.67449, "c.weight": 0.318639, "d.weight": 0.7}
    else:
        assert {(m.group_type, m.desired_sparsity, m.weights) for m in found} == {
            ("Filters" if kind == "filter" else "Channels", 0.25, ("c.weight",)),
            ("Filters" if kind == "filter" else "Channels", 0.5, ("a.weight", "d.weight")),
        }
    assert pruners_section(given[1:2], kind) == {}


def test_a_workloads_evaluation() -> None:
    workload = Tiny()
    torch.manual_seed(0)
    model = workload.make_model().train()
    model[0].eval()
    statistics, drawn = model[1].running_mean.clone(), torch.get_rng_state()
    found = evaluate_workload(workload, model, "validation", torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model[1].running_mean, statistics)
    assert (model.training, model[0].training, model[1].training) == (True, False, True)
    model.eval()
    assert found == workload.evaluate(model, "validation", "cpu")
