"""The set of stopped and frozen parameters, each with its reason.

Nothing else in Gradient-Skip writes ``requires_grad``, ``grad``, the optimizer's state of a parameter or hooks that
change what the stopped prefix does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Flag, auto
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainables.gradskip.claims import Claim
from trainables.gradskip.frozen_prefix import FrozenPrefix
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.settings import Settings


class Reason(Flag):
    """Reason why a parameter does not train."""

    USER = auto()
    """The user has switched its ``requires_grad`` off; it trains again when the user switches it on."""
    RULE = auto()
    """The rule has stopped it."""
    UPSTREAM = auto()
    """It precedes stopped layers, and `CAC_PREFIX_AUTOGRAD=0` lets no gradient through them."""
    KEPT = auto()
    """Stopped, but its ``requires_grad`` stays on: a loss that needs no gradient at all raises in ``backward()``."""


#: Stopped parameters that are checked in one step, where they cannot move whatever their gradient is.
LOOKS_A_STEP = 256

#: Reasons that come from Gradient-Skip itself.
OURS = Reason.RULE | Reason.UPSTREAM


class Stops:
    """Set of the stopped and frozen parameters, by number, each with its reason.

    A stop does not include a parameter that the user has frozen: it keeps the user's reason alone. A parameter that the
    rule has stopped stays stopped, whatever the user does to its ``requires_grad``.

    Args:
        optimizer: owner of the parameters.
        numbering: of the parameters, with their trace once it is known.
        settings: of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, numbering: Numbering, settings: Settings) -> None:
        self._reasons: dict[int, Reason] = {}
        self.user_changes = 0
        """Number of checks that found parameters newly frozen or unfrozen by the user."""
        self.unfrozen: set[int] = set()
        """Numbers of the parameters that the user was found to have unfrozen."""
        self._optimizer = optimizer
        self._numbering = numbering
        self._parameters = parameters = numbering.parameters
        self._settings = settings
        self._prefix = FrozenPrefix(numbering.model, parameters, settings)
        self._still: list[Tensor] = []  # the parameters that we have stopped
        self._looked_at = 0  # how many of them were checked since the first
        self._claim = Claim(self._prefix.release)
        self.switched_on, self.left_off = self._take()
        """Numbers of what an earlier optimizer had stopped, and how many more of it this optimizer does not have."""
        self._frozen: list[Tensor] = []  # by the user, if the prefix's treatment depends on it
        self._moving: list[tuple[list[Tensor], list[Tensor]]] = []  # each group's parameters, and those not stopped
        self.look_at_user()

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def reasons(self) -> dict[int, Reason]:
        """Return the reasons of the stopped and frozen parameters, by number, as of now; changes nothing."""
        held = {n: reason for n, reason in self._reasons.items() if reason & OURS}
        frozen = (n for n, p in enumerate(self._parameters) if n not in held and not p.requires_grad)
        return {**held, **dict.fromkeys(frozen, Reason.USER)}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the parameters that Gradient-Skip has stopped, ascending."""
        return tuple(sorted(n for n, reason in self._reasons.items() if reason & OURS))

    @property
    def any(self) -> bool:
        """Return whether Gradient-Skip has stopped anything."""
        return bool(self._still)

    @property
    def all(self) -> bool:
        """Return whether stops have left nothing to train."""
        return self.any and len(self._reasons) == len(self._parameters)

    @property
    def user_holds(self) -> bool:
        """Return whether the user has frozen anything."""
        return any(reason & Reason.USER for reason in self._reasons.values())

    @property
    def kept(self) -> Tensor | None:
        """Return the stopped parameter that still requires a gradient, so that `backward()` has a graph, or None."""
        return next((self._parameters[n] for n in self._reasons if self._is_kept(n)), None)

    def user_trains(self, number: int) -> bool:
        """Return whether the user trains the parameter, stopped or not."""
        return not self._reasons.get(number, Reason(0)) & Reason.USER

    def _is_kept(self, number: int) -> bool:
        return bool(self._reasons.get(number, Reason(0)) & Reason.KEPT)

    def moves(self, number: int) -> bool:
        """Return whether an optimizer step may change the parameter, as of the last check of the user's changes."""
        return number not in self._reasons

    def holds(self, number: int) -> bool:
        """Return whether Gradient-Skip has stopped the parameter."""
        return bool(self._reasons.get(number, Reason(0)) & OURS)

    def of(self, reason: Reason) -> tuple[int, ...]:
        """Return the numbers with this reason, ascending."""
        return tuple(sorted(n for n, known in self._reasons.items() if known & reason))

    def left_upstream(self) -> tuple[int, ...]:
        """Return the numbers of running parameters with gradients through stopped layers; empty without a trace."""
        if self._numbering.trace is None:
            return ()
        return tuple(sorted(n for n in self._numbering.trace.left_upstream(self.numbers) if self.moves(n)))

    # --- changes ----------------------------------------------------------------------------------------------------

    def look_at_user(self) -> None:
        """Note what the user has frozen or unfrozen since the last check, and stop stopped parameters again."""
        changed = woken = False
        for number, parameter in enumerate(self._parameters):
            reason = self._reasons.get(number)
            if reason is None:
                if not parameter.requires_grad:
                    self._reasons[number] = Reason.USER
                    changed = True
            elif reason == Reason.USER:
                if parameter.requires_grad:
                    del self._reasons[number]
                    self.unfrozen.add(number)
                    changed = True
            elif parameter.requires_grad != self._is_kept(number):
                woken = True
        self.user_changes += changed
        if (changed or woken) and self.any:
            self._arrange()

    def _take(self) -> tuple[list[int], int]:
        """Take the parameters from earlier optimizers, and switch on what they or this one have switched off.

        Returns:
            numbers of those that were off, and how many others the earlier optimizers leave switched off.
        """
        taken, left = self._claim.take(self._parameters)
        off = [number for number in taken if not self._parameters[number].requires_grad]
        for number in off:
            self._parameters[number].requires_grad_(True)
        return off, left

    def stop(self, numbers: Iterable[int]) -> None:
        """Stop these parameters for the rule, and what `CAC_PREFIX_AUTOGRAD=0` stops with them."""
        self.look_at_user()
        for number in numbers:
            if self.user_trains(number):
                self._reasons[number] = self._reasons.get(number, Reason(0)) | Reason.RULE
        self._arrange()

    def follow(self) -> None:
        """Stop the parameters that have taken the numbers of stopped ones."""
        self._prefix.follow()
        self.look_at_user()
        self._arrange()

    def _arrange(self) -> None:
        """Apply the reasons to the parameters, the optimizer's state and the prefix."""
        self._take_upstream()
        self._keep_one()
        held = self.numbers
        for number in held:
            parameter = self._parameters[number]
            if parameter.requires_grad != self._is_kept(number):
                parameter.requires_grad_(self._is_kept(number))
            self._claim.add(parameter)
            if not self._settings.reference:
                parameter.grad = None
                self._optimizer.state.pop(parameter, None)  # momentum of a layer that never moves again
        self._prefix.treat(held, self.of(Reason.USER), self._numbering.trace, cut=self.kept is None)
        self._still = [self._parameters[number] for number in held]
        treated = not self._settings.prefix_autograd or self._settings.norm_statistics == "hold"
        self._frozen = [self._parameters[n] for n in self.of(Reason.USER)] if treated else []
        self._moving = []

    def _take_upstream(self) -> None:
        if self._settings.prefix_autograd or self._numbering.trace is None:
            return
        for number in self._numbering.trace.left_upstream(self.numbers):
            if self.moves(number):
                self._reasons[number] = Reason.UPSTREAM

    def _keep_one(self) -> None:
        kept = set(self.of(Reason.KEPT))
        for number in kept:
            self._reasons[number] &= ~Reason.KEPT
        held = self.numbers
        if held and not self._settings.reference and len(self._reasons) == len(self._parameters):
            ranks = [0] * len(self._parameters) if self._numbering.trace is None else self._numbering.trace.ranks
            # A parameter that the loss reaches was kept before, or has a gradient in the step that stops everything.
            reached = [n in kept or self._parameters[n].grad is not None for n in range(len(self._parameters))]
            last = max(held, key=lambda n: (n in kept, reached[n], ranks[n], n))
            self._reasons[last] |= Reason.KEPT

    # --- every step -------------------------------------------------------------------------------------------------

    def enforce(self, *, whole: bool) -> list[int]:
        """Drop gradients of stopped parameters, which come from a graph built before the stop or were set by hand.

        Args:
            whole: check all of them. Else check the next `LOOKS_A_STEP`, which is enough where `take_out` excludes them
                from the step: a gradient then costs memory and compute time, but changes nothing.

        Returns:
            numbers of stopped parameters whose ``requires_grad`` the user had switched on; it is off again.
        """
        still = self._still
        if not whole and len(still) > LOOKS_A_STEP:
            begin = self._looked_at if self._looked_at < len(still) else 0
            self._looked_at = begin + LOOKS_A_STEP
            still = still[begin : self._looked_at]
        for parameter in still:
            if parameter.grad is not None:
                return self._enforce_all()
        for parameter in self._frozen:
            if parameter.requires_grad:
                return self._enforce_all()
        return []

    def _enforce_all(self) -> list[int]:
        before = set(self.numbers)
        woken = [n for n in sorted(before) if self._parameters[n].requires_grad and not self._is_kept(n)]
        woken = [n for n in woken if self._claim.has(self._parameters[n])]  # else another optimizer has taken it
        for parameter in self._still:
            parameter.grad = None
        self.look_at_user()
        # A parameter that the user switched on, but that can get no gradient, is stopped with the others.
        woken += sorted(set(self.numbers) - before)
        return woken

    def take_out(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return two functions: one takes stopped parameters out of the groups for a step, the other restores them."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        if len(self._moving) != len(groups) or any(a is not b for a, (b, _) in zip(whole, self._moving, strict=True)):
            held = {id(parameter) for parameter in self._still}
            self._moving = [(params, [p for p in params if id(p) not in held]) for params in whole]
        moving = [params for _, params in self._moving]

        def fill(lists: list[list[Tensor]]) -> None:
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params

        return partial(fill, moving), partial(fill, whole)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[int]]:
        """Return the numbers that Gradient-Skip has stopped, by reason.

        Parameters frozen by the user are not included: the user has to freeze them again.
        """
        return {
            str(reason.name).lower(): list(self.of(reason)) for reason in (Reason.RULE, Reason.UPSTREAM, Reason.KEPT)
        }

    def load_state_dict(self, state: Mapping[str, list[int]], stopped: Collection[int]) -> None:
        """Stop the parameters of the state, and no others except those that the user has frozen.

        Args:
            state: result of `state_dict`.
            stopped: further numbers that the rule has stopped since.
        """
        # If this or an earlier optimizer has stopped parts of the model, they do not count as frozen by the user.
        self._take()
        self._reasons.clear()
        self._still, self._frozen, self._moving = [], [], []
        self._prefix.release()
        # Parameters stopped in the state are stopped here, also in a copy of the model, where they are already off.
        self._reasons.update(dict.fromkeys(state["upstream"], Reason.UPSTREAM))
        self._reasons.update(dict.fromkeys(state["rule"], Reason.RULE))
        for number in state["kept"]:
            self._reasons[number] = self._reasons.get(number, Reason.RULE) | Reason.KEPT
        self.stop(stopped)
