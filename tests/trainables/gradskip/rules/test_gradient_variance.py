"""The rule on normalised gradient variance and its signal, against numpy in float64 and by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import train
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Adam, AdamW, Settings
from trainables.gradskip.layer_plan import Unit
from trainables.gradskip.rules.choice import make_rule
from trainables.gradskip.signals import GradientVarianceSignal

SHAPES = ((4, 3, 3, 3), (4,), (5, 4, 2, 2), (7, 6))
#: A convolution alone, one with its bias, and a layer of several weights.
UNITS = tuple(Unit(number=w[0], watched=w, end=w[-1]) for w in ((0,), (0, 1), (2, 3, 1)))
NOISES = (1e-3, 0.1, 1.0, 10.0)


def expected(steps: Sequence[Sequence[Tensor | None]], watched: Sequence[int]) -> float:
    """V[g] / E[g^2] of each element over the steps with a gradient, in numpy and float64; mean over the layer."""
    ratios: list[float] = []
    for number in watched:
        own = np.array([g[number].double().numpy().ravel() for g in steps if g[number] is not None])  # type: ignore[union-attr]
        second = np.square(own).mean(axis=0)
        seen = second > 0
        ratios += list(own.var(axis=0, ddof=1)[seen] / second[seen])
    return float(np.mean(ratios)) if ratios else math.nan


def drawn(count: int, noise: float, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Gradients of a constant and noise around it."""
    generator = torch.Generator().manual_seed(0)
    constant = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [
        [(c + noise * torch.randn(c.shape, generator=generator, dtype=dtype)) * scale for c in constant]
        for _ in range(count)
    ]


def observed(steps: Sequence[Sequence[Tensor | None]], dtype: torch.dtype = torch.float32) -> GradientVarianceSignal:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    signal = GradientVarianceSignal(parameters)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        signal.observe(UNITS, None, None)
    return signal


class TestSignal:
    @pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-12, 1e5])
    @pytest.mark.parametrize("noise", NOISES)
    def test_is_numpys_at_every_scale(self, noise: float, scale: float) -> None:
        """Also where the mean dominates: at the smallest noise most elements have an NV of 1e-6."""
        steps = drawn(50, noise, scale)
        found = observed(steps).measure(UNITS)
        assert found.tolist() == pytest.approx([expected(steps, unit.watched) for unit in UNITS], rel=1e-4)

    @pytest.mark.parametrize("noise", NOISES)
    def test_of_float64_is_measured_in_float64(self, noise: float) -> None:
        steps = drawn(20, noise, dtype=torch.float64)
        found = observed(steps, torch.float64).measure(UNITS)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([expected(steps, unit.watched) for unit in UNITS], rel=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_accumulated_in_float32(self, dtype: torch.dtype) -> None:
        steps = [[g.to(dtype) for g in gradients] for gradients in drawn(300, 0.3, 1e-3)]
        found = observed(steps, dtype).measure(UNITS)
        assert found.tolist() == pytest.approx([expected(steps, unit.watched) for unit in UNITS], rel=1e-4)

    def test_noise_alone_is_one_and_a_constant_gradient_nothing(self) -> None:
        generator = torch.Generator().manual_seed(3)
        random = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(8)]
        every_unit = (Unit(number=0, watched=(0, 1, 2, 3), end=3),)
        assert float(observed(random).measure(every_unit)) == pytest.approx(1.0, abs=0.05)  # 1 in expectation
        assert observed([random[0]] * 8).measure(UNITS).tolist() == [0.0] * 3
        turning = [[g if t % 2 else -g for g in random[0]] for t in range(8)]
        assert observed(turning).measure(UNITS).tolist() == pytest.approx([8 / 7] * 3)

    def test_elements_without_gradient_are_left_out(self) -> None:
        steps = drawn(6, 1.0)
        for gradients in steps:
            gradients[2][1:] = 0.0
            gradients[0].zero_()
        steps[2][2][:1] = 0.0  # zero in one step alone counts
        found = observed(steps).measure(UNITS).tolist()
        assert math.isnan(found[0])
        assert found[1:] == pytest.approx([expected(steps, (1,)), expected(steps, (2, 3, 1))], rel=1e-4)

    def test_what_float32_cannot_square_is_no_wrong_number(self) -> None:
        """A gradient of 1e-25 has the square 0: left out, and NaN where nothing is left."""
        steps = drawn(5, 1.0)
        tiny = [[g * 1e-25 for g in gradients] for gradients in steps]
        assert observed(tiny).measure(UNITS).isnan().all()
        mixed = [[small[0], *large[1:]] for small, large in zip(tiny, steps, strict=True)]
        assert float(observed(mixed).measure(UNITS)[1]) == pytest.approx(expected(steps, (1,)), rel=1e-4)

    def test_one_step_and_none_are_nan(self) -> None:
        assert observed(drawn(1, 1.0)).measure(UNITS).isnan().all()
        assert observed([]).measure(UNITS).isnan().all()
        broken = drawn(4, 1.0)
        broken[1][0][0] = math.inf
        assert observed(broken).measure(UNITS).isnan().tolist() == [True, True, False]

    def test_a_step_without_a_gradient_is_no_step_of_that_weight(self) -> None:
        steps: list[list[Tensor | None]] = [list(gradients) for gradients in drawn(9, 1.0)]
        steps[0][2] = steps[5][2] = steps[6][1] = None
        found = observed(steps).measure(UNITS).tolist()
        assert found == pytest.approx([expected(steps, unit.watched) for unit in UNITS], rel=1e-4)

    def test_a_sparse_gradient_is_what_it_is_in_full(self) -> None:
        generator = torch.Generator().manual_seed(0)
        steps: list[list[Tensor]] = []
        weight = nn.Parameter(torch.randn(6, 3, generator=generator))
        signal, unit = GradientVarianceSignal([weight]), Unit(number=0, watched=(0,), end=0)
        for _ in range(7):
            weight.grad = None
            rows = torch.randint(5, (4,), generator=generator)  # the last row never has a gradient
            nn.functional.embedding(rows, weight, sparse=True).pow(3).sum().backward()
            assert weight.grad is not None
            steps.append([weight.grad.to_dense()])
            signal.observe([unit], None, None)
        assert float(signal.measure([unit])) == pytest.approx(expected(steps, (0,)), rel=1e-4)

    def test_a_measurement_frees_what_was_summed(self) -> None:
        signal = observed(drawn(3, 1.0))
        signal.measured()
        assert signal.state_dict() == {"means": {}, "squares": {}, "steps": {}}

    @pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
    @pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
    def test_in_training_it_covers_the_interval(self, cls: Any, options: dict[str, Any]) -> None:
        """Measured at 2 + 4 of steps 3 to 6, and at 10 of 7 to 10; at 2 the steps before are forgotten."""
        model = conv_model()
        settings = Settings(rule="gradient_variance", rule_start_itr=2, rule_interval=4, rule_noise=1.0)
        optimizer = cls(model.parameters(), lr=1e-3, settings=settings, **options)
        told: list[tuple[int, float]] = []
        optimizer.gradskip.on_measured.append(lambda unit, number: told.append((unit.number, number)))
        steps: list[list[Tensor]] = []
        for x, y in conv_batches(11):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            steps.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()
        assert [number for number, _ in told[:3]] == [0, 4, 7]
        assert [value for _, value in told[:3]] == pytest.approx(
            [expected(steps[3:7], (number,)) for number in (0, 4, 7)], rel=1e-4
        )
        assert told[3:]
        assert [value for _, value in told[3:]] == pytest.approx(
            [expected(steps[7:11], (number,)) for number, _ in told[3:]], rel=1e-4
        )


class TestGradScaler:
    @pytest.mark.parametrize("unscale", [False, True])
    @pytest.mark.parametrize("fused", [False, True])
    def test_skipped_steps_are_no_steps_and_the_scale_has_no_effect(self, fused: bool, unscale: bool) -> None:
        """Against plain training without a scaler over the batches that are not skipped."""
        told: list[list[float]] = []
        for scaled in (False, True):
            model = conv_model()
            settings = Settings(rule="gradient_variance", rule_start_itr=1, rule_interval=4)
            optimizer = SGD(model.parameters(), lr=0.01, fused=fused, settings=settings)
            measured: list[float] = []
            optimizer.gradskip.on_measured.append(lambda _, number, measured=measured: measured.append(number))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6, enabled=scaled)
            for step, (x, y) in enumerate(conv_batches(9)):
                bad = step in (2, 3, 4, 7)  # the first of the interval, and one in it
                if bad and not scaled:
                    continue
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss * torch.inf if bad else loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            measured_before = list(measured)
            assert len(measured_before) == 0  # five steps so far: iterations 0 to 4
            for x, y in list(conv_batches(11))[9:]:
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            assert optimizer.gradskip.iteration == 7
            told.append(measured)
        assert len(told[0]) == 3
        assert told[1] == pytest.approx(told[0], rel=1e-3)

    def test_a_run_of_skipped_steps_alone_is_nan_and_goes_on(self) -> None:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        signal, steps = GradientVarianceSignal(parameters), drawn(6, 1.0)
        for t, gradients in enumerate(steps):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * 8 if t >= 2 else torch.full_like(gradient, torch.nan)
            signal.observe(UNITS, torch.tensor(8.0), torch.tensor([1.0 if t < 2 else 0.0]))
            if t == 1:
                assert signal.measure(UNITS).isnan().all()
        assert signal.measure(UNITS).tolist() == pytest.approx(
            [expected(steps[2:], u.watched) for u in UNITS], rel=1e-4
        )

    def test_a_state_in_the_midst_of_skipped_steps_goes_on_bit_for_bit(self) -> None:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        whole, parts = GradientVarianceSignal(parameters), GradientVarianceSignal(parameters)
        for t, gradients in enumerate(drawn(7, 1.0)):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for signal in (whole, parts):
                signal.observe(UNITS, None, torch.tensor([float(t in (0, 4))]))
            state = copy.deepcopy(parts.state_dict())
            parts = GradientVarianceSignal(parameters)
            parts.load_state_dict(state)
        assert torch.equal(whole.measure(UNITS), parts.measure(UNITS))


class TestRule:
    def test_decisions_of_a_sequence(self) -> None:
        """Front layers at or above the threshold stop together; NaN stops none, and the last layer is not asked."""
        settings = Settings(rule="gradient_variance", rule_start_itr=10, rule_interval=5, rule_noise=0.9)
        rule = make_rule(settings, [0, 2, 5, 8], stoppable=3)
        noise: dict[int, dict[int, float]] = {
            15: {0: 0.89, 2: 1.0, 5: 1.0},  # the front layer is below
            20: {0: math.nan, 2: 1.0, 5: 1.0},
            25: {0: 0.9, 2: 0.95, 5: 0.5},
            30: {5: 0.8},
            35: {5: 1.05},
        }
        found = {}
        for iteration in range(50):
            due = rule.next_due(iteration)
            asked: list[int] = []

            def signal(layer: int, now: int = iteration, asked: list[int] = asked) -> float:
                asked.append(layer)
                return noise[now][layer]

            decision = rule.decide(iteration, signal)
            assert not asked or due == iteration
            if decision is not None:
                found[iteration] = (decision.layer, decision.ratio, decision.rule)
        assert found == {25: (2, 0.95, "gradient_variance"), 35: (5, 1.05, "gradient_variance")}
        assert rule.first_stop() == 15

    def test_a_saved_rule_goes_on_with_its_layer(self) -> None:
        settings = Settings(rule="gradient_variance", rule_interval=2, rule_noise=0.5)
        rule, resumed = make_rule(settings, [0, 2, 5]), make_rule(settings, [0, 2, 5])
        rule.decide(2, {0: 0.6, 2: 0.1}.__getitem__)
        resumed.load_state_dict(rule.state_dict())
        decision = resumed.decide(4, {2: 0.7, 5: 0.2}.__getitem__)
        assert decision is not None
        assert (decision.layer, decision.ratio) == (2, 0.7)

    def test_an_event_tells_the_noise(self) -> None:
        model = conv_model()
        settings = Settings(rule="gradient_variance", rule_interval=5, rule_noise=0.2)
        optimizer = SGD(model.parameters(), lr=0.01, settings=settings)
        train(model, optimizer, 6)
        event = optimizer.gradskip.events[0]
        assert (event.iteration, event.rule) == (5, "gradient_variance")
        assert event.ratio is not None
        assert event.ratio >= 0.2

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"rule_interval": 1}, "CAC_RULE_INTERVAL must be at least 2 with CAC_RULE=gradient_variance, since one "
             "step has no variance, got 1"),
            ({"rule_noise": 0.0}, r"CAC_RULE_NOISE must be in \(0, 1\], got 0.0"),
            ({"rule_noise": 1.5}, r"CAC_RULE_NOISE must be in \(0, 1\], got 1.5"),
        ],
    )  # fmt: skip
    def test_bad_settings(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            Settings(rule="gradient_variance", **values)
