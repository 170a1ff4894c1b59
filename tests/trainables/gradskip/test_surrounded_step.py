"""The step with Gradient-Skip around it: compiled, raising, nested, scheduled, and what stays as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import DecayInside, equal, train, weights

from trainables.gradskip import SGD, AdamW, Settings, wrap

BRAKING = Settings(stop_layer_num=(3,), stop_layer_itr=(1,), braking_distance=4)


pytestmark = pytest.mark.usefixtures("quiet")


class TestCompiledStep:
    @pytest.mark.thorough
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "settings",
        [
            BRAKING,
            Settings(rule="freezeout", rule_end_itr=12),
            Settings(start_itr=0, samples=2, start_thr=1.0, slope_thr=1.0, mt_thr=1.0),
            Settings(rule="gradient_norm", rule_interval=3, rule_percentile=80),
        ],
        ids=lambda settings: settings.mode,
    )
    @pytest.mark.parametrize(
        ("around", "cls"),
        [("a function", AdamW), ("step", SGD), ("step", AdamW), ("a function", SGD)],
    )
    def test_every_rule_is_what_it_is_uncompiled(self, settings: Settings, around: str, cls: Any) -> None:
        torch._dynamo.reset()
        ours, plain = conv_model(), conv_model()
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 2.0, "settings": settings}
        if cls is AdamW:  # compiled, its sums round otherwise, and without this it divides by the rounding
            options["eps"] = 1e-2
        optimizer, other = cls(ours.parameters(), **options), cls(plain.parameters(), **options)
        if around == "step":
            compiled = torch.compile(optimizer.step, backend="eager")
        else:

            @torch.compile(backend="eager")
            def compiled() -> None:
                optimizer.step()

        train(plain, other, 12)

        class Compiled:
            zero_grad = staticmethod(optimizer.zero_grad)
            step = staticmethod(compiled)

        train(ours, Compiled(), 12)  # type: ignore[arg-type]
        events = [(event.iteration, event.layer) for event in optimizer.gradskip.events]
        assert events == [(event.iteration, event.layer) for event in other.gradskip.events] != []
        for a, b in zip(weights(ours), weights(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

    def test_the_step_inside_is_compiled(self) -> None:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()
        model = conv_model()
        optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(start_thr=-1))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.compile(optimizer.step, backend=counter)()
        assert counter.op_count > 0


class TestAStepThatRaises:
    @pytest.mark.parametrize("kind", ["torch", "other"])
    @pytest.mark.parametrize("stopped", [False, True])
    def test_leaves_the_users_groups_to_the_user(self, kind: str, stopped: bool) -> None:
        """Halving the learning rate after an out-of-memory error, while a layer brakes or has stopped."""
        model = conv_model()
        optimizer: Any = (
            SGD(model.parameters(), lr=0.1, settings=BRAKING)
            if kind == "torch"
            else wrap(DecayInside(model.parameters()), BRAKING)
        )
        train(model, optimizer, 7 if stopped else 2)
        groups = optimizer.param_groups
        before = weights(model)

        def failing() -> Any:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(failing)
        assert optimizer.param_groups is groups
        assert len(groups[0]["params"]) == 11
        rate = groups[0]["lr"]
        optimizer.param_groups[0]["lr"] *= 0.5
        train(model, optimizer, 1, start=8)
        assert optimizer.param_groups[0]["lr"] == rate * 0.5
        assert not equal(before, weights(model))

    def test_a_stop_that_it_had_decided_holds(self) -> None:
        model = conv_model()
        optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(3,), stop_layer_itr=(0,)))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert optimizer.gradskip.stopped == (0, 1, 2, 3)
        assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 7


class TestWhatIsAround:
    def test_a_scheduler_before_or_after_sees_its_step(self, recwarn: pytest.WarningsRecorder) -> None:
        warnings.simplefilter("always")
        for order in ("scheduler first", "wrapped first"):
            model = conv_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            if order == "scheduler first":
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                wrap(optimizer, Settings(stop_layer_num=(3,), stop_layer_itr=(0,)))
            else:
                wrap(optimizer, Settings(stop_layer_num=(3,), stop_layer_itr=(0,)))
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            train(model, optimizer, 2)
            schedule.step()
            assert optimizer.gradskip.iteration == 2
            assert optimizer.gradskip.stopped == (0, 1, 2, 3)
        assert not [w for w in recwarn if "scheduler" in str(w.message)]

    @pytest.mark.parametrize("groups", [1, 2])
    def test_groups_are_whole_between_steps_and_hold_what_moves_in_them(self, groups: int) -> None:
        model = conv_model()
        parameters = list(model.parameters())
        parts = [{"params": parameters[i::groups]} for i in range(groups)]
        lists = [part["params"] for part in parts]
        optimizer = SGD(parts, lr=0.1, settings=Settings(stop_layer_num=(3,), stop_layer_itr=(0,)), model=model)
        held = [group["params"] for group in optimizer.param_groups]
        seen: list[int] = []
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(sum(len(g["params"]) for g in o.param_groups)))
        train(model, optimizer, 3)
        assert seen == [11, 7, 7]
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(part) for part in lists]
        assert all(a is group["params"] for a, group in zip(held, optimizer.param_groups, strict=True))
        assert optimizer.state_dict()["param_groups"][0]["params"] == list(range(len(lists[0])))

    def test_a_state_dict_asked_for_while_a_layer_brakes_lets_it_brake(self) -> None:
        results = []
        for asks in (False, True):
            model = conv_model()
            optimizer = SGD(model.parameters(), lr=0.1, settings=BRAKING)
            if asks:
                optimizer.register_step_pre_hook(lambda o, *_: o.state_dict() and None)
            train(model, optimizer, 8)
            results.append(weights(model))
        assert equal(*results)

    def test_a_state_dict_asked_for_within_a_step_is_whole(self) -> None:
        model = conv_model()
        optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(stop_layer_num=(3,), stop_layer_itr=(0,)))
        seen: list[int] = []
        optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.state_dict()["param_groups"][0]["params"])))
        train(model, optimizer, 3)
        assert seen == [11, 11, 11]
