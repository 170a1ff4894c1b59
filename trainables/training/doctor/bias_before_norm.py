"""Layers with a bias directly before a batch norm, which subtracts it again with the batch's mean.

Shapes: x (B, C, ...) a layer's output without its bias b (C,); a batch norm in training mode gives the same for x and
x + b, and in evaluation mode with a running mean m the same for (x + b, m) and (x, m - b).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.runtime.generators import kept_generators
from trainables.training.doctor.model_calls import ModelCall

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Dimensions of a batched output of a layer, by the end of its class's name; a linear layer's must be (B, C).
_DIMENSIONS = {"1d": 3, "2d": 4, "3d": 5}

StateConverter = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def biases_before_norms(model: nn.Module, call: ModelCall) -> dict[str, str]:
    """Return the layers whose bias is without effect in training, each with the norm behind it, by name.

    The model is traced (torch.fx); where it cannot be, neighbours in an nn.Sequential are found. Only biases are
    returned of which nothing else can depend: the layer and the norm run once in a pass, on each other's output, the
    bias is no other module's, and the norm takes the batch's statistics in training.

    Args:
        model: not changed.
        call: arguments of one forward pass.
    """
    model = copy.deepcopy(model).train()
    candidates = _traced(model)
    if candidates is None:
        candidates = _neighbours(model)
    if not candidates:
        return {}
    hooked = {name: bool(model.get_submodule(name)._forward_hooks) for name in candidates}
    calls = _one_pass(model, call)
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {}
    for name, norm_name in candidates.items():
        layer, norm = model.get_submodule(name), model.get_submodule(norm_name)
        alone = calls.count[layer] == calls.count[norm] == 1 and shared[id(layer.bias)] == 1
        output: Any = calls.output.get(layer)
        follows = isinstance(output, Tensor) and calls.input.get(norm) is output and not hooked[name]
        if alone and follows and norm.training and _same_channels(layer, output):
            found[name] = norm_name
    return found


def _has_bias(module: Any) -> bool:
    return isinstance(module, (*_CONVOLUTIONS, nn.Linear)) and isinstance(module.bias, nn.Parameter)


def _traced(model: nn.Module) -> dict[str, str] | None:
    """Return pairs by the traced graph; None where the model cannot be traced."""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception:  # noqa: BLE001  # control flow that depends on values, and whatever else a model does
        return None
    modules = dict(model.named_modules())
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    found = {}
    for node in graph.nodes:
        if node.op != "call_module" or not _has_bias(modules.get(str(node.target))):
            continue
        users = list(node.users)
        if len(users) != 1 or users[0].op != "call_module" or f"{node.target}.bias" in read:
            continue
        if isinstance(modules[str(users[0].target)], _BatchNorm):
            found[str(node.target)] = str(users[0].target)
    return found


def _neighbours(model: nn.Module) -> dict[str, str]:
    """Return pairs of neighbours in an nn.Sequential that runs its modules one after the other."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            continue
        children = list(module.named_children())
        for (first_name, first), (second_name, second) in pairwise(children):
            if _has_bias(first) and isinstance(second, _BatchNorm):
                beginning = f"{name}." if name else ""
                found[f"{beginning}{first_name}"] = f"{beginning}{second_name}"
    return found


@dataclass
class _Calls:
    """Inputs, outputs and number of calls of each module in a forward pass."""

    count: Counter[nn.Module] = field(default_factory=Counter)
    input: dict[nn.Module, Any] = field(default_factory=dict)
    output: dict[nn.Module, Any] = field(default_factory=dict)


def _one_pass(model: nn.Module, call: ModelCall) -> _Calls:
    """Run a forward pass and return what each module did."""
    calls = _Calls()

    def note(module: nn.Module, given: Any, output: Any) -> None:
        calls.count[module] += 1
        calls.input[module], calls.output[module] = given[0] if given else None, output

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
        call(model)
    for handle in handles:
        handle.remove()
    return calls


def _same_channels(layer: nn.Module, output: Tensor) -> bool:
    """Return whether the bias adds to the dimension that the norm treats: the second one of its input."""
    return output.dim() == _DIMENSIONS.get(type(layer).__name__[-2:], 2)


def without_biases(model: nn.Module, pairs: Mapping[str, str]) -> tuple[nn.Module, StateConverter]:
    """Return a copy of a model without these biases, and a function that converts states of the model to its own.

    Args:
        model: not changed.
        pairs: of `biases_before_norms`.
    """
    mended = copy.deepcopy(model)

    def converted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(state)
        for layer, norm in pairs.items():
            bias = found.pop(f"{layer}.bias")
            mean = f"{norm}.running_mean"
            if found.get(mean) is not None:
                found[mean] = found[mean] - bias
        return found

    state = converted(mended.state_dict())
    for layer in pairs:
        mended.get_submodule(layer).register_parameter("bias", None)
    mended.load_state_dict(state)
    return mended, converted


def renumbered(model: nn.Module, pairs: Mapping[str, str]) -> dict[int, int]:
    """Return the new number of each parameter that stays, by its old one; `CAC_STOP_LAYER_NUM` takes these numbers."""
    gone = {f"{layer}.bias" for layer in pairs}
    names = [name for name, _ in model.named_parameters()]
    kept = [number for number, name in enumerate(names) if name not in gone]
    return {old: new for new, old in enumerate(kept)}
