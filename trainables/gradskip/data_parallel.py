"""DistributedDataParallel that adapts to stops: gradients of stopped layers are neither computed nor sent.

torch's own class plans its gradient buckets once, for the parameters that train when it is built, and raises when one
of them gets no gradient. This class is rebuilt after a stop, in a fraction of a second; nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.settings import OFF_VARIABLE

#: Options for which torch's constructor puts hooks on the model; rebuilding would add them twice.
_BUILT_ONCE = ("mixed_precision", "delay_all_reduce_named_params")
#: Attributes in which a module keeps its users' hooks; a rebuilt wrapper keeps them.
_HOOKS = tuple(name for name in nn.Module().__dict__ if "hooks" in name)


class DistributedDataParallel(TorchDataParallel):
    """Drop-in for `torch.nn.parallel.DistributedDataParallel` with a gradient-skip optimizer.

    At a decision the first process of the group sends its measurements to all, so that every process stops a layer at
    the same iteration. Options are torch's (``device_ids``, ``process_group``, ``static_graph``, ...).

    Raises:
        UserError: an optimizer without Gradient-Skip, one of other parameters, or a torch option that does not allow
            rebuilding (``mixed_precision``, ``delay_all_reduce_named_params``).
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        gradskip = getattr(optimizer, "gradskip", None)
        if not isinstance(gradskip, GradientSkip):
            raise UserError(
                "DistributedDataParallel follows an optimizer with Gradient-Skip, got "
                f"{type(optimizer).__name__} without: use gradskip.SGD, Adam, AdamW or gradskip.wrap(optimizer)"
            )
        own = {id(p) for p in module.parameters()}
        if not any(id(p) in own for p in gradskip.parameters):
            raise UserError("module must be the model whose parameters the optimizer has, got one that shares none")
        for name in _BUILT_ONCE:
            if options.get(name) is not None:
                raise UserError(
                    f"gradskip.DistributedDataParallel is built anew at every stop, which {name} does not allow: leave "
                    "it out (for mixed precision use torch.autocast)"
                )
        super().__init__(module, **options)
        self._options = options
        self._registered: list[tuple[Any, Callable[..., Any]]] = []
        self._outdated = False
        self._gradskip = gradskip
        gradskip.process_group = self.process_group
        gradskip.on_stop.append(self._outdate)

    def _outdate(self) -> None:
        self._outdated = True

    def _build_anew(self) -> None:
        # Every process has the same weights, so nothing is sent or checked again.
        options = {**self._options, "init_sync": False, "static_graph": self.static_graph}
        ours = ("_options", "_registered", "_gradskip")
        kept = {name: self.__dict__[name] for name in (*_HOOKS, *ours, "training", "require_backward_grad_sync")}
        for name in ("reducer", "logger"):  # removed before the next reducer hooks the same parameters
            self.__dict__.pop(name, None)
        super().__init__(self.module, **options)
        self.__dict__.update(kept, _outdated=False)
        for state, hook in self._registered:
            super().register_comm_hook(state, hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; gradients of the backward pass are averaged over the processes."""
        if self._outdated:
            self._build_anew()
        return super().forward(*args, **kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook as in torch, and again after every stop.

        Its state must not depend on the buckets' shapes; UserError for PowerSGD's, which does.
        """
        if isinstance(state, PowerSGDState):
            raise UserError("PowerSGD keeps what it knows of buckets that a stop changes: register another hook")
        if self._outdated:
            self._build_anew()
        super().register_comm_hook(state, hook)
        self._registered.append((state, hook))

    def join_hook(self, **kwargs: Any) -> Any:
        """Return torch's hook for joining processes; UserError while a stop may come, for it needs every process."""
        if self._outdated or self._gradskip.can_stop_more():
            raise UserError(
                "join() lets processes end one by one, and a stop needs all of them: give every process as many "
                f"batches (drop_last=True), or switch the rule off ({OFF_VARIABLE})"
            )
        return super().join_hook(**kwargs)
