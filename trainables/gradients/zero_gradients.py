"""Zero gradients: samples whose loss gradient is nearly zero take no part in the backward pass.

Every sample runs forward, which the loss needs; a sample whose loss hardly depends on its output any more is left out
of the products of the backward pass. What that spares is counted as saved.

Shapes: B samples of a batch; norms, weights (B,).
Symbols: n_i norm of the gradient of sample i's loss with respect to the model's output (cross entropy: the distance
between probabilities and label, in [0, sqrt(2)]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradients.gradient_method import Draw, GradientMethod, check_option
from trainables.gradients.output_rows import OutputRows, row_norms
from trainables.gradients.sliced_backward import SlicedBackward, SlicedLayers


def kept_weights(norms: Tensor, threshold: float, chances: Tensor | None = None) -> Tensor:
    """Return the weight of each sample's gradient: 0 where it is left out.

    Without chances, samples with n_i < threshold are left out, and the gradient is biased by what they would have
    added: at most threshold in the norm of each output's gradient. With chances, (B,) uniform in [0, 1), such a sample
    is kept with probability n_i / threshold and then weighs threshold / n_i, which is unbiased.

    >>> kept_weights(torch.tensor([0.5, 0.01]), 0.1).tolist()
    [1.0, 0.0]
    """
    if chances is None:
        return (norms >= threshold).to(norms.dtype)
    probability = (norms / threshold).clamp(max=1)
    return torch.where(chances < probability, 1 / probability, torch.zeros_like(norms))


class SkippingRows(OutputRows):
    """Leave samples out of the backward pass of the forward pass inside the block.

    The threshold is that of `kept_weights`, the seed that of the chances of the unbiased form; None: the biased one.
    """

    def __init__(
        self, model: nn.Module, samples: int, threshold: float, seed: int | None, layers: SlicedLayers | None = None
    ) -> None:
        super().__init__(model, samples, self._leave_out)
        self._threshold, self._seed = threshold, seed
        self.sliced = SlicedBackward(samples, layers)
        """Counts the FLOPs that were spared."""
        self.kept = samples
        """Samples that took part in the backward pass."""

    def __enter__(self) -> SkippingRows:
        super().__enter__()
        self.sliced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.sliced.__exit__(*error)
        super().__exit__(*error)
        self.sliced.layers.warn()

    def _leave_out(self, gradient: Tensor) -> Tensor | None:
        norms = row_norms(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        chances = None
        if self._seed is not None:
            chances = torch.rand(len(norms), generator=torch.Generator().manual_seed(self._seed)).to(norms.device)
        weights = kept_weights(norms, self._threshold, chances)
        # Shapes depend on it, so the device is waited for: the decision of this step.
        keep = weights.nonzero().flatten()
        self.kept = len(keep)
        if len(keep) < len(norms):
            self.sliced.keep = keep
        elif chances is None:
            return None
        return weights


class ZeroGradients(GradientMethod):
    """Batches drawn uniformly, of which samples with nearly no loss gradient are left out of the backward pass.

    Args:
        threshold: samples with n_i below it are left out, > 0.
        unbiased: True keeps some of them with a larger weight, see `kept_weights`.

    A batch norm in train mode makes every sample's gradient depend on the others': in the backward pass it takes the
    kept samples for its whole batch (`sliced_backward`), so the unbiased form, too, is biased by that.

    Raises:
        UserError: a threshold out of range.
    """

    name = "zero_gradients"

    def __init__(self, *args: Any, threshold: float = 0.01, unbiased: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        check_option("threshold", threshold, threshold > 0, "a number above 0")
        self.threshold, self.unbiased = threshold, unbiased
        self._layers = SlicedLayers(self.model)

    def rows(self, draw: Draw) -> SkippingRows:
        seed = None
        if self.unbiased:
            seed = int(torch.randint(2**31, (), generator=self.generator(purpose=2)))
            seed += 0 if draw.numbers is None else int(draw.numbers.sum())  # other draws of an iteration, other chances
        return SkippingRows(self.model, draw.size, self.threshold, seed, self._layers)

    def spared_flops(self, rows: Any) -> int:
        return int(rows.sliced.spared_flops)

    def observe(self, draw: Draw, rows: Any) -> None:
        self.meter.add(-self.spared_flops(rows))
