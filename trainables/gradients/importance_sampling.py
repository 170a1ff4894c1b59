"""Importance sampling: samples with a larger loss or gradient are drawn more often, and count as much less.

Shapes: N samples; B samples of a batch; scores, probabilities (N,); weights (B,).
Symbols: p_i probability of sample i in each draw; its weight is 1 / (N p_i), so the gradient stays unbiased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import IMPORTANCE_SCORES
from trainables.gradients.gradient_method import Draw, GradientMethod, check_interval, check_option
from trainables.gradients.output_rows import OutputRows, sample_losses


class ImportanceSampling(GradientMethod):
    """Samples drawn by the score that they had when they were trained last.

    Source: Katharopoulos, Fleuret, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling", 2018;
    the bound by the output's gradient is their section 3.2.

    Args:
        by: ``loss``; or ``output_gradient``, the norm of the loss's gradient with respect to the model's output.
        uniform: share of the probability that is spread evenly, in (0, 1]; no weight is above 1 / uniform.
        update_every: iterations from one update of the probabilities to the next, >= 1; scores wait on the device.

    UserError: an option out of range.
    """

    name = "importance_sampling"
    chooses_samples = True

    def __init__(self, *args: Any, by: str = "loss", uniform: float = 0.5, update_every: int = 10, **more: Any) -> None:
        super().__init__(*args, **more)
        if by not in IMPORTANCE_SCORES:
            raise unknown_name("importance", by, IMPORTANCE_SCORES)
        check_option("uniform", uniform, 0 < uniform <= 1, "in (0, 1]")
        check_interval("update_every", update_every)
        self.by, self.uniform, self.update_every = by, uniform, update_every
        self.scores = torch.full((self.data.count,), torch.nan, dtype=torch.float64)
        """(N,), NaN for samples that were not trained yet."""
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._since_update = 0

    def refresh(self) -> None:
        if self._since_update >= self.update_every:
            for numbers, scores in self._pending:
                self.scores[numbers] = scores.double().cpu()
            self._pending.clear()
            self._since_update = 0
        self._since_update += 1

    def probabilities(self) -> Tensor:
        """Return the probability of each sample in a draw: (N,) float64; unseen samples have the mean score."""
        known = self.scores[self.scores.isfinite()]
        total = float(known.mean()) if len(known) else 0.0
        even = torch.full_like(self.scores, 1 / self.data.count)
        if total <= 0:
            return even
        filled = torch.where(self.scores.isfinite(), self.scores, total)
        return (1 - self.uniform) * filled / filled.sum() + self.uniform * even

    def draw(self, generator: torch.Generator) -> Draw:
        probabilities = self.probabilities()
        ends = probabilities.cumsum(0)
        places = torch.rand(self.batch_size, generator=generator, dtype=torch.float64) * ends[-1]
        numbers = torch.searchsorted(ends, places, right=True).clamp(max=self.data.count - 1)
        return self.drawn(numbers, generator, 1 / (self.data.count * probabilities[numbers]))

    def rows(self, draw: Draw) -> OutputRows:
        return OutputRows(self.model, draw.size, lambda gradient: draw.weights, keeps_whole=True)

    def observe(self, draw: Draw, rows: Any) -> None:
        if draw.numbers is not None:
            scores = rows.norms if self.by == "output_gradient" else sample_losses(self.loss, rows.whole, draw.batch)
            self._pending.append((draw.numbers, scores.clamp(min=0)))

    def effective_share(self) -> float:
        """Return the effective sample size of a draw over its size: 1 / (N sum_i 1 / (N^2 p_i)), in (0, 1].

        It is (E w)^2 / E[w^2] of the weights (Kish, "Survey Sampling", 1965).
        """
        return float(self.data.count**2 / (1 / self.probabilities()).sum())

    def state_dict(self) -> dict[str, Any]:
        pending = [(numbers, scores.cpu()) for numbers, scores in self._pending]
        own = {"scores": self.scores.clone(), "pending": pending, "since_update": self._since_update}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if len(state["scores"]) != self.data.count:
            raise UserError(
                "a state of importance sampling must be of the same data, got scores of "
                f"{len(state['scores'])} samples for {self.data.count}: give the data that it was saved with"
            )
        self._since_update = int(state["since_update"])
        self.scores = state["scores"].clone()
        self._pending = [(numbers, scores.to(self.device)) for numbers, scores in state["pending"]]
