"""SVRG: stochastic gradients with a control variate from a snapshot of the weights.

Symbols: w0 the weights of the snapshot; mu the mean gradient of all samples there; g_B the gradient of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainables.errors import UserError
from trainables.gradients.gradient_method import Draw, GradientMethod, Gradients, check_interval, check_option


class SVRG(GradientMethod):
    """Direction g_B(w) - alpha (g_B(w0) - mu), unbiased whatever alpha is.

    Sources: Johnson, Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance Reduction", 2013; the
    coefficient: Yin et al., "A Coefficient Makes SVRG Effective", arXiv:2311.05589, 2023, section 4, whose alpha falls
    linearly to 0.

    Args:
        alpha: coefficient of the control variate, in [0, 1]; 0 is SGD, and costs nothing.
        alpha_end: iteration at which alpha has fallen linearly to 0; None: alpha stays.
        snapshot_every: iterations from one snapshot to the next, >= 1; a snapshot costs a pass over the data.

    A batch norm in train mode makes a sample's gradient depend on its batch, so mu is then that of one random partition
    of the data into batches, and the direction is unbiased only up to that.
    """

    name = "svrg"

    def __init__(
        self, *args: Any, alpha: float = 1.0, alpha_end: int | None = None, snapshot_every: int = 100, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        check_option("alpha", alpha, 0 <= alpha <= 1, "in [0, 1]")
        check_interval("snapshot_every", snapshot_every)
        check_interval("alpha_end", alpha_end)
        self.alpha, self.alpha_end, self.snapshot_every = alpha, alpha_end, snapshot_every
        self._weights: dict[str, Tensor] = {}
        self._mean: dict[str, Tensor] = {}
        self._training: bool | None = None
        self._age = 0

    def alpha_at(self, iteration: int) -> float:
        """Return the coefficient of an iteration."""
        return self.alpha if self.alpha_end is None else self.alpha * max(0.0, 1 - iteration / self.alpha_end)

    @property
    def is_about_to_pass(self) -> bool:
        return self.alpha_at(self.iteration) > 0 and (not self._weights or self._age >= self.snapshot_every)

    def refresh(self) -> None:
        if self.is_about_to_pass:
            self.snapshot()
        self._age += 1

    def snapshot(self) -> None:
        """Keep the current weights and the mean gradient of all samples; one pass over the data."""
        self._weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._training = self.model.training
        self._age = 0
        self._mean = self.data_gradient(self.generator(purpose=1))

    def adjust(self, gradients: Gradients, draw: Draw) -> Gradients:
        """Add the control variate. UserError: the model is in another mode than at the snapshot."""
        alpha = self.alpha_at(self.iteration)
        if alpha == 0 or not self._weights:
            return gradients
        if self.model.training != self._training:
            mode = {True: "train", False: "eval"}
            raise UserError(
                f"SVRG's snapshot was taken in {mode[bool(self._training)]} mode and must be used in it, got a model "
                f"in {mode[self.model.training]} mode: set the mode before the first step, or call snapshot() again"
            )
        old = self.plain_gradient(draw, at=self._weights)
        return {name: g - alpha * (old[name] - self._mean[name]) for name, g in gradients.items()}

    def state_dict(self) -> dict[str, Any]:
        own = {"weights": dict(self._weights), "mean": dict(self._mean), "training": self._training, "age": self._age}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._weights, self._mean = (
            {name: value.to(self.device) for name, value in state[key].items()} for key in ("weights", "mean")
        )
        self._training, self._age = state["training"], int(state["age"])
