"""Gradient-Skip's settings: a frozen, validated dataclass, and its form as ``CAC_*`` variables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.rules.choice import NAMED, WITH_END
from trainables.gradskip.variables import (
    BY_NAME,
    DEFAULT_SAMPLES,
    MEASURED_RULES,
    VARIABLES,
    VariableFields,
    as_text,
    parse_names,
    shown,
)

#: Prefixes of variables; unknown variables with one of them cause a warning, as they may be misspelt.
_PREFIXES = (
    "CAC_VAR_",
    "CAC_STOP_",
    "CAC_BRAKING_",
    "CAC_RULE",
    "CAC_WATCH",
    "CAC_WHOLE_",
    "CAC_NORM_",
    "CAC_PREFIX_",
    "CAC_LR_",
)


@dataclass(frozen=True, kw_only=True)
class Settings(VariableFields):
    """Settings of when Gradient-Skip stops which layers; every field but `reference` is one ``CAC_*`` variable.

    The default is auto mode with the published defaults. If both manual lists are given, the mode is manual, which
    overrides auto. `variables.VariableFields` declares the fields.

    Raises:
        UserError: a value is of the wrong type or out of range; the message names the variable, the rule and the value.
    """

    reference: bool = False
    """Reproduce the published optimizer's steps, including its faults. No variable; for comparison only."""

    def __post_init__(self) -> None:
        for name in ("stop_layer_num", "stop_layer_itr", "watch"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.watch, str):
            object.__setattr__(self, "watch", parse_names(self.watch))
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            if not (variable.optional and value is None):
                variable.check(value)
        if not isinstance(self.reference, bool):
            raise UserError(f"reference must be True or False, got {self.reference!r}")
        layers, iterations = self.stop_layer_num, self.stop_layer_itr
        if self.targets is None and len(layers or ()) != len(iterations or ()):
            raise UserError(
                "CAC_STOP_LAYER_NUM and CAC_STOP_LAYER_ITR must have one entry for each stop, got "
                f"{len(layers or ())} layers ({shown(layers or ())}) and "
                f"{len(iterations or ())} iterations ({shown(iterations or ())})"
            )
        self._check_rule()

    def _check_rule(self) -> None:
        if self.reference:
            for variable in VARIABLES:
                if not variable.published and getattr(self, variable.field) != variable.default:
                    raise UserError(
                        f"reference=True takes the published steps, which know no {variable.name}: leave it at "
                        f"{variable.default_text}, got {shown(getattr(self, variable.field))}"
                    )
            if self.stop_layer_itr is not None and self.stop_layer_itr[0] < 0:
                raise UserError(
                    "reference=True takes the published steps, in which no stop comes before the first one: "
                    f"CAC_STOP_LAYER_ITR must be >= 0, got {shown(self.stop_layer_itr)}"
                )
        if self.stop_layer_num is not None or self.rule not in WITH_END:
            return
        if self.rule_end_itr is None:
            raise UserError(
                f"CAC_RULE_END_ITR must be set for CAC_RULE={self.rule}: give the length of the run in optimizer steps"
            )
        if self.rule_end_itr <= self.rule_start_itr:
            raise UserError(
                f"CAC_RULE_END_ITR must be after CAC_RULE_START_ITR ({self.rule_start_itr}), got {self.rule_end_itr}"
            )
        if self.stop_interval and not NAMED[self.rule].brakes:
            raise UserError(
                f"CAC_STOP_INTERVAL must be 0 with CAC_RULE={self.rule}, whose layers end one by one, got "
                f"{self.stop_interval}"
            )
        if self.braking_distance and not NAMED[self.rule].brakes:
            raise UserError(
                f"CAC_BRAKING_DISTANCE must be 0 with CAC_RULE={self.rule}, whose learning rates fall to zero by "
                f"themselves, got {self.braking_distance}"
            )

    @property
    def targets(self) -> tuple[int, ...] | None:
        """Return the numbers of the layers that the auto rule uses instead of `watch`; None if not given."""
        return self.stop_layer_num if self.stop_layer_itr is None and self.rule == "variance" else None

    @property
    def mode(self) -> str:
        """Return ``manual``, ``auto`` (the published rule), ``off``, or the name of another rule."""
        if self.stop_layer_itr is not None:
            return "manual"
        if self.rule != "variance":
            return self.rule
        return "off" if self.start_thr == -1 else "auto"

    @property
    def sampling_interval(self) -> int:
        return self.samples or self.braking_distance or DEFAULT_SAMPLES

    @property
    def looks(self) -> tuple[int, int]:
        """Return the first iteration at which a rule may measure layers, and the iterations between measurements."""
        if self.rule in MEASURED_RULES:
            return self.rule_start_itr, self.rule_interval
        return (self.start_itr if self.rule == "variance" else 0), self.sampling_interval

    def check_layers(self, parameter_count: int) -> None:
        """Raise UserError if a manual layer number is past the model's last parameter."""
        if self.stop_layer_num is not None and self.stop_layer_num[-1] >= parameter_count:
            raise UserError(
                f"CAC_STOP_LAYER_NUM must be at most {parameter_count - 1} "
                f"(this optimizer has {parameter_count} parameters, numbered from 0), got {self.stop_layer_num[-1]}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read settings from ``CAC_*`` variables (of ``os.environ`` if None); an empty variable counts as not set.

        Fields (``mt_thr=0.97``) and variables (``CAC_VAR_MT_THR="0.97"``) override the environment.

        Raises:
            UserError: an unknown override, or a value that is not valid.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip()
            if text:
                values[variable.field] = variable.read(text)
        for name in environ:
            if name.startswith(_PREFIXES) and name not in BY_NAME:
                warnings.warn(f"ignored: {unknown_name('variable', name, BY_NAME)}", stacklevel=2)
        known = {field.name for field in fields(cls)}
        for key, value in overrides.items():
            if key in BY_NAME:
                variable = BY_NAME[key]
                values[variable.field] = variable.read(value) if isinstance(value, str) else value
            elif key in known:
                values[key] = value
            else:
                raise unknown_name("setting", key, [*known, *BY_NAME])
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """Return the variables that make a script with the gradient-skip optimizer use these settings.

        Every variable of the active mode is given, so that the result does not depend on defaults; an unset `samples`
        with its value. `reference` has no variable.
        """
        environment = {}
        mode = "auto" if self.mode == "off" else self.mode
        for variable in VARIABLES:
            given = variable.field == "stop_layer_num" and self.targets is not None
            if variable.mode != "both" and mode not in variable.mode.split(",") and not given:
                continue
            value = self.sampling_interval if variable.field == "samples" else getattr(self, variable.field)
            # Variables that the published library does not have are given only if they differ from the default.
            if variable.published or value != variable.default:
                environment[variable.name] = as_text(value)
        return environment


#: Gradient-Skip that stops nothing, what says so as a field of a configuration, and as text.
OFF = Settings(start_thr=-1)
OFF_FIELD = {"CAC_VAR_START_THR": -1.0}
OFF_VARIABLE = "CAC_VAR_START_THR=-1"
