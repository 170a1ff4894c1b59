"""Detection of inputs of stopped layers that need a gradient, in the first forward pass after a stop.

Adversarial training and ``enable_input_require_grads`` of transformers create such inputs. The backward pass then runs
through the whole stopped prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradskip.execution_order import ModelTrace, OwnedHooks, mask_of, tensors_of


class InputGradientCheck(OwnedHooks):
    """Forward hooks on modules with nothing that trains in or before them; inert on copies of the model.

    Args:
        found: method called with the module's input or output that needs a gradient, in words; its object is weakly
            referenced.
    """

    def __init__(self, found: Callable[[str], None] | None = None) -> None:
        super().__init__(found)
        self._names: dict[int, str] = {}
        self._still: list[Tensor] = []

    def watch_prefix(
        self, model: nn.Module, parameters: list[Tensor], still: Collection[int], trace: ModelTrace
    ) -> None:
        """Watch the modules for which all own parameters, and all before them, are stopped or frozen.

        Args:
            model: owner of the parameters.
            parameters: by number.
            still: numbers that are stopped or frozen.
            trace: gives the parameters before a module.
        """
        self.remove()
        self._still = [parameters[number] for number in still]
        moving = ~mask_of(still)
        number_of = {id(p): number for number, p in enumerate(parameters)}
        for name, module in model.named_modules():
            own = [number_of.get(id(p)) for p in module.parameters()]
            if not own or None in own or name not in trace.before:
                continue
            if not (mask_of(n for n in own if n is not None) | trace.before[name]) & moving:
                self._names[id(module)] = name or "the model"
                self._handles.append(module.register_forward_hook(self, with_kwargs=True))

    def watch_inputs(self, wrapper: nn.Module) -> None:
        """Watch only the inputs of a model whose inside is compiled."""
        self.remove()
        self._names[id(wrapper)] = "the model"
        self._handles.append(wrapper.register_forward_hook(self, with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks."""
        super().remove()
        self._names.clear()
        self._still = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = self._names.get(id(module))
        if torch.compiler.is_compiling() or name is None or not torch.is_grad_enabled():
            return
        found = self._listener()
        if found is None or any(parameter.requires_grad for parameter in self._still):
            return  # its optimizer was collected, or the user has switched its gradient on since
        for what, value in (("input", (args, kwargs)), ("output", output)):
            needing = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
            if needing and not (what == "output" and name == "the model"):
                if not any(_reaches_parameter(tensor) for tensor in needing):
                    found(f"the {what} of {name}")
                return


def _reaches_parameter(tensor: Tensor) -> bool:
    """Return whether the gradient continues to a parameter of another model that needs it, such as a generator."""
    nodes, known = [tensor.grad_fn], {tensor.grad_fn}
    while nodes:
        node = nodes.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        before = {n for n, _ in node.next_functions if n is not None} - known if node is not None else set()
        known |= before
        nodes.extend(before)
    return False
