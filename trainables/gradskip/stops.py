"""The set of stopped and frozen parameters, each with its reason.

Nothing else in Gradient-Skip writes ``requires_grad``, ``grad``, the optimizer's state of a parameter or hooks that
change what the stopped prefix does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from trainables.gradskip.execution_order import InertInCopies, ModelTrace, hook, mask_of
from trainables.gradskip.layers import has_running_statistics
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.replay import Blueprint, Unit
from trainables.gradskip.settings import Settings


class Reason(Flag):
    """Reason why a parameter does not train."""

    USER = auto()  # the user has switched its ``requires_grad`` off; it trains again when the user switches it on
    RULE = auto()  # the rule has stopped it
    UPSTREAM = auto()  # it precedes stopped layers, and `CAC_PREFIX_AUTOGRAD=0` lets no gradient through them
    KEPT = auto()
    """Stopped, but its ``requires_grad`` stays on: a loss that needs no gradient at all raises in ``backward()``."""


# --- The stopped and frozen parameters of one optimizer ---------------------------------------------------------------

#: The prefix of the latest optimizer that has stopped a parameter: it was not the user who switched that off.
_STOPPED_IN = WeakIdKeyDictionary()
#: The prefix of the latest optimizer that holds all norms of the model, by that optimizer's parameters.
_HOLDS_FOR = WeakIdKeyDictionary()

#: Stopped parameters that are checked in one step, where they cannot move whatever their gradient is.
LOOKS_A_STEP = 256

#: Reasons that come from Gradient-Skip itself.
OURS = Reason.RULE | Reason.UPSTREAM
_NONE = Reason(0)


def switch_on_again(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Switch on what other optimizers have stopped and this one lacks, for one that is made anew; return its names."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = model.named_parameters()
    left = [(name, p) for name, p in named if p in _STOPPED_IN and not p.requires_grad and id(p) not in own]
    for _, parameter in left:
        parameter.requires_grad_(True)
    return [name for name, _ in left]


class Stops:
    """Set of the stopped and frozen parameters, by number, each with its reason.

    A stop does not include a parameter that the user has frozen: it keeps the user's reason alone. A parameter that the
    rule has stopped stays stopped, whatever the user does to its ``requires_grad``.
    """

    def __init__(self, optimizer: Optimizer, numbering: Numbering, settings: Settings) -> None:
        self._optimizer = optimizer
        self._numbering = numbering
        self._parameters = numbering.parameters
        self._settings = settings
        self._reasons = [_NONE] * len(numbering.parameters)
        self.user_changes = 0
        self._is_let_go = False  # until the next step
        self._prefix = FrozenPrefix(numbering.model, numbering.parameters, settings)
        self._stopper = weakref.ref(self._prefix)  # whose hooks keep it alive
        self.switched_on = self._switch_on()
        self._still: list[Tensor] = []  # the parameters that we have stopped
        self._looked_at = 0  # how many of them were checked since the first
        self._frozen: list[Tensor] = []  # by the user, if the prefix's treatment depends on it
        self._moving: list[tuple[list[Tensor], list[Tensor]]] = []  # each group's parameters, and those not stopped
        self._hold_all_norms()
        self.look_at_user()

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def reasons(self) -> dict[int, Reason]:
        """Return the reasons of the stopped and frozen parameters, by number, as of now; changes nothing."""
        found = {}
        for number, (reason, parameter) in enumerate(zip(self._reasons, self._parameters, strict=True)):
            if reason & OURS or not parameter.requires_grad:
                found[number] = reason if reason & OURS else Reason.USER
        return found

    def of(self, reason: Reason) -> tuple[int, ...]:
        return tuple(number for number, known in enumerate(self._reasons) if known & reason)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the parameters that Gradient-Skip has stopped, ascending."""
        return self.of(OURS)

    @property
    def any(self) -> bool:
        return bool(self._still)

    @property
    def all(self) -> bool:
        """Return whether stops have left nothing to train."""
        return self.any and all(self._reasons)

    @property
    def user_holds(self) -> bool:
        return Reason.USER in self._reasons

    @property
    def reach_inputs(self) -> bool:
        """Return whether the backward pass runs on through stopped layers for reentrant activation checkpointing."""
        return self._prefix.reaches_inputs

    def user_trains(self, number: int) -> bool:
        return self._reasons[number] != Reason.USER  # which never comes with another

    def moves(self, number: int) -> bool:
        """Return whether an optimizer step may change the parameter, as of the last check of the user's changes."""
        return not self._reasons[number]

    def holds(self, number: int) -> bool:
        return bool(self._reasons[number] & OURS)

    def _needs_gradient(self, number: int) -> bool:
        """Return whether a stopped parameter goes on getting one, so that `backward()` has a graph."""
        return bool(self._reasons[number] & Reason.KEPT)

    def left_upstream(self) -> tuple[int, ...]:
        """Return the numbers of running parameters with gradients through stopped layers; empty without a trace."""
        if self._numbering.trace is None:
            return ()
        return tuple(sorted(n for n in self._numbering.trace.left_upstream(self.numbers) if self.moves(n)))

    # --- changes ----------------------------------------------------------------------------------------------------

    def look_at_user(self) -> None:
        """Note what the user has frozen or unfrozen since the last check, and stop stopped parameters again."""
        if self._is_let_go:
            return
        changed = woken = False
        for number, parameter in enumerate(self._parameters):
            if self.holds(number):
                woken |= parameter.requires_grad != self._needs_gradient(number)
            elif parameter.requires_grad != self.moves(number):
                changed = True
                self._reasons[number] = _NONE if parameter.requires_grad else Reason.USER
        self.user_changes += changed
        if (changed or woken) and self.any:
            self._arrange()

    def _switch_on(self) -> list[int]:
        """Switch on what an earlier optimizer or this one has stopped; return the numbers of those that were off."""
        off = []
        for number, parameter in enumerate(self._parameters):
            stopper, holder = _STOPPED_IN.pop(parameter, None), _HOLDS_FOR.pop(parameter, None)
            for found in (stopper, holder):
                if found is not None and (prefix := found()) is not None:
                    prefix.release()
            if stopper is not None and not parameter.requires_grad:
                parameter.requires_grad_(True)
                off.append(number)
        return off

    def let_go(self) -> None:
        """Let everything train that the user does not freeze, until the next step; `reasons` and states stay."""
        self._switch_on()
        self._is_let_go = True

    def _hold_all_norms(self) -> None:
        """Hold what `CAC_NORM_STATISTICS=hold_all` holds whether anything has stopped or not."""
        if self._settings.norm_statistics == "hold_all":
            self._prefix.treat((), (), None, cut=False)
            for parameter in self._parameters:
                _HOLDS_FOR[parameter] = self._stopper

    def stop(self, numbers: Iterable[int]) -> None:
        """Stop these parameters for the rule, and what `CAC_PREFIX_AUTOGRAD=0` stops with them."""
        self._is_let_go = False
        self.look_at_user()
        for number in numbers:
            if self.user_trains(number):
                self._reasons[number] |= Reason.RULE
        self._arrange()

    def _arrange(self) -> None:
        """Apply the reasons to the parameters, the optimizer's state and the prefix."""
        for number in () if self._settings.prefix_autograd else self.left_upstream():
            self._reasons[number] = Reason.UPSTREAM
        self._keep_one()
        held = self.numbers
        self.switch_off()
        for number in held:
            parameter = self._parameters[number]
            _STOPPED_IN[parameter] = self._stopper
            if not self._settings.reference:
                parameter.grad = None
                if not hasattr(self._optimizer, "eval"):  # schedule-free ones evaluate averages that they keep there
                    self._optimizer.state.pop(parameter, None)  # momentum of a layer that never moves again
        self._prefix.treat(held, self.of(Reason.USER), self._numbering.trace, cut=not self.of(Reason.KEPT))
        self._still = [self._parameters[number] for number in held]
        self._frozen = [self._parameters[n] for n in self.of(Reason.USER)] if self._prefix.depends_on_stops else []
        self._moving = []

    def switch_off(self) -> None:
        """Switch off ``requires_grad`` of what is stopped, but of what keeps a graph for `backward()`."""
        for number in () if self._is_let_go else self.numbers:
            if self._parameters[number].requires_grad != self._needs_gradient(number):
                self._parameters[number].requires_grad_(self._needs_gradient(number))

    def _keep_one(self) -> None:
        kept = self.of(Reason.KEPT)
        for number in kept:
            self._reasons[number] &= ~Reason.KEPT
        held = self.numbers
        if held and not self._settings.reference and all(self._reasons):
            ranks = [0] * len(self._parameters) if self._numbering.trace is None else self._numbering.trace.ranks
            # A parameter that the loss reaches was kept before, or has a gradient in the step that stops everything.
            reached = [n in kept or parameter.grad is not None for n, parameter in enumerate(self._parameters)]
            last = max(held, key=lambda n: (n in kept, reached[n], ranks[n], n))
            self._reasons[last] |= Reason.KEPT

    # --- every step -------------------------------------------------------------------------------------------------

    def enforce(self, *, whole: bool) -> list[int]:
        """Drop gradients of stopped parameters, which come from a graph built before the stop or were set by hand.

        Returns the numbers of stopped parameters that the user had switched on; they are off again. Without ``whole``
        only the next `LOOKS_A_STEP` are checked, which is enough where `moving_in` leaves them out of the step.
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
        woken = [n for n in sorted(before) if self._parameters[n].requires_grad and not self._needs_gradient(n)]
        # Another optimizer may have taken it.
        woken = [n for n in woken if _STOPPED_IN.get(self._parameters[n]) is self._stopper]
        for parameter in self._still:
            parameter.grad = None
        self._is_let_go = False
        self.look_at_user()
        # A parameter that the user switched on, but that can get no gradient, is stopped with the others.
        woken += sorted(set(self.numbers) - before)
        return woken

    def moving_in(self, groups: list[list[Tensor]]) -> list[list[Tensor]]:
        if len(self._moving) != len(groups) or any(a is not b for a, (b, _) in zip(groups, self._moving, strict=True)):
            held = {id(parameter) for parameter in self._still}
            self._moving = [(params, [p for p in params if id(p) not in held]) for params in groups]
        return [params for _, params in self._moving]

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[int]]:
        """Return the reasons by number, without what the user has frozen."""
        return {"reasons": [(reason & ~Reason.USER).value for reason in self._reasons]}

    def load_state_dict(self, state: Mapping[str, list[int]], stopped: Collection[int]) -> None:
        """Stop the parameters of a state, ``stopped`` as well, and no others except those that the user has frozen."""
        # If this or an earlier optimizer has stopped parts of the model, they do not count as frozen by the user.
        self._switch_on()
        self._still, self._frozen, self._moving = [], [], []
        self._prefix.release()
        # Parameters stopped in the state are stopped here, also in a copy of the model, where they are already off.
        self._reasons = [Reason(value) for value in state["reasons"]]
        self._hold_all_norms()
        self.stop(stopped)


# --- The layers that a rule may watch ---------------------------------------------------------------------------------


def is_watched(unit: Unit, numbering: Numbering, stops: Stops) -> bool:
    """Return whether a rule may watch a layer: the user trains it, and a variance has more than one element."""
    if numbering.settings.reference:
        return True
    least = 2 if numbering.settings.mode == "auto" else 0
    return any(stops.user_trains(n) and numbering.parameters[n].numel() >= least for n in unit.watched)


def blueprint_of(numbering: Numbering, stops: Stops, counts: Callable[[Unit], bool] | None = None) -> Blueprint:
    """Return what a rule needs to know of the model; ``counts`` says which layers it watches (None: `is_watched`)."""
    plan = numbering.plan(counts or partial(is_watched, numbering=numbering, stops=stops))
    stoppable = plan.units if numbering.settings.reference else plan.without_last(stops.user_trains)
    return Blueprint(
        plan=plan,
        stoppable=len(stoppable),
        names=None if numbering.names is None else tuple(numbering.names),
        single_precision=not any(p.dtype == torch.float64 for p in numbering.parameters),
    )


# --- Fixed running statistics of norms, evaluation mode, and detached outputs, in a stopped prefix -------------------


class PrefixHook(InertInCopies):
    """Hook on a module; inert on copies of the model, which are not trained or have another optimizer."""

    def __init__(self, act: Callable[..., Any] | None = None, keeper: FrozenPrefix | None = None) -> None:
        self._act = act
        self._keeper = keeper  # alive as long as the hook, to remove it when its optimizer is gone

    def __call__(self, *args: Any) -> Any:
        return None if self._act is None else self._act(*args)


def detach_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Detach a module's output (forward hook), so that nothing before it is kept for a backward pass."""
    if isinstance(output, nn.utils.rnn.PackedSequence):
        return output._replace(data=output.data.detach())
    return tree_map_only(Tensor, Tensor.detach, output)


#: Hooks by which transformers and PEFT make what enters the first block need a gradient, so that reentrant activation
#: checkpointing computes those of weights behind it; nobody reads it.
_ASK_FOR_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")


#: What such hooks have asked a gradient for, and would need one if nothing were stopped.
LET_GO_OF = WeakIdKeyDictionary()


def let_go_of_leaf(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Detach a module's output (forward hook) if it needs a gradient only because somebody has asked for it."""
    if not (isinstance(output, Tensor) and output.requires_grad and output.is_leaf) or isinstance(output, nn.Parameter):
        return None
    found = output.detach()
    LET_GO_OF[found] = True
    return found


def _checkpoints_reentrantly(model: nn.Module) -> bool:
    """Return whether a model of transformers computes activations again by the form that needs such a gradient."""
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in model.modules()
                 if getattr(m, "gradient_checkpointing", False)]  # fmt: skip
    return any(getattr(one, "keywords", {}).get("use_reentrant") is not False for one in functions)


class HeldNorm:
    """Make a norm use its running statistics (forward pre-hook), whatever ``model.train()`` has set since.

    Where the momentum is another than before (`torch.optim.swa_utils.update_bn` sets None) and ``trains`` says that the
    model does, they are collected.
    """

    def __init__(self, norm: Any, trains: Callable[[], bool]) -> None:
        self._trains = trains
        self._momentum = getattr(norm, "momentum", None)

    def __call__(self, norm: Any, _args: Any) -> None:
        norm.training = getattr(norm, "momentum", None) != self._momentum and self._trains()


#: Modules of transformers that are being called and would compute their activations again, were they in training mode.
_NOT_CHECKPOINTED: list[nn.Module] = []


class EvalMode:
    """Put a module into evaluation mode (forward pre-hook), whatever ``model.train()`` has set since."""

    acted = False  # whether it was in training mode

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if module.training:
            module.training, self.acted = False, True
        if getattr(module, "gradient_checkpointing", False):
            _NOT_CHECKPOINTED.append(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Note that a call has ended (forward hook), of whatever outcome."""
        if module in _NOT_CHECKPOINTED:
            del _NOT_CHECKPOINTED[_NOT_CHECKPOINTED.index(module) :]


def checkpointed_region() -> Any:
    """Return what stands for the operations that activation checkpointing would compute again together with this one.

    None: it would not. Reentrant checkpoints are not seen, for what runs in them is not recorded.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return hooks[0]
    return _NOT_CHECKPOINTED[-1] if _NOT_CHECKPOINTED else None


def is_evaluated(module: nn.Module) -> bool:
    """Return whether a prefix keeps the module in evaluation mode."""
    calls = (call for _, call in module._forward_pre_hooks.items())  # the values lack ours
    return any(isinstance(call, PrefixHook) and isinstance(call._act, (EvalMode, HeldNorm)) for call in calls)


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A module that may be treated."""

    name: str
    module: nn.Module
    above: tuple[nn.Module, ...]  # the modules that it is in, the nearest first
    given: int
    """Mask of the parameters below it that the optimizer has."""
    others: tuple[Tensor, ...]
    """Those that it lacks, such as the weights that adapters are on."""
    around: int
    """`given`, of a module without any parameters that of the nearest one above with some, but the model."""
    around_others: tuple[Tensor, ...]
    """The same for `others`."""


class FrozenPrefix:
    """The modules of a stopped prefix, treated as the settings ask.

    - ``norm_statistics="hold"``: a norm with nothing that trains in or before it keeps its running statistics, and
      normalises by them in training too. (If training used the batch's own statistics while these are fixed, evaluation
      would permanently use statistics from before the stop.)
    - ``norm_statistics="hold_all"``: so does every norm of the model, whether anything has stopped or not.
    - ``prefix_mode="eval"``: norms as with ``hold``. A module with parameters, of which none trains any more and none
      before it, is in evaluation mode, and so is what has no parameters and is in it, or read by it alone (a dropout
      behind embeddings): one that the user has frozen, too (the weights that adapters are on), once anything has
      stopped. The model itself, whose outputs may depend on its mode, is not.
    - ``prefix_autograd=False``: outputs of modules with nothing that trains in or before them are detached, so that no
      activation before them is kept. For a module that is called twice, or shares its weight with one that is,
      everything that runs before any of its calls counts as before it.
    - Whatever the settings, a gradient of inputs that is asked for on behalf of activation checkpointing alone is not
      computed once anything has stopped: the backward pass would run on to them.
    """

    #: Whether the backward pass runs on to inputs because reentrant activation checkpointing needs that.
    reaches_inputs = False

    def __init__(self, model: nn.Module | None, parameters: Sequence[Tensor], settings: Settings) -> None:
        self._evaluate = settings.prefix_mode == "eval"
        self._hold = settings.norm_statistics == "hold" or self._evaluate
        self._hold_all = settings.norm_statistics == "hold_all"
        self._detach = not settings.prefix_autograd
        self._held: dict[nn.Module, tuple[RemovableHandle, bool | None]] = {}
        self._evaluated: dict[nn.Module, tuple[list[RemovableHandle], EvalMode]] = {}
        self._cut: dict[nn.Module, RemovableHandle] = {}
        self._let_go: list[RemovableHandle] = []
        self._model = model
        self._members: list[_Member] = []
        #: Mask of parameters that several modules have: without a trace it is unknown which of these runs first.
        self._shared = 0
        if model is not None and (self.depends_on_stops or self._hold_all):
            number_of = {id(p): number for number, p in enumerate(parameters)}
            self._members = [m for m in _members(model, number_of) if self._may_treat(m)]
            named = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
            self._shared = mask_of(number for key, number in number_of.items() if named[key] > 1)

    @property
    def depends_on_stops(self) -> bool:
        """Return whether the treatment depends on what is stopped or frozen."""
        return self._hold or self._detach

    def _may_treat(self, member: _Member) -> bool:
        if has_running_statistics(member.module):
            return True
        return self._evaluate or bool(self._detach and member.given)

    def treat(self, stopped: Collection[int], frozen: Collection[int], trace: ModelTrace | None, *, cut: bool) -> None:
        """Treat the modules of this prefix, and undo the treatment of all others.

        Numbers of the stopped parameters, and of those that the user does not train: a gradient may have to pass
        through them. Without a trace a module's own parameters decide. Outputs are detached if ``cut``: not while a
        gradient must still reach the last parameter.
        """
        self._treat(stopped, frozen, trace, cut=cut, hold_all=self._hold_all)

    def release(self) -> None:
        """Undo everything, before another state is loaded or another optimizer has the parameters."""
        self._treat((), (), None, cut=False, hold_all=False)

    def _treat(
        self, stopped: Collection[int], frozen: Collection[int], trace: ModelTrace | None, *, cut: bool, hold_all: bool
    ) -> None:
        stops = mask_of(stopped)
        moving = ~(stops | mask_of(frozen))
        self._let_go_of_inputs(bool(stops))
        prefix = mask_of(n for n in stopped if trace is not None and not trace.upstream[n] & moving)
        for member in self._members:  # a module before those in it, whose modes come back to its own
            given, around = member.given, member.around
            seen = trace is not None and member.name in trace.before
            before = trace.before[member.name] if trace is not None and seen else 0
            known = trace is not None or not (given | around) & self._shared
            trains = not known or bool((given | before) & moving) or _any_trains(member.others)
            stands = False
            if self._evaluate and stops:
                # Without a call of it, it is unknown whether something that trains is before what the user has frozen.
                around_trains = not known or bool(around & (moving if seen else ~stops) or before & moving)
                is_inside = bool(around or (seen and member.around_others))
                stands = is_inside and not around_trains and not _any_trains(member.around_others)
                if trace is not None and not (given or member.others):
                    stands |= bool(trace.behind.get(member.name, 0) & prefix) and not before & moving
            if has_running_statistics(member.module):
                still = self._hold and not trains and bool((given | before) & stops)
                self._hold_still(member, hold_all or still or stands)
            elif self._evaluate:
                self._set_mode(member, stands and member.name != "")
            if self._detach:
                self._detach_output(member.module, cut and not trains and bool(given & stops))

    def _let_go_of_inputs(self, wanted: bool) -> None:
        for handle in self._let_go:
            handle.remove()
        self._let_go, self.reaches_inputs = [], False
        if wanted and self._model is not None:
            hooks = ((module, call) for module in self._model.modules() for call in module._forward_hooks.values())
            asked = dict.fromkeys(m for m, call in hooks if getattr(call, "__name__", "") in _ASK_FOR_GRADIENTS)
            self.reaches_inputs = bool(asked) and _checkpoints_reentrantly(self._model)
            if not self.reaches_inputs:
                self._let_go = [hook(module, PrefixHook(let_go_of_leaf, self), after=True) for module in asked]

    def _trains(self, above: Sequence[nn.Module]) -> bool:
        """Return the mode that the user has set, by the nearest of these modules that is not treated."""
        return next(module for module in above if module not in self._evaluated).training

    def _hold_still(self, member: _Member, wanted: bool) -> None:
        module, trains = member.module, partial(self._trains, member.above)
        if wanted and module not in self._held:
            own_mode = module.training != trains()  # the user keeps this norm in another mode than its parent
            holding = hook(module, PrefixHook(HeldNorm(module, trains), self))
            self._held[module] = (holding, module.training if own_mode else None)
        elif not wanted and module in self._held:
            handle, mode = self._held.pop(module)
            handle.remove()
            module.training = trains() if mode is None else mode

    def _set_mode(self, member: _Member, wanted: bool) -> None:
        module = member.module
        if wanted and module not in self._evaluated:
            mode = EvalMode()
            handles = [hook(module, PrefixHook(mode, self))]
            if hasattr(module, "gradient_checkpointing"):
                handles.append(hook(module, PrefixHook(mode.leave, self), after=True, always_call=True))
            self._evaluated[module] = handles, mode
        elif not wanted and module in self._evaluated:
            handles, mode = self._evaluated.pop(module)
            for handle in handles:
                handle.remove()
            if mode.acted:
                module.training = self._trains(member.above)

    def _detach_output(self, module: nn.Module, wanted: bool) -> None:
        if wanted and module not in self._cut:
            self._cut[module] = hook(module, PrefixHook(detach_output, self), after=True)
        elif not wanted and module in self._cut:
            self._cut.pop(module).remove()


def _any_trains(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _members(model: nn.Module, number_of: Mapping[int, int]) -> Iterator[_Member]:
    modules = dict(model.named_modules())
    givens: dict[str, int] = {}
    others: dict[str, tuple[Tensor, ...]] = {}
    for name, module in modules.items():
        parameters = list(module.parameters())
        others[name] = tuple(p for p in parameters if id(p) not in number_of)
        givens[name] = mask_of(number_of[id(p)] for p in parameters if id(p) in number_of)
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        nearest = next((one for one in (name, *above[:-1]) if givens[one] or others[one]), name)
        yield _Member(
            name=name, module=module, above=tuple(modules[one] for one in above), given=givens[name],
            others=others[name], around=givens[nearest], around_others=others[nearest],
        )  # fmt: skip
