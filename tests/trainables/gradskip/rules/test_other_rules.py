"""The rules beside weight variance, each against its source's formula worked out by hand or in numpy."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import DecayInside, train
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Adam, Settings, wrap
from trainables.gradskip.rules.freezeout import FreezeOutRule
from trainables.gradskip.rules.gradient_norm import GradientNormRule
from trainables.gradskip.rules.linear import LinearRule
from trainables.gradskip.rules.plasticity import PlasticityRule
from trainables.gradskip.signals import similarity_distance


def nothing(_: int) -> float:
    raise AssertionError("a schedule measures nothing")


def stops(rule: Any, steps: int, signal: Any = nothing) -> list[tuple[int, int]]:
    """(iteration, layer) of each decision; `next_due` must never pass over one."""
    found = []
    for iteration in range(steps):
        due = rule.next_due(iteration)
        decision = rule.decide(iteration, signal)
        if decision is not None:
            assert due == iteration
            found.append((iteration, decision.layer))
    return found


class TestLinear:
    def test_depth_grows_linearly_in_time(self) -> None:
        """Composer: frozen layers at t = int(level * K * (t - start) / (end - start))."""
        settings = Settings(rule="linear", rule_start_itr=20, rule_end_itr=120, rule_depth=0.8)
        targets = list(range(0, 50, 5))
        found = stops(LinearRule(settings, targets, len(targets)), 200)
        depth = 0
        expected = []
        for t in range(200):
            wanted = int(0.8 * 10 * (min(t, 120) - 20) / 100 + 1e-9) if t >= 20 else 0
            if wanted > depth:
                expected.append((t, targets[wanted - 1]))
                depth = wanted
        assert found == expected
        assert len(found) == 8

    def test_in_an_optimizer_with_braking(self) -> None:
        model = conv_model()
        settings = Settings(rule="linear", rule_start_itr=2, rule_end_itr=10, rule_depth=0.7, braking_distance=2)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings)
        train(model, optimizer, 12)
        # 3 watched layers: one each 8 / (0.7 * 3) = 3.81 steps after the second.
        assert [(e.iteration, e.layer, e.rule) for e in optimizer.gradskip.events] == [
            (6, 0, "linear"),
            (10, 4, "linear"),
        ]


class TestFreezeOut:
    @pytest.mark.parametrize("cubic", [False, True])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_learning_rates_are_the_papers_cosines(self, cubic: bool, scaled: bool) -> None:
        """t_i from t_0 = 0.5 to 1 linearly; a_i(t) = 0.5 a_i(0) (1 + cos(pi t / t_i)), a_i(0) = a or a / t_i."""
        settings = Settings(rule="freezeout", rule_start_itr=50, rule_end_itr=100, rule_cubic=cubic, rule_scaled=scaled)
        rule = FreezeOutRule(settings, [0, 4, 7, 9, 11], 4)
        for layer, share in enumerate(np.linspace(0.5, 1.0, 5)):
            t_i = share**3 if cubic else share
            for iteration in (0, 10, 25, 49, 60, 99):
                t = iteration / 100
                expected = (1 / t_i if scaled else 1) * 0.5 * (1 + math.cos(math.pi * t / t_i)) if t < t_i else 0.0
                assert rule.factor(layer, iteration) == pytest.approx(expected)
        ends = [
            (math.ceil(100 * (s**3 if cubic else s) - 1e-9), n)
            for s, n in zip((0.5, 0.625, 0.75, 0.875), (0, 4, 7, 9), strict=True)
        ]
        assert stops(rule, 120) == ends

    @pytest.mark.parametrize("kind", ["sgd", "not linear"])
    def test_every_update_has_its_layers_factor(self, kind: str) -> None:
        model = nn.ParameterList([nn.Parameter(torch.ones(1, 1, 1, 1)) for _ in range(3)])
        settings = Settings(rule="freezeout", rule_start_itr=4, rule_end_itr=8)
        optimizer: Any = (
            SGD(model.parameters(), lr=1.0, settings=settings)
            if kind == "sgd"
            else wrap(DecayInside(model.parameters(), lr=1.0, beta=0.0), settings)
        )
        for step in range(8):
            before = [float(p.detach()) for p in model]
            for p in model:
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.step()
            plain = 1.0 if kind == "sgd" else 1 / math.sqrt(step + 1)
            for p, start, end in zip(model, before, (4, 6, 8), strict=True):
                factor = 0.5 * (1 + math.cos(math.pi * step / end)) if step < end else 0.0
                assert start - float(p.detach()) == pytest.approx(plain * factor, abs=1e-6)
        assert [p.requires_grad for p in model] == [False, False, True]  # the last unit never stops

    def test_braking_as_well_is_refused(self) -> None:
        with pytest.raises(UserError, match="CAC_BRAKING_DISTANCE must be 0 with CAC_RULE=freezeout"):
            Settings(rule="freezeout", rule_end_itr=10, braking_distance=3)


class TestGradientNorm:
    def test_the_front_layers_with_small_changes_stop(self) -> None:
        settings = Settings(rule="gradient_norm", rule_start_itr=10, rule_interval=10, rule_percentile=50)
        norms = {
            #   10    20    30    40
            0: [1.00, 1.10, 0.50, 0.0],
            2: [1.00, 0.95, 0.40, 0.0],
            5: [1.00, 3.00, 3.30, 3.3],
            8: [1.00, 0.20, 0.20, 0.2],
        }
        now = 0
        rule = GradientNormRule(settings, [0, 2, 5, 8], 3)

        def signal(layer: int) -> float:
            return norms[layer][now]

        # 20: changes .1, .05, 2, .8; median .45: layers 0 and 2 are below it, 5 is not.
        assert [rule.decide(t, signal) is not None for t in (5, 10)] == [False, False]
        now = 1
        decision = rule.decide(20, signal)
        assert decision is not None
        assert (decision.layer, decision.ratio) == (2, pytest.approx(0.05))
        assert rule.next_due(21) == 30

    def test_signal_is_the_norm_of_the_summed_gradients_of_the_interval(self) -> None:
        model, twin = conv_model(), conv_model()
        settings = Settings(rule="gradient_norm", rule_start_itr=3, rule_interval=4, rule_percentile=1e-6)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, settings=settings)
        plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        sums = [torch.zeros_like(p) for p in twin.parameters()]
        for step, (x, y) in enumerate(conv_batches(8)):
            for m, o in ((model, optimizer), (twin, plain)):
                o.zero_grad()
                nn.functional.cross_entropy(m(x), y).backward()
            for total, p in zip(sums, twin.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad
            optimizer.step()
            plain.step()
            if step in (3, 7):
                rule: Any = optimizer.gradskip.machine.rule
                expected = {n: float(sums[n].norm()) for n in (0, 4, 7)}
                assert rule.before == pytest.approx(expected, rel=1e-5)
                sums = [torch.zeros_like(p) for p in twin.parameters()]

    @pytest.mark.parametrize("rule", ["gradient_norm", "grades"])
    @pytest.mark.parametrize("fused", [False, True])
    def test_scaled_gradients_are_seen_unscaled(self, fused: bool, rule: str) -> None:
        found: dict[float, list[float]] = {}
        for scale in (1.0, 1024.0):
            model = conv_model()
            settings = Settings(rule=rule, rule_start_itr=3, rule_interval=4, rule_tau=1e-9)
            optimizer = Adam(model.parameters(), lr=1e-3, fused=fused, settings=settings)
            measured = found[scale] = []
            optimizer.gradskip.on_measured.append(lambda _, number, into=measured: into.append(number))  # type: ignore[misc]
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
            for x, y in conv_batches(5):
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        assert len(found[1.0]) == 3
        assert found[1.0] == pytest.approx(found[1024.0], rel=1e-4)


class TestGradES:
    def test_stops_are_those_of_a_plain_loop(self) -> None:
        """The loop freezes by hand what a layer's entries, in Python floats, say; momentum does not move it on."""
        model, twin = conv_model(), conv_model()
        settings = Settings(rule="grades", rule_start_itr=4, rule_interval=3, rule_tau=0.033)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, settings=settings)
        plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        front, ends, expected = list(twin.parameters()), [0, 4, 7], []
        before: dict[int, list[float]] = {}
        for step, (x, y) in enumerate(conv_batches(40)):
            for m, o in ((model, optimizer), (twin, plain)):
                o.zero_grad()
                nn.functional.cross_entropy(m(x), y).backward()
            now = {n: front[n].grad.flatten().tolist() for n in ends if front[n].grad is not None}  # type: ignore[union-attr]
            stopped = None
            while ends and step >= 4 and (step - 4) % 3 == 0:
                changes = [abs(a - b) for a, b in zip(now[ends[0]], before[ends[0]], strict=True)]
                if sum(changes) / len(changes) >= 0.033:
                    break
                stopped = ends.pop(0)
            before = now
            optimizer.step()
            plain.step()
            if stopped is not None:
                expected.append((step, stopped))
                for p in front[: stopped + 1]:
                    p.requires_grad_(False)
        assert [(e.iteration, e.layer) for e in optimizer.gradskip.events] == expected
        assert len(expected) > 1
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class TestPlasticity:
    def test_distance_in_numpy(self) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(5, 2, 3, generator=generator) for _ in range(2))

        def gram(x: Tensor) -> Any:
            flat = x.numpy().reshape(5, -1)
            g = flat @ flat.T
            return g / np.linalg.norm(g, axis=1, keepdims=True)

        expected = np.square(gram(a) - gram(b)).sum() / 25
        assert float(similarity_distance(a, b)) == pytest.approx(expected, rel=1e-5)
        assert float(similarity_distance(a, a)) == 0

    def test_a_layer_stops_when_its_plasticity_is_stationary(self) -> None:
        settings = Settings(rule="plasticity", rule_start_itr=0, rule_interval=1, rule_window=3, rule_tolerance=0.2)
        values = [99.0] + [math.exp(-t / 2) for t in range(40)]  # the first measurement has no reference
        averages = [np.mean(values[max(1, t - 2) : t + 1]) for t in range(1, 41)]
        slopes = [abs(np.polyfit(range(3), averages[t - 2 : t + 1], 1)[0]) for t in range(2, 40)]
        first = next(t for t in range(len(slopes)) if slopes[t] < 0.2 * max(slopes[: t + 1]))
        measured = iter(values)
        found = stops(PlasticityRule(settings, [4, 9], 2), first + 4, lambda _: next(measured))
        assert found == [(first + 3, 4)]

    def test_signal_compares_with_the_weights_of_the_measurement_before(self) -> None:
        model = conv_model()
        settings = Settings(rule="plasticity", rule_start_itr=2, rule_interval=3, rule_window=5)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, settings=settings, model=model)
        before: dict[int, nn.Module] = {}
        expected: list[float] = []
        for step, (x, y) in enumerate(conv_batches(12)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if step in (2, 5, 8, 11):
                before[step] = copy.deepcopy(model).eval()
                if step > 2:
                    with torch.no_grad():
                        a, b = before[step][0](x), before[step - 3][0](x)  # type: ignore[index]
                    expected.append(float(similarity_distance(a, b)))
            optimizer.step()
        rule: Any = optimizer.gradskip.machine.rule
        assert rule.values == pytest.approx(expected, rel=1e-4)
        assert all(m.training for m in model.modules())

    def test_a_model_whose_calls_are_not_seen_says_so(self) -> None:
        model = conv_model()
        settings = Settings(rule="plasticity", rule_start_itr=0, rule_interval=1)
        optimizer = SGD(
            model.parameters(), lr=0.1, settings=settings, model=model, example_inputs=torch.ones(2, 1, 8, 8)
        )

        def steps() -> None:
            for _ in range(3):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()

        with pytest.raises(RuntimeError, match="CAC_RULE=plasticity saw no inputs of a training step"):
            steps()
