"""DistributedDataParallel that follows the stops: gradients of stopped layers are neither computed nor sent.

torch's own plans its gradient buckets once, for the parameters that train when it is built, and raises in the first
iteration in which one of them gets no gradient. This one is built anew after a stop, which costs a fraction of a
second; nothing of the model is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import GradientSkip


class DistributedDataParallel(nn.Module):
    """Drop-in for `torch.nn.parallel.DistributedDataParallel` with a gradient-skip optimizer.

    At a decision the numbers that the first process of the group has measured are sent to all, so that a stop reaches
    every process at the same iteration.

    Args:
        module: the model. Its parameters must be those of the optimizer.
        optimizer: with Gradient-Skip (`SGD`, `Adam`, `AdamW`, or any after `wrap`).
        options: of torch's class (``device_ids``, ``process_group``, ``gradient_as_bucket_view``, ...).

    Attributes:
        module: the model, as in torch's class; ``state_dict()`` keys begin with ``module.``, too.

    Raises:
        UserError: an optimizer without Gradient-Skip, or one of other parameters.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__()
        gradskip = getattr(optimizer, "gradskip", None)
        if not isinstance(gradskip, GradientSkip):
            raise UserError(
                "DistributedDataParallel follows an optimizer with Gradient-Skip, got "
                f"{type(optimizer).__name__} without: use gradskip.SGD, Adam, AdamW or gradskip.wrap(optimizer)"
            )
        own = {id(p) for p in module.parameters()}
        if not any(id(p) in own for p in gradskip.parameters):
            raise UserError("module must be the model whose parameters the optimizer has, got one that shares none")
        self.module = module
        self._options = options
        self._comm_hooks: list[tuple[Any, Callable[..., Any]]] = []
        # In a list, so that the wrapper inside is no submodule: keys of state_dict() stay torch's.
        self._parallel = [TorchDataParallel(module, **options)]
        self._outdated = False
        gradskip.process_group = self._parallel[0].process_group
        gradskip.on_stop.append(self._outdate)

    def _outdate(self) -> None:
        self._outdated = True

    def _rebuild(self) -> None:
        self._outdated = False
        training = self._parallel[0].training
        self._parallel.clear()  # first: its reducer must be gone when the next one hooks the same parameters
        # Every process has the same weights: nothing to send or to check again.
        options = {**self._options, "init_sync": False}
        self._parallel.append(TorchDataParallel(self.module, **options))
        self._parallel[0].train(training)
        for state, hook in self._comm_hooks:
            self._parallel[0].register_comm_hook(state, hook)

    @property
    def parallel(self) -> TorchDataParallel:
        """torch's wrapper of the moment."""
        if self._outdated:
            self._rebuild()
        return self._parallel[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; gradients of the backward pass are averaged over the processes."""
        return self.parallel(*args, **kwargs)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Training or evaluation mode, of the model and the wrapper."""
        super().train(mode)
        self._parallel[0].training = mode
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """As torch's: gradients are not sent inside, for gradient accumulation."""
        context: AbstractContextManager[None] = self.parallel.no_sync()
        return context

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """As torch's; registered again after every stop. A hook's state must not depend on the buckets' shapes."""
        self.parallel.register_comm_hook(state, hook)
        self._comm_hooks.append((state, hook))
