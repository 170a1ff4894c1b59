"""All hyperparameters of a trial in one validated, frozen dataclass. Loads neither torch nor ray.

Search spaces suggest its fields, the trial reads them, and analysis has them as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache, cached_property
from typing import Any, get_args, get_origin, get_type_hints

from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import INTEGERS, GradientFields, check_gradient_fields, estimator_in, estimator_of
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, VARIABLES, is_number
from trainables.metrics import check_metric
from trainables.quality import ACCURACY, Quality, quality_named
from trainables.registry import METHODS, check_workload
from trainables.savings import SAVINGS
from trainables.training.recipe.fields import RECIPE_FIELDS, RecipeFields, check_recipe
from trainables.workload_options import canonical, read_options

#: Beginnings of the names of the fields of compression.
_OF_COMPRESSION = ("pruning_", "agp_", "distill_", "schedule")
#: Estimators that Gradient-Skip can be joined with.
JOINS_GRADSKIP = ("zero_gradients",)
#: The largest seed that numpy's generators accept.
MOST_SEED = 2**32 - 1


def wrapped_seed(number: int) -> int:
    """Return a number as a seed: after `MOST_SEED` they begin again at 0."""
    return number % (MOST_SEED + 1)


#: Least and greatest values of the fields that are integers.
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "epochs": (1, None), "seed": (0, MOST_SEED), "threads": (1, None), "workers": (1, None),
    "forward_cache_mb": (0, None), "pruning_start_epoch": (0, None), "pruning_end_epoch": (1, None),
    "pruning_frequency": (1, None), "distill_start_epoch": (0, None),
    **{name: (low, None) for name, low in INTEGERS.items()},
}  # fmt: skip
_REQUIRED = ("epochs", "seed", "threads", "workers", "forward_cache_mb")
#: Fields of earlier versions.
_GONE = ("CAC_RULE_NOISE", "network_settings")


@dataclass(frozen=True, kw_only=True)
class _RunFields:
    workload: str = "digits"
    """Name of the workload, or ``package.module:function``: model, data, loss and their hyperparameters."""
    workload_options: tuple[str, ...] | None = None
    """The workload's options as NAME=VALUE texts, sorted by name. None: all at their defaults."""
    epochs: int = 30
    """Passes over the training data, >= 1; the full budget to which savings are relative."""
    seed: int = 0
    """Seed of initial weights, data order and every random generator, in [0, `MOST_SEED`]."""
    method: str = "gradskip"
    """Method attached to the training loop; ``none`` is the baseline."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    threads: int = 1
    """CPU threads of torch in the trial, >= 1. Part of the config because the last bit of sums depends on it."""
    workers: int = 1
    """Processes that train the trial data-parallel, >= 1; each uses `threads` threads."""


#: The ``CAC_*`` variables, declared in `gradskip.variables`, as fields; None is the published default.
_VariableFields = make_dataclass(
    "_VariableFields", [(v.name, v.kind | None, None) for v in VARIABLES], frozen=True, kw_only=True
)


@dataclass(frozen=True, kw_only=True)
class TrialConfig(RecipeFields, GradientFields, _VariableFields, _RunFields):  # type: ignore[valid-type, misc]
    """Configuration of one trial: what it trains and how; its fields are in the order of the bases, from the right.

    Raises:
        UserError: an unknown workload or method, or a value out of range.
    """

    forward_cache_mb: int = 0
    """Budget of the forward cache in MB (10^6 bytes), >= 0; 0 disables it. Needs a workload whose inputs repeat."""

    saving: str | None = None
    """Saving by which the trial is ranked, of `SAVINGS`; None: that of training compute."""
    metric: str | None = None
    """Metric by which the trial is compared with the baseline; None: the accuracy."""
    direction: str | None = None
    """``min`` where a smaller metric is better, ``max`` where a larger one is; None for the accuracy."""
    metric_unit: str | None = None
    """Unit of the metric in words; ``fraction`` is shown in percent and points. None for the accuracy."""
    unnamed: tuple[str, ...] | None = None
    """Fields that tables leave out where they name the trial by its settings."""
    schedule: str | None = None
    """A compression schedule, YAML text; values marked ``!search`` are filled in from `schedule_values`."""
    schedule_compatible: bool | None = None
    """True if the schedule may contain entries that Distiller silently accepted; they are ignored as in Distiller."""
    schedule_values: tuple[str, ...] | None = None
    """Values of the ``!search`` marks as NAME=VALUE texts. A mark without a value gets the middle of its range."""
    pruning_sensitivities: tuple[str, ...] | None = None
    """Sensitivity s >= 0 of each layer as NAME=s texts: weights below s standard deviations are pruned."""
    pruning_start_epoch: int | None = None
    """First epoch that prunes, >= 0."""
    pruning_end_epoch: int | None = None
    """The epoch after the last one that prunes."""
    pruning_frequency: int | None = None
    """Pruning interval in epochs, >= 1."""
    agp_weights: tuple[str, ...] | None = None
    """Parameters that automated gradual pruning prunes."""
    agp_initial_sparsity: float | None = None
    """Share pruned in the first pruning epoch, in [0, 1]."""
    agp_final_sparsity: float | None = None
    """Share pruned in the last pruning epoch, in [0, 1]."""
    distill_teacher: str | None = None
    """Teacher: a registered model or ``package.module:function``. None: the student's own architecture."""
    distill_checkpoint: str | None = None
    """File with the teacher's weights."""
    distill_temperature: float | None = None
    """Softmax temperature T of teacher and student, > 0."""
    distill_weight: float | None = None
    """Weight w of the distillation loss, in [0, 1]; the loss on the labels has weight 1 - w."""
    distill_start_epoch: int | None = None
    """First epoch with distillation, >= 0."""

    def __post_init__(self) -> None:
        if self.workload_options is not None:
            options = canonical(read_options(self.workload_options))
            object.__setattr__(self, "workload_options", options or None)
        check_workload(self.workload, self.options)
        if self.method not in METHODS:
            raise unknown_name("method", str(self.method), METHODS)
        for name, (low, high) in _INTEGERS.items():
            if name in _REQUIRED or getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low, high)
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"device must be cpu or cuda, got {self.device!r}")
        for name, kind in field_kinds().items():
            if kind is tuple and isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self.gradskip_settings()
        if self.metric is not None:  # a config is made for every setting that is replayed
            check_metric(self.quality, field_names())
        self._check_compression()
        check_gradient_fields(self)
        check_recipe(self, estimator_in(self.method))

    def _check_compression(self) -> None:
        if self.saving not in (None, *SAVINGS):
            raise unknown_name("saving", str(self.saving), SAVINGS)
        for name in ("agp_initial_sparsity", "agp_final_sparsity", "distill_weight"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 <= value <= 1):
                raise UserError(f"{name} must be a number in [0, 1], got {value!r}")
        temperature = self.distill_temperature
        if temperature is not None and not (is_number(temperature) and temperature > 0):
            raise UserError(f"distill_temperature must be a number > 0, got {temperature!r}")
        if (self.compresses or estimator_in(self.method)) and self.workers > 1:
            raise UserError(
                f"method {self.method} trains in one process, got workers={self.workers}: leave --workers-per-trial out"
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Return the workload's options; empty for none."""
        return self.workload_options or ()

    @property
    def quality(self) -> Quality:
        """Return the metric by which the trial is compared."""
        return ACCURACY if self.metric is None else quality_named(self.metric, self.direction, self.metric_unit)

    @property
    def compresses(self) -> bool:
        """Return whether the method includes a compression schedule."""
        return "compression" in self.method.split("+")

    @property
    def skips_gradients(self) -> bool:
        """Return whether the method includes Gradient-Skip."""
        return "gradskip" in self.method.split("+")

    def gradskip_settings(self) -> Settings:
        """Return the Gradient-Skip settings, with published defaults for unset variables; ignores the environment."""
        return self._gradskip_settings

    @cached_property  # a replay of thousands of configurations asks for those of each several times
    def _gradskip_settings(self) -> Settings:
        return Settings.from_environment({}, **{n: v for n in BY_NAME if (v := getattr(self, n)) is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, in plain types (JSON, Ray, Optuna)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrialConfig:
        """Build a config from a mapping, without fields that are gone; raise UserError for a key that is no field."""
        known = field_names()
        values = {key: value for key, value in values.items() if key not in _GONE}
        for key in values:
            if key not in known:
                raise unknown_name("variable" if key.startswith("CAC") else "setting", key, known)
        return cls(**values)


def method_of(names: Iterable[str]) -> str:
    """Return the method that searched fields belong to, ``none`` for fields of no method.

    >>> method_of(["CAC_VAR_MT_THR", "agp_final_sparsity"]), method_of(["gradient_epsilon"]), method_of(["epochs"])
    ('gradskip+compression', 'central_difference', 'none')

    Raises:
        UserError: fields of an estimator beside those of another method.
    """
    given = set(names)
    estimator = estimator_of(given)
    skips = any(name in BY_NAME for name in given)
    compresses = any(name.startswith(_OF_COMPRESSION) for name in given)
    parts = [part for part, named in (("gradskip", skips), ("compression", compresses)) if named]
    if estimator in JOINS_GRADSKIP and parts == ["gradskip"]:
        return f"gradskip+{estimator}"
    if estimator is not None and parts:
        raise UserError(
            f"settings of {estimator} can't be searched together with those of {' and '.join(parts)}, got "
            f"{', '.join(sorted(given))}: search them one after the other"
        )
    return estimator or "+".join(parts) or ("recipe" if given & {*RECIPE_FIELDS} else "none")


@cache
def field_names() -> tuple[str, ...]:
    """Return the names of the fields of `TrialConfig`."""
    return tuple(field.name for field in fields(TrialConfig))


@cache
def field_kinds() -> dict[str, type]:
    """Return the plain type of every hyperparameter (str, int, float, bool or tuple), without None."""
    kinds = {}
    for name, hint in get_type_hints(TrialConfig).items():
        parts = get_args(hint)
        kind = next(part for part in parts if part is not type(None)) if type(None) in parts else hint
        kinds[name] = get_origin(kind) or kind
    return kinds


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise UserError unless the value is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        rule = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise UserError(f"{name} must be an integer {rule}, got {value!r}")
