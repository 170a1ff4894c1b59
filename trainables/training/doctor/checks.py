"""The single findings of the doctor: each looks for one thing, measures what it costs, and says how to mend it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.runtime.generators import kept_generators
from trainables.training.doctor.bias_before_norm import biases_before_norms, renumbered, without_biases
from trainables.training.doctor.findings import Finding, percent, ratios
from trainables.training.doctor.model_calls import ModelCall
from trainables.training.doctor.step_watch import StepWatch
from trainables.training.recipe.recipe import with_kernels

#: Share of a step that waiting for data may take without a finding.
WAITING = 0.1
#: Share of an optimizer's step that other kernels must save to be a finding.
FASTER = 0.1
#: Largest difference of outputs with and without a bias, relative to the largest output: float32's rounding.
CLOSE = 1e-3


def data_parallel(model: nn.Module) -> Iterator[Finding]:
    """Find nn.DataParallel."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        yield Finding(
            name="data-parallel",
            what="nn.DataParallel copies the model to every GPU in each step and runs all of them from one process",
            cost="not measured: it needs several GPUs",
            mend=("torch.nn.parallel.DistributedDataParallel(model), one process a GPU, started by torchrun",),
        )


def matmul_precision(model: nn.Module, call: ModelCall | None, device: torch.device) -> Iterator[Finding]:
    """Find float32 products without tensor cores on a GPU that has them for float32 (Ampere and newer)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return
    if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled("cuda"):
        return
    cost = "not measured: no batch was given"
    if call is not None:
        trained = copy.deepcopy(model).train()

        def with_tensor_cores() -> None:
            torch.set_float32_matmul_precision("high")
            try:
                forward_and_backward(trained, call)
            finally:
                torch.set_float32_matmul_precision("highest")

        cost = ratios(with_tensor_cores, lambda: forward_and_backward(trained, call), device).text(
            "forward and backward"
        )
    yield Finding(
        name="float32-without-tensor-cores",
        what="matrix products run in full float32, though this GPU's tensor cores multiply TF32",
        cost=cost,
        mend=('torch.set_float32_matmul_precision("high")', "or torch.autocast with bfloat16"),
    )


def of_model(model: nn.Module, call: ModelCall | None, device: torch.device) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings on a model by itself, and its superfluous biases (`biases_before_norms`).

    Args:
        model: not changed.
        call: arguments of one forward pass, if they are known.
        device: of the model.
    """
    findings = [*data_parallel(model), *matmul_precision(model, call, device)]
    pairs = {} if call is None else biases_before_norms(model, call)
    if call is None or not pairs:
        return findings, {}
    mended, _ = without_biases(model, pairs)
    difference = output_difference(model, mended, call)
    if not difference <= CLOSE:  # something depends on a bias after all
        return findings, {}
    return [*findings, superfluous_biases(model, mended, pairs, difference, call, device)], pairs


def of_networks(
    networks: Mapping[nn.Module, ModelCall | None], device: torch.device
) -> tuple[list[Finding], dict[nn.Module, dict[str, str]]]:
    """Return the findings on each of the networks that are trained together, and its superfluous biases."""
    findings, pairs = [], {}
    for network, call in networks.items():
        found, pairs[network] = of_model(network, call, device)
        which = f"in {type(network).__name__}, " if len(networks) > 1 else ""
        findings += [replace(finding, what=f"{which}{finding.what}") for finding in found]
    return findings, pairs


def superfluous_biases(
    model: nn.Module, mended: nn.Module, pairs: Mapping[str, str], difference: float, call: ModelCall,
    device: torch.device,
) -> Finding:  # fmt: skip
    """Report biases before batch norms.

    Args:
        model: not changed.
        mended: the same without these biases.
        pairs: their layers, and the norm behind each.
        difference: of the outputs of both (`output_difference`).
        call: arguments of one forward pass.
        device: of the model.
    """
    plain, fixed = copy.deepcopy(model).train(), mended.train()
    measured = ratios(lambda: forward_and_backward(fixed, call), lambda: forward_and_backward(plain, call), device)
    elements = sum(model.get_parameter(f"{name}.bias").numel() for name in pairs)
    moved = {old: new for old, new in renumbered(model, pairs).items() if old != new}
    first, last = next(iter(moved.items()), None), next(reversed(moved.items()), None)
    shift = () if first is None or last is None else (
        f"CAC_STOP_LAYER_NUM: later parameters get smaller numbers, such as {first[0]} becomes {first[1]} and "
        f"{last[0]} becomes {last[1]}",
    )  # fmt: skip
    return Finding(
        name="bias-before-batch-norm",
        what=f"{len(pairs)} {'layers have' if len(pairs) > 1 else 'layer has'} a bias that the batch norm behind "
        f"subtracts again: {elements:,} parameters with gradients and optimizer state without effect (outputs without "
        f"them differ by {difference:.1e} of the largest)",
        cost=measured.text("forward and backward"),
        mend=(
            *(
                f'{expression(model, name)}.register_parameter("bias", None)  # or built with bias=False'
                for name in pairs
            ),
            "a state that is trained already: tune_cac.doctor(..., fix=True) converts it (running mean minus bias)",
            *shift,
        ),
    )


def expression(model: nn.Module, name: str) -> str:
    """Return the Python expression of a module within ``model``, such as ``model.features[0]``."""
    text = "model"
    for part in name.split("."):
        indexed = isinstance(model, (nn.Sequential, nn.ModuleList)) and part.isdigit()
        text += f"[{part}]" if indexed else f".{part}" if part.isidentifier() else f'.get_submodule("{part}")'
        model = model.get_submodule(part)
    return text


def output_difference(model: nn.Module, mended: nn.Module, call: ModelCall) -> float:
    """Return the largest difference of outputs in training and evaluation mode, relative to the largest output."""
    worst = 0.0
    for mode in (True, False):
        outputs = []
        for one in (model, mended):
            trial = copy.deepcopy(one).train(mode)
            with torch.no_grad(), kept_generators(p.device for p in model.parameters()):
                outputs.append(_tensors(call(trial)))
        for first, second in zip(*outputs, strict=True):
            scale = float(first.abs().max()) or 1.0
            worst = max(worst, float((first - second).abs().max()) / scale)
    return worst


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.float()] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def forward_and_backward(model: nn.Module, call: ModelCall, *, set_to_none: bool = True) -> None:
    """Run a model forward and backward from the mean of its outputs."""
    total = sum((tensor.mean() for tensor in _tensors(call(model))), start=torch.zeros(()))
    if total.requires_grad:
        model.zero_grad(set_to_none=set_to_none)
        total.backward()


def slow_optimizer(optimizer: Optimizer, device: torch.device) -> Iterator[Finding]:
    """Find an optimizer that would be faster with one kernel a step, measured on copies of its parameters."""
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups) or not any(group["params"] for group in groups):
        return
    copies = {p: nn.Parameter(p.detach().clone()) for group in groups for p in group["params"]}
    for parameter in copies.values():
        parameter.grad = torch.ones_like(parameter)
    try:
        plain = with_kernels(optimizer, parameters=copies)
        fused = with_kernels(optimizer, fused=True, parameters=copies)
        measured = ratios(fused.step, plain.step, device)
    except (UserError, RuntimeError, TypeError, ValueError):  # no fused step for this class, device or dtype
        return
    if max(measured.values) > 1 - FASTER:
        return
    yield Finding(
        name="optimizer-on-the-slow-path",
        what=f"{type(optimizer).__name__} updates {len(copies)} parameters by several kernels each",
        cost=measured.text("an optimizer step"),
        mend=(f"torch.optim.{type(optimizer).__name__}(..., fused=True)",),
    )


def loading(loader: Iterable[Any] | None, share: float | None, on_gpu_machine: bool | None = None) -> Iterator[Finding]:
    """Find loaders that hold the step back.

    Args:
        loader: of the training, if it is known.
        share: measured share of a step that waits for the batch; None where it was not measured.
        on_gpu_machine: whether there is a GPU; None to look.
    """
    cost = "not measured" if share is None else f"{percent(share)} of a step waits for its batch here"
    if on_gpu_machine is None:
        on_gpu_machine = torch.cuda.is_available()
    if on_gpu_machine and isinstance(loader, DataLoader):
        if loader.num_workers == 0:
            yield Finding(
                name="loader-without-workers",
                what="batches are prepared in the training process, while the GPU waits",
                cost=cost,
                mend=("DataLoader(..., num_workers=2, persistent_workers=True)",),
            )
        if not loader.pin_memory:
            yield Finding(
                name="loader-without-pinned-memory",
                what="batches are copied to the GPU from pageable memory, so that no transfer overlaps the computation",
                cost=cost,
                mend=("DataLoader(..., pin_memory=True)", "batch.to(device, non_blocking=True)"),
            )
    if share is not None and share > WAITING:
        workers = f", with num_workers={loader.num_workers}" if isinstance(loader, DataLoader) else ""
        yield Finding(
            name="data-loading",
            what=f"the training waits for its data{workers}",
            cost=cost,
            mend=("more num_workers in the DataLoader, or data that is decoded once",),
        )


def zeroed_to_none(
    networks: Mapping[nn.Module, ModelCall | None], places: Mapping[str, int], device: torch.device
) -> Iterator[Finding]:
    """Report lines that set gradients to zero, and what it costs in all networks together."""
    if not places:
        return
    cost = "not measured: no batch was given"
    trained = [(copy.deepcopy(network).train(), call) for network, call in networks.items() if call is not None]
    if trained:

        def passes(*, set_to_none: bool) -> None:
            for network, call in trained:
                forward_and_backward(network, call, set_to_none=set_to_none)

        measured = ratios(lambda: passes(set_to_none=True), lambda: passes(set_to_none=False), device)
        cost = measured.text("forward and backward")
    yield Finding(
        name="gradients-set-to-zero",
        what=f"zero_grad(set_to_none=False) in {', '.join(places)}: each gradient is written, read and added to, where "
        "the first one could be kept as it is",
        cost=cost,
        mend=("optimizer.zero_grad()",),
    )


def waits(watch: StepWatch) -> Iterator[Finding]:
    """Report lines at which the host waits for the device in every watched step."""
    regular = {place: count for place, count in watch.waits.items() if len(watch.steps_of[place]) == watch.steps}
    if regular:
        listed = ", ".join(f"{place} ({count / watch.steps:g} a step)" for place, count in regular.items())
        yield Finding(
            name="host-waits-for-device",
            what=f"values are read in every step: {listed}; the host cannot prepare the next operations meanwhile",
            cost="not measured: what it costs depends on how far a GPU's queue is ahead; nothing on a CPU",
            mend=("keep sums on the device (total += loss.detach()) and read them once in many steps",),
        )


def clipping(watch: StepWatch) -> Iterator[Finding]:
    """Report lines that clip gradients while they are multiplied by a GradScaler's scale."""
    if watch.clipped_scaled:
        yield Finding(
            name="clipping-before-unscale",
            what=f"gradients are clipped before GradScaler.unscale_ in {', '.join(sorted(watch.clipped_scaled))}: the "
            "limit applies to gradients times the loss scale, so that nearly every step is cut short by another factor",
            cost="no time: it changes the training",
            mend=("scaler.unscale_(optimizer)  # before clipping",),
        )
