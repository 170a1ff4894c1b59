"""Central difference gradient: the slope of the loss along each weight, from two forward passes a weight.

The error against the gradient is of the order of epsilon^2 from the curvature, and of u |L| / epsilon from rounding, u
the precision of the dtype of the loss L.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn
from tqdm import tqdm

from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.gradient_method import Loss, ModelLoss, check_option, matching_names, norm_of
from trainables.gradients.normalised_sgd import NormalisedSGD
from trainables.gradients.perturbations import MEMORY_BYTES, Perturbations
from trainables.gradskip.variables import is_number

#: Seconds after which a long estimate shows how far it is.
SILENT_S = 5.0


def central_difference(
    loss: Loss,
    model: nn.Module,
    epsilon: float = 0.1,
    names: str | Iterable[str] | None = None,
    *,
    memory_bytes: int = MEMORY_BYTES,
) -> dict[str, Tensor]:
    """Return the central difference gradient of a loss by parameter name, each of the parameter's shape.

    The model, its buffers and all generators are afterwards as before. An estimate that takes more than five seconds
    shows on stderr how far it is.

    Args:
        loss: loss(model) is a scalar tensor, regularization terms included.
        model: in the mode in which the loss is meant. Dropout is the same in all evaluations; batch norms in train mode
            use the batch's statistics and do not update their running ones.
        epsilon: half the distance of the two evaluations, > 0.
        names: names or patterns of parameters (``conv*``); None: those that require a gradient.
        memory_bytes: bound on the memory of the changes that are evaluated at once.

    UserError: an epsilon that is not above 0, or too small to change a weight; a loss that is no scalar tensor or does
    not repeat; a name that matches nothing. UserWarning: an epsilon at which rounding dominates, or a loss that
    `torch.func.vmap` cannot treat.
    """
    chosen = matching_names(model, names)
    losses = Perturbations(loss, model, memory_bytes=memory_bytes)
    check_epsilon(epsilon, model, chosen, losses.dtype)
    return estimate(losses, chosen, epsilon, progress=True)


def estimate(
    losses: Perturbations, names: Iterable[str], epsilon: float, *, progress: bool = False
) -> dict[str, Tensor]:
    """Return the central difference gradient from an engine; the inputs are not checked."""
    parameters = {name: losses.model.get_parameter(name) for name in names}
    found = {}
    total = 2 * sum(parameter.numel() for parameter in parameters.values())
    with progress_bar("central differences", total, "loss", shown=progress) as bar:
        for name, parameter in parameters.items():
            count = parameter.numel()
            both = torch.arange(count, device=parameter.device).repeat(2)
            amounts = torch.full((2 * count,), epsilon, dtype=losses.dtype, device=parameter.device)
            amounts[count:].neg_()
            above, below = losses.losses(name, both, amounts, bar.update).chunk(2)
            slopes = (above - below) / (2 * epsilon)
            found[name] = slopes.view(parameter.shape).to(parameter.dtype)
    return found


def progress_bar(work: str, total: int, unit: str, *, shown: bool) -> tqdm[Never]:
    """Return a bar on stderr that appears only when the work takes long."""
    return tqdm(total=total, desc=work, unit=unit, delay=SILENT_S, disable=not shown, leave=False)


def check_epsilon(epsilon: Any, model: nn.Module, names: Iterable[str], loss_dtype: torch.dtype) -> None:
    """Raise UserError for an epsilon that is not above 0 or changes no weight; warn where rounding dominates.

    Rounding of the loss L gives an error of about u |L| / epsilon, u the precision of its dtype; below an epsilon of
    sqrt(u) it was as large as half the gradient on networks in float32.
    """
    check_option("epsilon", epsilon, is_number(epsilon) and epsilon > 0, "a number above 0")
    check_changes_weights("epsilon", epsilon, model, names)
    floor = least_epsilon(loss_dtype)
    if epsilon < floor:
        warnings.warn(
            f"epsilon={epsilon!r} is below {floor:.1g}, where rounding of a loss in {_short(loss_dtype)} is of the "
            "order of the differences: take a larger one, or a model in float64",
            stacklevel=3,
        )


def check_changes_weights(what: str, amount: float, model: nn.Module, names: Iterable[str]) -> None:
    """Raise UserError if an amount of this name is lost where it is added to the largest weight of a parameter."""
    for name in names:
        parameter = model.get_parameter(name).detach()
        largest = parameter.abs().max() if parameter.numel() else torch.zeros(())
        if bool(largest + amount == largest) and largest > 0:
            least = torch.finfo(largest.dtype).eps * float(largest)
            raise UserError(
                f"{what} must be above {least:.1g} to change the weights of {name} ({_short(largest.dtype)}), "
                f"got {amount!r}"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autograd_gradient(loss: Loss, model: nn.Module, names: str | Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the gradient by backpropagation, by parameter name; the model and its ``.grad`` are left as they are.

    Arguments as for `central_difference`.
    """
    leaves = {name: model.get_parameter(name).detach().requires_grad_() for name in matching_names(model, names)}
    function = ModelLoss(loss, model)
    with function.evaluating(), torch.enable_grad():
        grads = torch.autograd.grad(
            function.at(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, grads, strict=True))


def relative_error(estimated: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return |estimate - reference| / |reference|, norms over all parameters of the estimate together."""
    difference = norm_of(estimated[name] - reference[name] for name in estimated)
    return difference / norm_of(reference[name] for name in estimated)


class CentralDifferenceSGD(NormalisedSGD):
    """Descent along central differences.

    Any schedule of torch decays the learning rate and, jointly, epsilon: both keep their ratio.

    Args:
        model: whose parameters are descended.
        lr: length of a step (with ``normalise``), > 0.
        epsilon: half the distance of the two evaluations at the first learning rate, > 0.
        names: names or patterns of parameters; None: those that require a gradient.
        normalise: whether a step has the length ``lr``; otherwise it is lr times the estimate.
        epsilon_follows_lr: whether epsilon decays with the learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        epsilon: float = 0.1,
        *,
        names: str | Iterable[str] | None = None,
        normalise: bool = True,
        epsilon_follows_lr: bool = True,
    ) -> None:
        self._model = model
        self._names = matching_names(model, names)
        self._losses: Perturbations | None = None
        super().__init__(
            [model.get_parameter(name) for name in self._names],
            lr,
            normalise=normalise,
            epsilon=epsilon,
            first_lr=lr,
            epsilon_follows_lr=epsilon_follows_lr,
        )

    @property
    def epsilon(self) -> float:
        """Return epsilon as it is now."""
        group = self.param_groups[0]
        ratio = group["lr"] / group["first_lr"] if group["epsilon_follows_lr"] else 1.0
        return scaled_epsilon(group["epsilon"], ratio, group["params"][0].dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]  # the loss takes the model
        """Take one step and return the loss before it; ``closure(model)`` is the loss, a scalar tensor.

        UserError: as `central_difference`, or no loss. TrainingDiverged: the loss is not finite.
        """
        if closure is None:
            raise UserError("step(loss) needs the loss: a function of the model that returns a scalar tensor")
        losses = Perturbations(closure, self._model, like=self._losses)
        if not math.isfinite(losses.value):
            group = self.param_groups[0]
            way_out = "" if group["normalise"] else f": give normalise=True, or a smaller lr, got {group['lr']:g}"
            raise TrainingDiverged(f"the loss is {float(losses.value)} before a step of CentralDifferenceSGD{way_out}")
        if self._losses is None:
            check_epsilon(self.epsilon, self._model, self._names, losses.dtype)
        self._losses = losses
        for name, slopes in estimate(losses, self._names, self.epsilon).items():
            self._model.get_parameter(name).grad = slopes
        self.take_step()
        return losses.value


def least_epsilon(dtype: torch.dtype) -> float:
    """Return sqrt(u), u the precision of a dtype: below it rounding dominates differences of a loss.

    >>> round(least_epsilon(torch.float32), 6)
    0.000345
    """
    return math.sqrt(torch.finfo(dtype).eps)


def scaled_epsilon(epsilon: float, lr_ratio: float, dtype: torch.dtype) -> float:
    """Return epsilon after the learning rate has become ``lr_ratio`` of its first value; it stays above its floor.

    >>> scaled_epsilon(0.01, 0.5, torch.float64)
    0.005
    >>> scaled_epsilon(0.01, 0.0, torch.float32) == least_epsilon(torch.float32)
    True
    """
    return max(epsilon * lr_ratio, min(epsilon, least_epsilon(dtype)))
