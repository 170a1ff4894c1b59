"""Canaries: what Gradient-Skip uses of torch without a promise. One that fails says which name torch has changed."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_models import conv_model
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import parametrizations, weight_norm
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

import trainables.gradskip

ROOT = Path(trainables.gradskip.__file__).parent
#: Names that begin with an underscore, looked up in something of torch's, and the test below that holds each, in words.
USED = {
    "_orig_mod": "a compiled model holds the one given",
    "_compiled_call_impl": "a model compiled in place says so",
    "_current_graph_task_id": "the backward pass has a number",
    "_get_current_dispatch_mode_stack": "dispatch modes are a stack",
    "_pop_mode": "dispatch modes are a stack",
    "_push_mode": "dispatch modes are a stack",
    "_mode_key": "a mode of torch's own has a key",
    "_python_dispatch": "dispatch modes are a stack",
    "_dynamo": "recompilations have a limit",
    "_parameters": "a module keeps what it has itself",
    "_buffers": "a module keeps what it has itself",
    "_modules": "a module keeps what it has itself",
    "_forward_pre_hooks": "a weight in the older form is known by its hook",
    "_version": "a change in place is counted",
    "_DropoutNd": "dropouts have one base",
    "_foreach_add_": "lists are added at once",
    "_foreach_norm": "lists are added at once",
    "_foreach_sub": "lists have factors of their own",
    "_foreach_mul": "lists have factors of their own",
    "_foreach_mul_": "lists have factors of their own",
    "_foreach_addcmul_": "lists have factors of their own",
    "_C": "the backward pass has a number",
    "_overloadpacket": "an operation knows its packet",
    "_opt_called": "a schedule notes a step",
    "_to_copy": "autocast converts a weight by one operation",
}
#: Python's own.
PYTHONS = {"_exit", "_fields", "_getframe", "_replace"}


def test_every_private_name_has_a_canary() -> None:
    """Private names after a dot or in an import, that are not attributes of our own objects."""
    found: dict[str, str] = {}
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        ours = set(re.findall(r"(?:self|cls)\.(_\w+)|def (_\w+)|^(_\w+)\b", text, re.M))
        own = {name for names in ours for name in names if name}
        imported = " ".join(re.findall(r"^from torch[\w.]* import (\([^)]*\)|.*)", text, re.M))
        asked = re.findall(r"(?:getattr|hasattr)\([^()]+, \"(_\w+)\"", text)
        for name in [*re.findall(r"\.(_[A-Za-z]\w*)", text), *re.findall(r"\b_\w+", imported), *asked]:
            if name not in own and not name.startswith("__"):
                found.setdefault(name, path.name)
    assert {name: where for name, where in found.items() if name not in {*USED, *PYTHONS}} == {}
    assert all(f"test_{text.replace(' ', '_').replace(chr(39), '')}" in globals() for text in USED.values())


def test_a_compiled_model_holds_the_one_given() -> None:
    model = conv_model()
    assert torch.compile(model, backend="eager")._orig_mod is model  # type: ignore[attr-defined]


def test_a_schedule_notes_a_step() -> None:
    """And warns of its own step before the optimizer's by that note, unless the optimizer's function has its mark."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not getattr(optimizer, "_opt_called", False)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_a_model_compiled_in_place_says_so() -> None:
    model = conv_model()
    assert model._compiled_call_impl is None
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None


def test_the_backward_pass_has_a_number() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    y.sum().backward()
    assert seen[0] >= 0
    assert torch._C._current_graph_task_id() == -1


def test_a_leafs_node_knows_its_variable() -> None:
    weight = nn.Parameter(torch.ones(2))
    node: Any = (weight * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node.variable is weight


def test_dispatch_modes_are_a_stack() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    first, second = Mode(), Mode()
    begin = list(_get_current_dispatch_mode_stack())
    _push_mode(first)
    with second:
        assert _get_current_dispatch_mode_stack() == [*begin, first, second]
    assert _pop_mode() is first
    assert _get_current_dispatch_mode_stack() == begin


def test_autocast_converts_a_weight_by_one_operation() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                seen.append(args[0].untyped_storage().data_ptr())
            return func(*args, **(kwargs or {}))

    layer = nn.Linear(3, 4)
    with Mode(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 3))
    assert layer.weight.untyped_storage().data_ptr() in seen


def test_a_mode_of_torchs_own_has_a_key() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert getattr(FakeTensorMode(), "_mode_key", None) is not None
    assert getattr(TorchDispatchMode(), "_mode_key", None) is None


def test_an_operation_knows_its_packet() -> None:
    assert torch.ops.aten.mm.default._overloadpacket is torch.ops.aten.mm


def test_recompilations_have_a_limit() -> None:
    assert int(torch._dynamo.config.recompile_limit) > 0


def test_a_module_keeps_what_it_has_itself() -> None:
    norm = nn.BatchNorm1d(2)
    assert list(norm._parameters) == ["weight", "bias"]
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(nn.Sequential(norm, norm)._modules) == ["0", "1"]


def test_a_weight_in_the_older_form_is_known_by_its_hook() -> None:
    from torch.nn.utils.weight_norm import WeightNorm

    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = weight_norm(nn.Linear(2, 2))
    (hook,) = layer._forward_pre_hooks.values()
    assert isinstance(hook, WeightNorm)
    assert hook.name == "weight"
    assert {"weight_g", "weight_v"} <= set(layer._parameters)


def test_a_parametrized_weight_is_in_a_container_of_its_own() -> None:
    layer: Any = parametrizations.weight_norm(nn.Linear(2, 2))
    assert [name for name, _ in layer.parametrizations.named_parameters()] == ["weight.original0", "weight.original1"]
    assert layer.parametrizations in list(layer.children())


def test_a_change_in_place_is_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = weight._version
    with torch.no_grad():
        weight.add_(1)
    assert weight._version > before


def test_dropouts_have_one_base() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, nn.modules.dropout._DropoutNd) for kind in kinds)


def test_lists_have_factors_of_their_own() -> None:
    """One a tensor, as numbers and as scalars on the device."""
    values, others = [torch.full((2,), 3.0), torch.full((3,), 5.0)], [torch.ones(2), torch.ones(3)]
    away = torch._foreach_sub(values, others)
    assert [float(t[0]) for t in away] == [2.0, 4.0]
    assert [float(t[0]) for t in torch._foreach_mul(away, [torch.tensor(0.5), torch.tensor(2.0)])] == [1.0, 8.0]
    torch._foreach_addcmul_(others, away, away, [1.0, 0.5])
    assert [float(t[0]) for t in others] == [5.0, 9.0]
    torch._foreach_mul_(away, [3.0, 0.5])
    assert [float(t[0]) for t in away] == [6.0, 2.0]


def test_lists_are_added_at_once() -> None:
    sums = [torch.ones(2), torch.zeros(3)]
    torch._foreach_add_(sums, [torch.ones(2), torch.ones(3)])
    assert [float(norm) for norm in torch._foreach_norm(sums)] == pytest.approx([8**0.5, 3**0.5])


def test_a_functions_forward_pass_has_the_frame_of_apply() -> None:
    import sys

    seen: list[Any] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            frame: Any = sys._getframe(0)
            while frame is not None:
                seen.append(frame.f_code)
                frame = frame.f_back
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    Double.apply(torch.ones(1, requires_grad=True))
    assert torch.autograd.Function.apply.__func__.__code__ in seen  # type: ignore[attr-defined]


def test_grad_scaler_gives_a_fused_optimizer_its_infinities_and_scale() -> None:
    seen: list[tuple[float, bool]] = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def look(o: Any, *_: Any) -> None:
        seen.append((float(o.__dict__["found_inf"]), "grad_scale" in o.__dict__))

    optimizer.register_step_pre_hook(look)
    scaler = GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [(0.0, True), (1.0, True)]
    assert "found_inf" not in optimizer.__dict__


def test_a_data_parallel_wrapper_has_what_is_built_anew() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    source = inspect.getsource(nn.parallel.DistributedDataParallel)
    for name in ("reducer", "logger", "require_backward_grad_sync", "static_graph", "process_group"):
        assert f"self.{name} = " in source, name
    state = PowerSGDState(None)
    assert state.error_dict == state.p_memory_dict == state.q_memory_dict == {}
    assert (state.iter, state.start_powerSGD_iter) == (0, 1000)
    assert "_forward_hooks" in nn.Module().__dict__


def test_a_step_of_torchs_own_is_known_by_what_it_wraps() -> None:
    """torch hooks a class's step when the first of it is built."""
    before = inspect.unwrap(torch.optim.SGD.step)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert inspect.unwrap(torch.optim.SGD.step) is before


def test_tensors_are_known_by_identity() -> None:
    from torch.utils.weak import WeakIdKeyDictionary

    known = WeakIdKeyDictionary()
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    known[first] = True
    assert first in known
    assert second not in known
    del first
    assert len(known) == 0


def test_a_step_on_the_object_is_the_one_that_is_called() -> None:
    """By schedulers, GradScaler and users alike; Gradient-Skip replaces it there."""
    import types

    called: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner = optimizer.step
    optimizer.step = types.MethodType(lambda o, *a, **k: (called.append("ours"), inner(*a, **k))[1], optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    GradScaler("cpu", enabled=False).step(optimizer)
    assert called == ["ours", "ours"]
