"""What training loops do around an optimizer: accumulation, scaling, clipping, compiling, checkpointing, averages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import equal, train, weights
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from trainables.gradskip import SGD, AdamW, Settings

MANUAL = Settings(stop_layer_num=(3, 6), stop_layer_itr=(3, 8))


#: Strong weight decay shrinks weights from the first step on, so that each target stops one interval after its peak.
AUTO = Settings(start_itr=2, samples=3, start_thr=1.0, slope_thr=1.0, mt_thr=1.0, braking_distance=2)


SHRINKING = {"lr": 0.02, "weight_decay": 2.0}


class TestClosures:
    @pytest.mark.parametrize("cls", [SGD, AdamW])
    def test_a_closure_does_what_the_plain_loop_does(self, cls: Any) -> None:
        plain, closed = conv_model(), conv_model()
        one = cls(plain.parameters(), **SHRINKING, settings=AUTO)
        other = cls(closed.parameters(), **SHRINKING, settings=AUTO)
        train(plain, one, 12)
        for x, y in conv_batches(12):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                other.zero_grad()
                loss = nn.functional.cross_entropy(closed(x), y)
                loss.backward()
                return loss

            assert isinstance(other.step(closure), Tensor)
        assert equal(weights(plain), weights(closed))
        assert one.gradskip.events == other.gradskip.events
        assert len(one.gradskip.events) == 2


class Overflows:
    """Multiplies the loss by infinity at given steps, as half precision may."""

    def __init__(self, at: set[int]) -> None:
        self.at = at

    def __call__(self, step: int, loss: Tensor) -> Tensor:
        return loss * torch.inf if step in self.at else loss


class TestGradScaler:
    @pytest.mark.parametrize("cls", [SGD, AdamW])
    def test_a_step_skipped_for_infinities_is_no_iteration(self, cls: Any) -> None:
        """Equal to a run without the scaler that never saw the skipped batches."""
        overflows = Overflows({0, 4, 5, 9, 11})
        scaled, plain = conv_model(), conv_model()
        options = {**SHRINKING, "settings": AUTO}
        one, other = cls(scaled.parameters(), **options), cls(plain.parameters(), **options)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**6, backoff_factor=0.5)
        for step, (x, y) in enumerate(conv_batches(18)):
            # Batch norm's running statistics see a skipped batch; they do not enter training.
            one.zero_grad()
            scaler.scale(overflows(step, nn.functional.cross_entropy(scaled(x), y))).backward()
            scaler.step(one)
            scaler.update()
            if step not in overflows.at:
                other.zero_grad()
                nn.functional.cross_entropy(plain(x), y).backward()
                other.step()
        assert one.gradskip.iteration == other.gradskip.iteration == 13
        assert [(e.iteration, e.layer, e.rule) for e in one.gradskip.events] == [
            (e.iteration, e.layer, e.rule) for e in other.gradskip.events
        ]
        assert len(one.gradskip.events) == 3
        for a, b in zip(weights(scaled), weights(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


class Checkpointed(nn.Module):
    """A plain stem and two checkpointed parts; the last one plain where reentrant ones would lose every gradient."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        layers = list(conv_model())
        self.stem, self.first, self.second = layers[0], nn.Sequential(*layers[1:5]), nn.Sequential(*layers[5:])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, self.stem(x), use_reentrant=self.use_reentrant)
        return self.second(x) if self.use_reentrant else checkpoint(self.second, x, use_reentrant=False)


class TestActivationCheckpointing:
    def test_does_what_the_plain_model_does(self) -> None:
        plain, checkpointed = conv_model(), Checkpointed(use_reentrant=False)
        settings = Settings(stop_layer_num=(1, 6), stop_layer_itr=(2, 5), braking_distance=2)
        train(plain, SGD(plain.parameters(), lr=0.1, momentum=0.9, settings=settings), 10)
        optimizer = SGD(checkpointed.parameters(), lr=0.1, momentum=0.9, settings=settings, model=checkpointed)
        train(checkpointed, optimizer, 10)
        assert equal(weights(plain), weights(checkpointed))

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
    def test_the_reentrant_one_loses_gradients_and_is_named(self) -> None:
        model = Checkpointed(use_reentrant=True)
        settings = Settings(stop_layer_num=(1,), stop_layer_itr=(2,))  # the stem, so that nothing before the first
        optimizer = SGD(model.named_parameters(), lr=0.1, settings=settings)  # checkpoint needs a gradient any more
        train(model, optimizer, 3)
        with pytest.warns(UserWarning, match=r"first.0.weight and 4 more had a gradient .* Reentrant activation"):
            train(model, optimizer, 1, start=3)


class TestCompile:
    @pytest.mark.thorough
    @pytest.mark.slow
    @pytest.mark.parametrize("evaluate", [False, True])
    @pytest.mark.parametrize(
        "more",
        [{}, {"whole_units": True}, {"norm_statistics": "hold"}, {"prefix_autograd": False}],
        ids=lambda more: next(iter(more), "default"),
    )
    def test_each_new_set_of_stopped_layers_costs_one_recompilation(self, more: dict[str, Any], evaluate: bool) -> None:
        """Compilations counted by the backend; evaluation between steps; the same weights as uncompiled."""
        from functorch.compile import make_boxed_func  # seconds, and this test alone needs it
        from torch._dynamo.backends.common import aot_autograd

        graphs: list[int] = []
        evaluations: list[int] = []

        def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(1)
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        plain, compiled_inner = conv_model(), conv_model()
        settings = Settings(stop_layer_num=(3, 6, 8), stop_layer_itr=(2, 4, 9), braking_distance=2, **more)
        theirs = SGD(plain.parameters(), lr=0.05, momentum=0.9, settings=settings, model=plain)
        compiled: Any = torch.compile(compiled_inner, backend=aot_autograd(fw_compiler=count))
        ours = SGD(compiled_inner.parameters(), lr=0.05, momentum=0.9, settings=settings, model=compiled)
        seen: list[int] = []

        def each(_: int) -> None:
            seen.append(len(graphs))
            if evaluate:
                compiled_inner.eval()
                with torch.no_grad():
                    compiled(torch.ones(2, 1, 8, 8))
                compiled_inner.train()
                evaluations.append(len(graphs) - seen[-1])

        train(plain, theirs, 14)
        train(compiled, ours, 14, each=each)
        # Stops take effect after steps 3, 5 and 10 (braking 2); the step after each compiles forward and backward anew,
        # and so does the next evaluation, one graph.
        news = [later - earlier for earlier, later in pairwise([0, *seen])]
        trainings = [new - (evaluations[step - 1] if step and evaluate else 0) for step, new in enumerate(news)]
        assert trainings == [2 if step in (0, 4, 6, 11) else 0 for step in range(14)]
        if evaluate:
            assert [step for step, new in enumerate(evaluations) if new] == [0, 3, 5, 10]
            assert max(evaluations) == 1
        assert [(e.iteration, e.layer) for e in ours.gradskip.events] == [(2, 3), (4, 6), (9, 8)]
        for a, b in zip(weights(plain), weights(compiled_inner), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

    @pytest.mark.thorough
    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["inner given", "compiled in place"])
    def test_a_model_whose_forward_is_hidden_is_named_at_the_first_stop(self, how: str) -> None:
        torch._dynamo.reset()
        model = conv_model()
        called: Any = model
        if how == "compiled in place":
            model.compile(backend="eager")
        else:
            called = torch.compile(model, backend="eager")
        settings = Settings(stop_layer_num=(3,), stop_layer_itr=(2,), whole_units=True)
        optimizer = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        with pytest.warns(UserWarning, match="the execution order of the layers was never seen"):
            train(called, optimizer, 4)
        assert optimizer.gradskip.left_upstream() == []
