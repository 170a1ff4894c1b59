"""Warnings of a gradient-skip optimizer: at the user's line, once, and never to set a setting that is on."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_models import LateNorms, conv_batches, conv_model
from loops import train
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.gradskip import SGD, Settings, wrap
from trainables.gradskip.advice.advice import Advice


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
            "CAC_WHOLE_UNITS=1 stops layers with their norms in execution order, CAC_PREFIX_AUTOGRAD=0 stops whatever "
            "is left"
        )
        assert warned(Settings(**STOP, whole_units=True)) == []
        assert warned(Settings(**STOP, prefix_autograd=False)) == []

    @pytest.mark.parametrize(
        ("whole_units", "prefix_autograd"), [(False, True), (True, True), (False, False), (True, False)]
    )
    def test_never_what_is_on(self, whole_units: bool, prefix_autograd: bool) -> None:
        advice = Advice(Settings(whole_units=whole_units, prefix_autograd=prefix_autograd))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            advice.left_upstream(["a"], [])
            advice.input_needs_gradient("the input of b")
            advice.woken("c")
        left, fed, _ = (str(warning.message) for warning in said)
        assert ("CAC_WHOLE_UNITS" in left) == (not whole_units)
        assert ("CAC_PREFIX_AUTOGRAD" in left) == ("CAC_PREFIX_AUTOGRAD" in fed) == prefix_autograd

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


def test_a_model_compiled_in_place_is_warned_of_recompilations() -> None:
    model = nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(5)])
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"5 layers may stop one by one.*recompile_limit is 8"):
        SGD(model.parameters(), lr=0.1, weight_decay=0.1, settings=Settings(), model=model)


class TestInputsThatNeedAGradient:
    def backward_flops(self, model: nn.Module, x: Tensor) -> int:
        loss = model(x).square().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return int(counter.get_total_flops())

    def run(self, *, prefix_autograd: bool, adversarial: bool = True) -> tuple[nn.Module, list[str]]:
        """A training whose inputs need a gradient, stopped through the second convolution."""
        model = conv_model()
        settings = Settings(stop_layer_num=(6,), stop_layer_itr=(1,), prefix_autograd=prefix_autograd)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for x, y in conv_batches(6):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.requires_grad_(adversarial)), y).backward()
                optimizer.step()
        return model, [str(warning.message) for warning in said]

    def test_they_are_named_and_the_setting_mends_it(self) -> None:
        model, said = self.run(prefix_autograd=True)
        assert said == [
            "the input of 0 requires a gradient though nothing trains before it, so the backward pass runs on through "
            "stopped layers and part of the saving is lost. If that gradient is of no use to you, "
            "CAC_PREFIX_AUTOGRAD=0 cuts it off there"
        ]
        x = next(conv_batches(1))[0]
        plain = self.backward_flops(model, x)
        assert self.backward_flops(model, x.clone().requires_grad_(True)) > plain
        mended, said = self.run(prefix_autograd=False)
        assert said == []
        assert self.backward_flops(mended, x.clone().requires_grad_(True)) == plain

    def test_a_generator_that_needs_the_gradient_is_no_reason_to_warn(self) -> None:
        """Behind a discriminator whose layers have stopped; the advice would stop the generator, too."""
        generator, model = nn.Conv2d(1, 1, 1), conv_model()
        settings = Settings(stop_layer_num=(6,), stop_layer_itr=(1,))
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for x, y in conv_batches(5):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(generator(x)), y).backward()
                optimizer.step()
        assert generator.weight.grad is not None

    @pytest.mark.slow
    def test_the_check_of_an_optimizer_that_is_gone_removes_itself(self) -> None:
        model = conv_model()
        for _ in range(3):
            settings = Settings(stop_layer_num=(3,), stop_layer_itr=(1,))
            optimizer = SGD(model.requires_grad_(True).parameters(), lr=0.1, settings=settings, model=model)
            train(model, optimizer, 2)
            del optimizer
            gc.collect()
        model(torch.ones(2, 1, 8, 8))
        assert not any(m._forward_hooks for m in model.modules())

    def test_of_a_compiled_model(self) -> None:
        torch._dynamo.reset()
        model = conv_model()
        compiled: Any = torch.compile(model, backend="eager")
        settings = Settings(stop_layer_num=(6,), stop_layer_itr=(1,))
        optimizer = SGD(
            model.parameters(), lr=0.1, settings=settings, model=compiled, example_inputs=torch.ones(2, 1, 8, 8)
        )

        def run() -> None:
            for x, y in conv_batches(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(compiled(x.requires_grad_(True)), y).backward()
                optimizer.step()

        with pytest.warns(UserWarning, match="the input of the model requires a gradient"):
            run()
