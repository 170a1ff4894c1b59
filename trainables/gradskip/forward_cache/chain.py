"""The chain of modules that run one after another; a forward cache may replace the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from trainables.errors import UserError, unknown_name
from trainables.gradskip.layers import unwrap

#: Modules without parameters that compute each sample by itself, the same each time, and never enlarge it.
_ENDS = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink,
    nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_end_prefix(module: nn.Module) -> bool:
    """Return whether a stopped prefix may be extended by this module, which has no parameters.

    Dropout is accepted only where it has no effect: a mask that is drawn once and reused would be another
    regularization. Classes are compared exactly, because a subclass may behave differently.
    """
    kind = type(module)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return kind in _DROPOUTS and (not module.training or module.p == 0)
    if isinstance(module, nn.Flatten):
        return kind is nn.Flatten and module.start_dim >= 1
    return kind in _ENDS and not getattr(module, "return_indices", False)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own model inside DistributedDataParallel (torch's or ours) and torch.compile.

    Raises:
        UserError: a model in DataParallel, which runs copies of it.
    """
    if any(isinstance(part, nn.DataParallel) for part in model.modules()):
        raise UserError(
            "forward cache: the model must not be in DataParallel, which runs copies of it: use DistributedDataParallel"
        )
    return unwrap(model)


def resolve_chain(
    model: nn.Module, chain: Sequence[nn.Module] | Sequence[str] | None
) -> tuple[list[nn.Module], list[str]]:
    """Return the chain's modules and their names in the model.

    Raises:
        UserError: no chain for a model that is not an nn.Sequential, an empty chain, or one with modules of another
            model.
    """
    if chain is None:
        if not _is_sequential(model):
            raise UserError(
                f"forward cache: chain must be given for a model that is no nn.Sequential, got {type(model).__name__}: "
                "list the modules (or their names) that run one after the other from the input on"
            )
        modules = list(_flattened(model))
    else:
        by_name = dict(model.named_modules())
        modules = []
        for entry in chain:
            if isinstance(entry, str) and entry not in by_name:
                raise unknown_name("module of the forward cache's chain", entry, [name for name in by_name if name])
            modules.append(by_name[entry] if isinstance(entry, str) else entry)
    if not modules:
        raise UserError("forward cache: chain must have at least one module, got none")
    names = {id(module): name for name, module in model.named_modules()}
    for module in modules:
        if id(module) not in names:
            raise UserError(f"forward cache: chain must hold modules of the model, got another {type(module).__name__}")
    return modules, [names[id(module)] for module in modules]


def _is_sequential(module: nn.Module) -> bool:
    # A subclass with its own forward may run its children in any way.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flattened(module: nn.Module) -> Iterator[nn.Module]:
    for child in module._modules.values():  # children() would omit a module that occurs twice
        assert child is not None
        if _is_sequential(child):
            yield from _flattened(child)
        else:
            yield child
