"""Kronecker-factored curvature: gradients of linear and convolution layers, preconditioned by an approximate Fisher.

Symbols, of one layer: dW the gradient of the mean loss; A the second moment of the layer's inputs, G that of the
gradients of its outputs; A = Q_a diag(d_a) Q_a^T and G likewise; V the direction.

Shapes: B samples; T places at which a layer applies its weights; O outputs; I inputs of a place, one more (a one) if
the layer has a bias; M terms of which the loss is the mean. dW and V are (O, I), A (I, I), G (O, O).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.errors import TrainingDiverged, UserError, unknown_name
from trainables.gradients.fields import FISHERS
from trainables.gradients.gradient_method import Draw, GradientMethod, Gradients, check_interval, check_option
from trainables.gradients.layer_signals import LayerSignals, rows_of_inputs, rows_of_outputs, treatable_layers
from trainables.gradients.output_rows import output_of
from trainables.runtime.operator_flops import uncompiled
from trainables.workloads.batch_shapes import shapes_of

#: Numbers that patches of one layer may take at a time.
PATCH_NUMBERS = 1 << 22


class Factors(NamedTuple):
    """Curvature of a layer, whose part of the Fisher is about A (x) G: means over places, and over the loss's terms."""

    inputs: Tensor  # A: (I, I)
    outputs: Tensor  # G: (O, O)


class Basis(NamedTuple):
    """Eigenvectors (columns) and eigenvalues of a layer's factors."""

    inputs: Tensor  # Q_a: (I, I)
    input_values: Tensor  # d_a: (I,)
    outputs: Tensor  # Q_g: (O, O)
    output_values: Tensor  # d_g: (O,)

    def precondition(self, gradient: Tensor, damping: float) -> Tensor:
        """Return V of dW, both (O, I): the solution of (A (x) G + damping) vec V = vec dW."""
        rotated = self.outputs.T @ gradient @ self.inputs
        return self.outputs @ (rotated / (torch.outer(self.output_values, self.input_values) + damping)) @ self.inputs.T


class KFAC(GradientMethod):
    """Direction V = Q_g [(Q_g^T dW Q_a) / (d_g d_a^T + damping)] Q_a^T of each layer, clipped in its KL divergence.

    Sources: Martens, Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature",
    arXiv:1503.05671, 2015; convolutions: Grosse, Martens, arXiv:1602.01407, 2016; the scaling where weights are used at
    several places ("expand"): Eschenhagen et al., arXiv:2311.00636, 2023; the clip: Ba, Grosse, Martens, "Distributed
    Second-Order Optimization using Kronecker-Factored Approximations", 2017, section 5.

    Args:
        damping: added to the eigenvalues of the curvature, > 0.
        kl_clip: bound on the sum over treated weights of lr^2 V dW, to which all V are scaled together, > 0; None: off.
        decay: of the factors' moving averages, in [0, 1), which begin with the first measurement.
        factor_every: steps from one measurement of the factors (about a gradient's cost) to the next, >= 1.
        inverse_every: steps from one eigendecomposition to the next, >= 1.
        fisher: "sampled": labels drawn from the model's own distribution, which gives the Fisher; "empirical": the
            batch's labels, under any loss.

    The distribution is categorical where the batch's last tensor is of integers and the output has a dimension of
    classes more (the last, or dimension 1; negative labels are ignored), Gaussian of variance 1 where it is of as many
    floating-point numbers as the output; else take "empirical". The terms M are the labels that are not ignored where
    classes are told, samples elsewhere. Layers that are not `treatable_layers` have their plain gradients. A batch norm
    in train mode makes a sample's gradient depend on its batch, and is part of G so.

    UserError: an option out of range, no layer to treat, or, in `step`, no known distribution.
    """

    name = "kfac"

    def __init__(
        self,
        *args: Any,
        damping: float = 1e-3,
        kl_clip: float | None = 1e-2,
        decay: float = 0.95,
        factor_every: int = 10,
        inverse_every: int = 100,
        fisher: str = "sampled",
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        check_option("damping", damping, 0 < damping < math.inf, "a number > 0")
        check_option("kl_clip", kl_clip, kl_clip is None or kl_clip > 0, "a number > 0, or None for no clip")
        check_option("decay", decay, 0 <= decay < 1, "in [0, 1)")
        check_interval("factor_every", factor_every)
        check_interval("inverse_every", inverse_every)
        if fisher not in FISHERS:
            raise unknown_name("fisher", fisher, FISHERS)
        self.damping, self.kl_clip, self.decay, self.fisher = damping, kl_clip, decay, fisher
        self.factor_every, self.inverse_every = factor_every, inverse_every
        self.layers = treatable_layers(self.model, "K-FAC")
        self.factors: dict[str, Factors] = {}  # of each treated layer that was measured, by its name
        self.bases: dict[str, Basis] = {}  # of each treated layer that was decomposed, by its name
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._names = {
            layer: (names[id(module.weight)], names.get(id(module._parameters.get("bias"))))
            for layer, module in self.layers.items()
        }

    def observe(self, draw: Draw, rows: Any) -> None:
        """Measure the factors, and decompose them, where this is due.

        UserError: the labels' distribution is not known. TrainingDiverged: a factor is not finite.
        """
        if not self.factors or self.iteration % self.factor_every == 0:
            self._measure(draw)
        due = not self.bases or self.iteration % self.inverse_every == 0
        for name, factors in self.factors.items():
            if self._trains(name) and (due or name not in self.bases):
                self.bases[name] = self._decomposed(name, factors)

    def adjust(self, gradients: Gradients, draw: Draw) -> Gradients:
        """Precondition the gradients of treated layers; before the first step they are plain."""
        shift = torch.zeros((), device=self.device)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
        directions: Gradients = {}
        for layer, basis in self.bases.items():
            if not self._trains(layer):
                continue
            weight, bias = self._names[layer]
            with torch.autocast(self.device.type, enabled=False):
                matrix = gradients[weight].flatten(1)
                if bias is not None:
                    matrix = torch.cat([matrix, gradients[bias].unsqueeze(1)], 1)
                direction = basis.precondition(matrix.to(basis.inputs.dtype), self.damping)
            parts = {weight: direction[:, : gradients[weight][0].numel()].view_as(gradients[weight])}
            if bias is not None and self.parameters[bias].requires_grad:
                parts[bias] = direction[:, -1]
            for name, part in parts.items():
                directions[name] = part
                shift = shift + rates.get(id(self.parameters[name]), 0.0) ** 2 * (part * gradients[name]).sum()
            outputs, inputs = direction.shape
            self.meter.add(4 * outputs * inputs * (outputs + inputs))
        scale: Tensor | float = 1.0
        if self.kl_clip is not None and self.optimizer is not None:
            scale = (self.kl_clip / shift).sqrt().clamp(max=1.0)  # a tensor: the host waits for no device
        return {**gradients, **{name: (scale * part).to(gradients[name].dtype) for name, part in directions.items()}}

    def _trains(self, layer: str) -> bool:
        return self.parameters[self._names[layer][0]].requires_grad

    def _measure(self, draw: Draw) -> None:
        """Let the factors follow those of a draw: one pass without side effects, and without weights' gradients."""
        layers = {name: layer for name, layer in self.layers.items() if self._trains(name)}
        outputs: list[Any] = []
        key = ("kfac", shapes_of(draw.batch), tuple(layers))
        # A compiled model would not call hooks that it has not been compiled with.
        with self.pass_on(draw) as evaluate, uncompiled(), LayerSignals(layers) as signals:
            with (
                self.model.register_forward_hook(lambda model, arguments, output: outputs.append(output)),
                self.meter.forward(key),
            ):
                loss = evaluate({})
            if not signals.edges:
                return
            total, terms = self._total_loss(loss, outputs[-1] if outputs else None, draw)
            with self.meter.backward(key):
                torch.autograd.grad(total, signals.edges, allow_unused=True)
        for name, layer in layers.items():
            calls = signals.calls(name)
            if calls:
                with torch.autocast(self.device.type, enabled=False):
                    new = self._measured(layer, calls, terms, bias=self._names[name][1] is not None)
                old = self.factors.get(name, new)  # out of place: a state that was asked for stays as it was
                self.factors[name] = Factors(*(a.lerp(b, 1 - self.decay) for a, b in zip(old, new, strict=True)))

    def _total_loss(self, loss: Tensor, output: Any, draw: Draw) -> tuple[Tensor, Tensor | int]:
        """Return the sum of the loss's terms, and M: the gradients of a mean could underflow in half precision."""
        targets = draw.batch[-1]
        try:
            scores = output_of(output, draw.size)
        except UserError:
            scores = None
        classes = None if scores is None else _class_scores(scores, targets)
        counted = None if classes is None else targets.flatten() >= 0
        terms: Tensor | int = draw.size if counted is None else counted.sum().clamp(min=1)
        if self.fisher == "empirical":
            return loss.float() * terms if loss.dtype.itemsize < 4 else loss * terms, terms
        source = torch.Generator(self.device).manual_seed(self.generator(purpose=2).initial_seed())
        if classes is not None and counted is not None:
            rows = classes.to(_precise(classes.dtype))
            # The smallest of exponential times with the classes' rates; torch.multinomial waits for the device.
            waits = torch.empty_like(rows).exponential_(generator=source)
            labels = (rows.detach().softmax(-1) / waits).argmax(-1)
            return (F.cross_entropy(rows, labels, reduction="none") * counted).sum(), terms
        if scores is not None and targets.is_floating_point() and targets.numel() == scores.numel():
            values = scores.to(_precise(scores.dtype))
            noise = torch.empty_like(values).normal_(generator=source)
            return 0.5 * (values - (values.detach() + noise)).square().sum(), terms
        got = type(output).__name__ if scores is None else tuple(scores.shape)
        raise UserError(
            "fisher='sampled' needs integer targets as the batch's last tensor and an output with one more dimension, "
            "of classes, or floating-point targets of the output's shape, got targets "
            f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)} and an output {got}: use "
            "fisher='empirical'"
        )

    def _measured(
        self, layer: nn.Module, calls: list[tuple[Tensor, Tensor]], terms: Tensor | int, *, bias: bool
    ) -> Factors:
        """Return the factors of one pass; patches of a convolution are made of a few samples at a time."""
        assert isinstance(layer.weight, Tensor)
        weight = layer.weight.flatten(1)
        outputs, inputs = weight.shape[0], weight.shape[1] + bias
        dtype = _precise(weight.dtype)
        second, gradients = (torch.zeros(n, n, dtype=dtype, device=weight.device) for n in (inputs, outputs))
        places = 0
        for seen, gradient in calls:
            count = gradient.numel() // outputs
            for some in seen.split(max(1, PATCH_NUMBERS * len(seen) // (count * inputs))):
                patches = rows_of_inputs(layer, some.to(dtype)).flatten(0, 1)
                if bias:
                    patches = torch.cat([patches, patches.new_ones(len(patches), 1)], 1)
                second.addmm_(patches.T, patches)
            flat = rows_of_outputs(layer, gradient).flatten(0, 1).to(dtype)
            gradients.addmm_(flat.T, flat)
            places += count
        self.meter.add(2 * places * (inputs * inputs + outputs * outputs))
        return Factors(second / places, gradients / terms)

    def _decomposed(self, name: str, factors: Factors) -> Basis:
        parts: list[Tensor] = []
        for factor in factors:
            try:
                values, vectors = torch.linalg.eigh(factor)
            except torch.linalg.LinAlgError as error:
                raise TrainingDiverged(
                    f"K-FAC's factors of layer {name or 'the model'!r} are not finite in step {self.iteration}"
                ) from error
            parts += [vectors, values.clamp(min=0)]  # rounding makes small ones negative
            # Householder reduction and symmetric QR with vectors: Golub, Van Loan, Matrix Computations, section 8.3.
            self.meter.add(9 * len(factor) ** 3)
        return Basis(*parts)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "factors": {name: list(factors) for name, factors in self.factors.items()},
            "bases": {name: list(basis) for name, basis in self.bases.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.factors = {name: Factors(*(t.to(self.device) for t in ts)) for name, ts in state["factors"].items()}
        self.bases = {name: Basis(*(t.to(self.device) for t in ts)) for name, ts in state["bases"].items()}


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of curvature: half precision cannot hold it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _class_scores(output: Tensor, targets: Tensor) -> Tensor | None:
    """Return the output as (labels, classes), or None if the targets are not its classes."""
    if targets.is_floating_point() or targets.is_complex() or output.dim() != targets.dim() + 1:
        return None
    if output.shape[:-1] == targets.shape:
        return output.flatten(0, -2)
    if (output.shape[0], *output.shape[2:]) == tuple(targets.shape):
        return output.movedim(1, -1).flatten(0, -2)
    return None
