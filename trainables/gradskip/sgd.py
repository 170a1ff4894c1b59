"""`torch.optim.SGD` with Gradient-Skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainables.gradskip.controller import STATE_KEY, GradientSkip
from trainables.gradskip.settings import Settings


class SGD(torch.optim.SGD):
    """Drop-in for `torch.optim.SGD` that stops layers which have converged.

    The update is torch's own (foreach, fused or single-tensor); until the first stop it equals `torch.optim.SGD`
    bit for bit. A stopped layer needs no gradient from the next backward pass on and does not move by one bit.

    Args:
        params: parameters, parameter groups, or named parameters (``model.named_parameters()``, which gives names to
            `GradientSkip.events`); any iterable, a generator included. Parameter N is layer number N.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: as in
            `torch.optim.SGD`.
        settings: `Settings`, or None to read the ``CAC_*`` variables (nothing set: auto mode, published defaults).

    Attributes:
        gradskip: `GradientSkip`, with ``stopped_through``, ``events``, ``iteration`` and ``settings``.

    Raises:
        UserError: invalid settings, or a layer number past the last parameter.

    >>> optimizer = SGD([torch.zeros(3, requires_grad=True)], lr=0.1, settings=Settings())
    >>> optimizer.gradskip.stopped_through
    -1
    """

    gradskip: GradientSkip

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self.gradskip = GradientSkip(self, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters after the last; only before the first step, for their numbers follow the others'."""
        started = getattr(self, "gradskip", None)
        if started is not None and started.iteration > 0:
            raise RuntimeError(
                "a parameter group must be added before the first step of a gradient-skip optimizer, got one at "
                f"iteration {started.iteration}: build a new optimizer"
            )
        super().add_param_group(param_group)
        if started is not None:
            started._bind()

    def __getstate__(self) -> dict[str, Any]:
        # torch's own drops everything but these three, hooks included; copy and pickle rebuild ours from the rest.
        state: dict[str, Any] = super().__getstate__()
        return {**state, STATE_KEY: (self.gradskip.settings, self.gradskip.state_dict())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        ours = state.pop(STATE_KEY, None)
        super().__setstate__(state)
        if ours is not None:
            settings, rule_state = ours
            self.gradskip = GradientSkip(self, settings)
            self.gradskip.load_state_dict(rule_state)
