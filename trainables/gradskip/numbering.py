"""Numbers of an optimizer's parameters, their execution order, and the layers among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip.execution_order import ExecutionRecorder, ModelTrace, trace_model, warn_unseen
from trainables.gradskip.layers import make_plan, numbered, wrappers
from trainables.gradskip.replay import LayerPlan, Unit
from trainables.gradskip.settings import Settings

_PARAMS = itemgetter("params")


class Numbering:
    """Numbers of an optimizer's parameters, and their names in a module; the settings define which are layers."""

    def __init__(
        self, groups: list[dict[str, Any]], model: nn.Module | None, settings: Settings,
        named_in: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.settings = settings
        self.parameters, self.names = numbered(groups, model)
        if named_in is not None and self.names is not None:
            known = {id(parameter): name for name, parameter in named_in.named_parameters()}
            self.names = [known.get(id(p), name) for p, name in zip(self.parameters, self.names, strict=True)]
        self._given: list[Tensor] = _flat(groups)
        settings.check_layers(len(self.parameters))
        self.order: tuple[int, ...] = tuple(range(len(self.parameters)))  # position to number, as parameters stop
        self.trace: ModelTrace | None = None  # trace of one forward pass, once it is known
        self.on_trace: Callable[[], None] = lambda: None  # called when the first training forward pass has shown it
        self._recorder: ExecutionRecorder | None = None

    @property
    def is_sharded(self) -> bool:
        """Return whether the parameters are shards (FSDP2), whose model is not traced."""
        return any(hasattr(p, "full_tensor") for p in self.parameters)

    @property
    def wants_trace(self) -> bool:
        """Return whether the execution order of the layers is needed and can be recorded."""
        return self.model is not None and self.settings.mode != "off" and not self.is_sharded

    @property
    def records(self) -> bool:
        """Return whether the first training forward pass is awaited or being recorded."""
        return self._recorder is not None

    def name(self, number: int) -> str:
        return f"parameter {number}" if self.names is None else self.names[number]

    def trace_example(self, forward: Callable[[nn.Module], Any]) -> None:
        """Record the execution order from one run of a copy of the model; warn where that is not possible."""
        assert self.model is not None
        try:
            self.trace = trace_model(self.model, self.parameters, forward)
        except Exception as error:  # noqa: BLE001 - any model may raise anything; training itself will say what
            warn_unseen(error)
        self.order_by_trace()

    def trace_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the execution order before the pass with these inputs; where that fails, the pass itself shows it."""
        if self._recorder is None:
            return
        assert self.model is not None
        try:
            self.trace = trace_model(self.model, self.parameters, lambda model: model(*args, **kwargs))
        except Exception:  # noqa: BLE001 - no memory for a copy, a model that cannot be copied
            return
        self.stop_recording()
        self.on_trace()

    def record_first_pass(self) -> None:
        assert self.model is not None
        self._recorder = ExecutionRecorder(self.model, self.parameters, self._take_record)

    def end_recording_at_step(self) -> None:
        """End the recording of a model that is called in parts and never as a whole, if any part was called."""
        if self._recorder is not None and self._recorder.has_seen:
            self._take_record()

    def stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None

    def _take_record(self) -> None:
        recorder = self._recorder
        self.stop_recording()
        if recorder is not None:
            self.trace = recorder.trace()
            self.on_trace()

    def follows(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether the groups have the same parameters as at the last call of `follow`."""
        count = sum(map(len, map(_PARAMS, groups)))
        return count == len(self._given) and all(map(is_, chain.from_iterable(map(_PARAMS, groups)), self._given))

    def follow(self, groups: list[dict[str, Any]]) -> None:
        """Note the groups' parameters; UserError for one that has no number. Any may be moved or removed."""
        known = {id(parameter) for parameter in self.parameters}
        self._given = _flat(groups)
        for parameter in self._given:
            if id(parameter) not in known:
                raise UserError(
                    f"Gradient-Skip does not know a parameter of shape {tuple(parameter.shape)}, which came into the "
                    "optimizer after its first step: give it at the start with requires_grad off, or build a new "
                    "optimizer"
                )

    def order_by_trace(self) -> None:
        """Make whole units stop in the order in which they execute."""
        if self.settings.whole_units and self.trace is not None:
            self.order = self.trace.order

    def plan(self, counts: Callable[[Unit], bool]) -> LayerPlan:
        """Return the plan of the layers for which ``counts`` holds."""
        settings = self.settings
        plan = make_plan(
            self.parameters, settings.watch, model=self.model, whole_units=settings.whole_units, order=self.order
        )
        units = plan.units if settings.targets is None else _units_of(settings.targets, plan)
        return replace(plan, units=tuple(unit for unit in units if counts(unit)))


def _flat(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _units_of(targets: Sequence[int], plan: LayerPlan) -> list[Unit]:
    """Return the layers of these numbers; if several are in one whole unit, only the first."""
    units: dict[int, Unit] = {}
    for number in sorted(targets, key=plan.order.index):
        end = plan.position_of_stop(number)
        units.setdefault(end, Unit(number=number, watched=(number,), end=end))
    return [units[end] for end in sorted(units)]


def as_forward(example: Any) -> Callable[[nn.Module], Any]:
    """Return a function that runs a model on example inputs; UserError for anything but a tensor, tuple or function."""
    if callable(example) and not isinstance(example, Tensor):
        forward: Callable[[nn.Module], Any] = example
        return forward
    if not isinstance(example, (Tensor, tuple, list)):
        raise UserError(
            "example_inputs must be a tensor, a tuple of inputs, or a function that runs the model, got "
            f"{type(example).__name__}"
        )
    inputs = (example,) if isinstance(example, Tensor) else example
    return lambda model: model(*inputs)


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` hides the calls of the model's modules."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in wrappers(model))
