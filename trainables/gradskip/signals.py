"""Signals that rules use, measured on the real model: one number per layer.

Shapes: P parameters; a layer's weights w_1..w_n of any shape; B samples of a batch; F features of a sample.
Symbols: A (B, F) a layer's output on a batch; G = A A^T with rows of unit norm (B, B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradskip.replay import Unit
from trainables.gradskip.settings import Settings

#: A variance in half precision is rounded by up to 0.4 %, while thresholds are 1 or 2 % below 1.
_HALF = (torch.float16, torch.bfloat16)


class Signal:
    """Measurement of layers. It never waits for the device; the caller reads the number."""

    every_step = False  # whether `observe` must see every step
    together = False  # whether a decision uses all layers that still train, so that they are measured together

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def observe(self, units: Sequence[Unit], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Observe a step's gradients of the layers that still train."""

    def measure(self, units: Sequence[Unit]) -> Tensor:
        """Return the layers' signals, (len(units),), on the device."""
        raise NotImplementedError

    def measured(self) -> None:
        """Note that the rule needs no more measurements in this step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


def variance(weights: Sequence[Tensor], *, reference: bool = False) -> Tensor:
    """Return the unbiased variance of all elements of the weights together, a scalar.

    A sharded tensor is measured as a whole. Half precision is converted to float32 first, except with ``reference`` (as
    in the published code).
    """
    parts = [w.detach() for w in weights]
    if not reference:
        parts = [w.float() if w.dtype in _HALF else w for w in parts]
    joint = parts[0] if len(parts) == 1 else torch.cat([w.flatten() for w in parts])
    return whole(torch.var(joint))


def whole(value: Tensor) -> Tensor:
    """Return the value itself, gathered where it is a distributed tensor."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


class VarianceSignal(Signal):
    """Weight variance, as published."""

    def __init__(self, parameters: Sequence[Tensor], *, reference: bool) -> None:
        super().__init__(parameters)
        self._reference = reference

    def measure(self, units: Sequence[Unit]) -> Tensor:
        found = [variance([self._parameters[n] for n in u.watched], reference=self._reference) for u in units]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)


def gradients_of(parameters: Sequence[Tensor], units: Sequence[Unit], grad_scale: Tensor | None) -> dict[int, Tensor]:
    """Return the gradients that the units' weights have, by number, divided by a fused optimizer's scale."""
    numbers = (n for unit in units for n in unit.watched)
    found = {n: g for n in numbers if (g := parameters[n].grad) is not None}
    return found if grad_scale is None else {n: g / grad_scale for n, g in found.items()}


class GradientNormSignal(Signal):
    """Norm of the sum of a layer's gradients since the last measurement. Costs a copy of the watched gradients."""

    every_step = True
    together = True

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._sums: dict[int, Tensor] = {}

    def observe(self, units: Sequence[Unit], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        found = gradients_of(self._parameters, units, grad_scale)
        gradients = list(found.values())
        if found_inf is not None:  # of a fused optimizer, which skips steps with infinities itself
            gradients = [torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) * (1.0 - found_inf) for g in gradients]
        for number in found:
            if number not in self._sums:
                self._sums[number] = torch.zeros_like(self._parameters[number].detach())
        if gradients:
            torch._foreach_add_([self._sums[n] for n in found], gradients)

    def measure(self, units: Sequence[Unit]) -> Tensor:
        numbers = [n for unit in units for n in unit.watched if n in self._sums]
        squares = dict.fromkeys(numbers, torch.zeros(()))
        if numbers:
            norms = torch._foreach_norm([self._sums[n] for n in numbers])
            squares = {n: whole(norm).square() for n, norm in zip(numbers, norms, strict=True)}
        zero = torch.zeros((), device=self._parameters[0].device)
        return torch.stack([sum((squares[n] for n in u.watched if n in squares), zero).sqrt() for u in units])

    def measured(self) -> None:
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {number: total.clone() for number, total in self._sums.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {int(n): total.clone().to(self._parameters[int(n)].device) for n, total in state["sums"].items()}


class GradientChangeSignal(Signal):
    """Mean absolute change of a layer's gradient since the step before; infinite without two gradients in a row.

    Costs a copy of the watched gradients a step. Where a GradScaler skips a step, its infinities are a change, too.
    """

    every_step = True
    together = True

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._before: dict[int, Tensor] = {}
        self._now: dict[int, Tensor] = {}

    def observe(self, units: Sequence[Unit], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        found = gradients_of(self._parameters, units, grad_scale)
        self._before, self._now = self._now, {n: g.detach().clone() for n, g in found.items()}

    def measure(self, units: Sequence[Unit]) -> Tensor:
        return torch.stack([self._change(unit) for unit in units])

    def _change(self, unit: Unit) -> Tensor:
        if not all(n in self._now and n in self._before for n in unit.watched):
            return torch.full((), torch.inf, device=self._parameters[0].device)
        changes = [self._now[n] - self._before[n] for n in unit.watched]
        norms = [whole(torch.linalg.vector_norm(c.float() if c.dtype in _HALF else c, 1)) for c in changes]
        return torch.stack(norms).sum() / sum(c.numel() for c in changes)

    def state_dict(self) -> dict[str, Any]:
        return {"now": {number: gradient.clone() for number, gradient in self._now.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._now = {int(n): g.clone().to(self._parameters[int(n)].device) for n, g in state["now"].items()}


def similarity_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance ||G_a - G_b||_F^2 / B^2 of two representations (B, ...) of one batch.

    Source: Tung and Mori, "Similarity-Preserving Knowledge Distillation", 2019, equation 4; Egeria's plasticity.
    """

    def gram(value: Tensor) -> Tensor:
        flat = value.flatten(1).float()
        return nn.functional.normalize(flat @ flat.T, dim=1)

    return (gram(a) - gram(b)).square().sum() / len(a) ** 2


class _Reached(Exception):
    """The output of the layer that is measured, which ends the forward pass."""


class PlasticitySignal(Signal):
    """Distance between a layer's representation and that of a copy of the model from one measurement earlier.

    Both copies run the batch of the step in eval mode without gradients, up to the layer: two partial forward passes
    per measurement, and a copy of the model in memory.

    Raises (in `measure`):
        RuntimeError: no training step's inputs were seen, for example under a compiled model other than the one given.
    """

    def __init__(self, parameters: Sequence[Tensor], model: nn.Module) -> None:
        super().__init__(parameters)
        self._model = model
        self._reference: dict[str, Tensor] | None = None
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The step's inputs, set by the hook that watches the model while a measurement is due."""

    @torch.no_grad()
    def measure(self, units: Sequence[Unit]) -> Tensor:
        if self._reference is None:
            return torch.full((len(units),), torch.nan, device=self._parameters[0].device)
        return torch.stack([self._moved(self._parameters[unit.watched[0]]) for unit in units])

    def _moved(self, weight: Tensor) -> Tensor:
        # A layer whose parent uses its weights without calling it (attention) is measured by its parent's output.
        modules = dict(self._model.named_modules())
        owners = [n for n, m in modules.items() if any(p is weight for p in m._parameters.values())]
        name = owners[0]
        while True:
            now = self._output(modules[name], None)
            if now is not None:
                before = self._output(modules[name], self._reference)
                assert before is not None
                return similarity_distance(now, before)
            name = name.rpartition(".")[0]

    def measured(self) -> None:
        state = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._reference = {name: value.detach().clone() for name, value in state.items()}
        self.inputs = None

    def _output(self, module: nn.Module, state: dict[str, Tensor] | None) -> Tensor | None:
        """Return the module's first output on the step's inputs; None if it is never called."""
        if self.inputs is None:
            raise RuntimeError(
                "CAC_RULE=plasticity saw no inputs of a training step: give the model that is called, compiled or "
                "wrapped as it is, as model="
            )
        args, kwargs = self.inputs

        def stop_here(_module: nn.Module, _args: Any, output: Any) -> None:
            raise _Reached(output)

        training = [(m, m.training) for m in self._model.modules()]
        handle = module.register_forward_hook(stop_here)
        try:
            self._model.eval()
            with torch.no_grad():
                if state is None:
                    self._model(*args, **kwargs)
                else:
                    torch.func.functional_call(self._model, state, args, kwargs)
        except _Reached as reached:
            output = reached.args[0]
            return output if isinstance(output, Tensor) else next(o for o in output if isinstance(o, Tensor))
        finally:
            handle.remove()
            for each, mode in training:
                each.training = mode
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        reference = state["reference"]
        if reference is not None:
            devices = {n: t.device for n, t in (*self._model.named_parameters(), *self._model.named_buffers())}
            reference = {name: value.clone().to(devices[name]) for name, value in reference.items()}
        self._reference = reference


def make_signal(settings: Settings, parameters: Sequence[Tensor], model: nn.Module | None) -> Signal:
    """Return the signal of the settings' rule; plasticity needs the model."""
    if settings.mode == "gradient_norm":
        return GradientNormSignal(parameters)
    if settings.mode == "grades":
        return GradientChangeSignal(parameters)
    if settings.mode == "plasticity" and model is not None:
        return PlasticitySignal(parameters, model)
    return VarianceSignal(parameters, reference=settings.reference)
