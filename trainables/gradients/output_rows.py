"""The rows of a model's output in one pass: each sample's output, and the gradient that reaches the model there.

For a loss that is the mean over samples, scaling row i of the output's gradient by w_i gives the gradient of the mean
of w_i times sample i's loss, whatever the loss is; terms that do not come through the output (regularization) stay.

Shapes: B samples; an output and its gradient are (B, ...); weights and norms (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.workloads.batch_structure import tensors_in


class OutputRows:
    """Watch the model's output in the passes inside the block, and weigh the rows of its gradient.

    Args:
        model: whose output is meant; it is called once in a pass.
        samples: B.
        weigh: the gradient (B, ...) in, the rows' weights out; None changes nothing.

    Raises (in the forward pass):
        UserError: the output is not one tensor with a row for each sample.
    """

    def __init__(self, model: nn.Module, samples: int, weigh: Callable[[Tensor], Tensor | None] | None = None) -> None:
        self._model, self._samples, self._weigh = model, samples, weigh
        self._handle: Any = None
        self.output: Tensor | None = None
        """(B, ...), detached."""
        self.gradient: Tensor | None = None
        """Gradient of the loss with respect to it, before it is weighted."""

    def __enter__(self) -> OutputRows:
        self._handle = self._model.register_forward_hook(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _seen(self, model: nn.Module, arguments: Any, output: Any) -> None:
        found = output_of(output, self._samples)
        self.output = found.detach()
        if found.requires_grad:
            found.register_hook(self._reached)

    def _reached(self, gradient: Tensor) -> Tensor | None:
        self.gradient = gradient.detach()
        weights = None if self._weigh is None else self._weigh(self.gradient)
        return None if weights is None else gradient * weights.to(gradient).view(-1, *[1] * (gradient.dim() - 1))

    @property
    def norms(self) -> Tensor:
        """Return the norm of each sample's own loss gradient with respect to its output: (B,)."""
        assert self.gradient is not None, "no backward pass has reached the output"
        return row_norms(self.gradient)


def row_norms(gradient: Tensor) -> Tensor:
    """Return the norms of the rows of a mean loss's gradient, of each sample's own loss: (B,)."""
    return gradient.flatten(1).norm(dim=1) * len(gradient)


def output_of(output: Any, samples: int) -> Tensor:
    """Return the tensor with a row for each sample that a model returned: itself, or ``logits`` in a mapping.

    Raises:
        UserError: there is none, or several.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if not isinstance(found, Tensor):
        several = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        found = several[0] if len(several) == 1 else None
        if found is None:
            raise UserError(
                "the model must return one tensor, or logits in a mapping, so that samples can be weighted, got "
                f"{type(output).__name__} with {len(several)} tensors"
            )
    if found.dim() == 0 or len(found) != samples:
        raise UserError(
            f"the model's output must have a row for each of the {samples} samples of a batch, got shape "
            f"{tuple(found.shape)}: put the samples' dimension first"
        )
    return found


class _Returning(nn.Module):
    """A model that returns what was computed before."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.output


def sample_losses(
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor], output: Tensor, batch: tuple[Tensor, ...]
) -> Tensor:
    """Return the loss of each sample, from the model's output of a whole batch: (B,).

    Args:
        loss: (model, batch) -> mean loss; it must only call the model and compare its output with the batch.
        output: (B, ...), what the model returned.
        batch: tensors (B, ...).
    """

    def one(row: Tensor, *parts: Tensor) -> Tensor:
        return loss(_Returning(row.unsqueeze(0)), tuple(part.unsqueeze(0) for part in parts))

    with torch.no_grad():
        try:
            return torch.func.vmap(one)(output, *batch)
        except Exception:  # noqa: BLE001  # a loss that branches on values, or reads them, cannot be vectorised
            return torch.stack([one(output[i], *(part[i] for part in batch)) for i in range(len(output))])
