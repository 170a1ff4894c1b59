"""The rows of a model's output in one pass: each sample's output, and the gradient that reaches the model there.

For a loss that is the mean over samples, scaling row i of the output's gradient by w_i gives the gradient of the mean
of w_i times sample i's loss, whatever the loss is; terms that do not come through the output (regularization) stay.

Shapes: B samples; an output and its gradient are (B, ...); weights and norms (B,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainables.errors import UserError
from trainables.workloads.batch_structure import tensors_in


class OutputRows:
    """Watch the model's output in the passes inside the block, and weigh the rows of its gradient.

    Args:
        model: whose output is meant; it is called once in a pass.
        samples: B.
        weigh: the gradient (B, ...) in, the rows' weights out; None changes nothing.
        keeps_whole: True keeps what the model returned, with its graph; ``weigh`` must then not refer to this object.

    In the forward pass UserError: the output is not one tensor with a row for each sample.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int,
        weigh: Callable[[Tensor], Tensor | None] = lambda gradient: None,
        *,
        keeps_whole: bool = False,
    ) -> None:
        self._model, self._samples, self._weigh, self._keeps_whole = model, samples, weigh, keeps_whole
        self._handle: Any = None
        self._gradients: list[Tensor] = []
        self._is_called = False
        self.whole: Any = None  # the model's whole output, if ``keeps_whole``

    def __enter__(self) -> OutputRows:
        self._handle = self._model.register_forward_hook(self._seen)
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._handle.remove()
        if kind is None and not self._is_called:
            raise UserError(
                f"the loss must call the model itself, so that samples can be weighted, got no call of "
                f"{type(self._model).__name__}: call model(...), not a part of it nor model.forward(...)"
            )

    def _seen(self, model: nn.Module, arguments: Any, output: Any) -> None:
        found = output_of(output, self._samples)
        # A tensor with its graph, held by what its own hook holds, would never be freed.
        self._is_called = True
        self.whole = output if self._keeps_whole else None
        if not found.requires_grad:
            return
        weigh, gradients = self._weigh, self._gradients

        def reached(gradient: Tensor) -> Tensor | None:
            gradients.append(gradient.detach())
            weights = weigh(gradients[-1])
            return None if weights is None else gradient * weights.to(gradient).view(-1, *[1] * (gradient.dim() - 1))

        hooks: dict[int, Any] = found._backward_hooks or {}
        earlier = dict(hooks)
        hooks.clear()
        found.register_hook(reached)
        # Hooks of the last layer, whose output this may be, see the weighted gradient as those of all layers do.
        hooks.update(earlier)

    @property
    def norms(self) -> Tensor:
        """Return the norm of each sample's own loss gradient with respect to its output: (B,)."""
        assert self._gradients, "no backward pass has reached the output"
        return row_norms(self._gradients[-1])


def row_norms(gradient: Tensor) -> Tensor:
    """Return the norms of the rows of a mean loss's gradient, of each sample's own loss: (B,)."""
    return gradient.reshape(len(gradient), -1).norm(dim=1) * len(gradient)


def output_of(output: Any, samples: int) -> Tensor:
    """Return the tensor with a row for each sample that a model returned: itself, or ``logits`` in a mapping.

    UserError: there is none, or several.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
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


def sample_losses(
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor], returned: Any, batch: tuple[Tensor, ...]
) -> Tensor:
    """Return the loss of each sample (B,), from what the model returned for a whole batch: a tensor, or what holds it.

    ``loss`` is (model, batch) -> mean loss; UserError unless it only calls the model and compares its output with the
    batch.
    """
    found = output_of(returned, len(batch[0]))
    output = found.detach()

    def one(row: Tensor, *parts: Tensor) -> Tensor:
        returning = nn.Module()
        alone = tree_map(lambda part: row.unsqueeze(0) if part is found else None, returned)
        returning.forward = lambda *_, **__: alone
        return loss(returning, tuple(part.unsqueeze(0) for part in parts))

    with torch.no_grad():
        try:
            return torch.func.vmap(one)(output, *batch)
        except Exception as error:
            raise UserError(
                "samples' losses need a loss that only calls the model and compares its output with the batch, got "
                f"{type(error).__name__} ({error}): take the scores from output_gradient"
            ) from error
