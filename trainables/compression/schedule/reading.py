"""The schedule language: reads a file into a checked `Schedule` and collects all problems. Does not import torch.

The original silently accepted: unknown sections, unknown keys of policies and of pruners' args, keys given twice,
components that no policy uses, ``epochs`` beside a range, ``levels`` for pruners that have none, names that match
nothing (`matching`), and a second line of Baidu's rule that begins outside of its policy. By default these are
errors; with the compatibility switch each gives a warning, and the entries that the original ignored are ignored.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice, product
from operator import getitem
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml.nodes import SequenceNode

from trainables.compression.schedule.configs import (
    CLASSES,
    BaiduRNNPrunerConfig,
    ComponentConfig,
    GradualConfig,
    own_config,
)
from trainables.compression.schedule.document import (
    FLOAT,
    FLOAT_BEGINS,
    Document,
    Findings,
    Path,
    Problem,
    ScheduleError,
    dotted,
    nearest,
    open_document,
    plain,
    search_tags,
    shown,
)
from trainables.compression.schedule.matching import ModelFacts, match_schedule
from trainables.compression.schedule.parts import (
    KINDS,
    RANGE,
    WITH_LEVELS,
    Component,
    PlannedPolicy,
    PrunerPolicyConfig,
    RegularizerPolicyConfig,
    Schedule,
)
from trainables.compression.schedule.timing import Timing
from trainables.errors import UserError, nearest_name, unknown_name
from trainables.gradskip.variables import is_number

# --- Ranges to search in a schedule: ``!search {low: 0.1, high: 0.9}`` in place of a value ----------------------------

Value = float | int | str
KEYS = ("low", "high", "step", "log", "choices", "name")
#: Checks a learning-rate scheduler's class and arguments; raises UserError.
CheckLR = Callable[[str, Mapping[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The values allowed in one place: numbers between two ends, or one of several choices."""

    low: float | int = 0  # least value, if there are no choices
    high: float | int = 1  # greatest value, above ``low``
    step: float | int | None = None  # distance between values, counted from ``low``; None: all values between the ends
    log: bool = False  # true if the scale is logarithmic; ``low`` must then be above 0
    choices: tuple[Value, ...] | None = None  # at least two plain values

    @property
    def integer(self) -> bool:
        """Return whether values are integers: both ends are, and the step, if there is one."""
        return all(isinstance(end, int) for end in (self.low, self.high, 1 if self.step is None else self.step))

    def middle(self) -> Value:
        """Return the middle of the range (geometric with ``log``, on the grid of ``step``), or the first choice."""
        if self.choices is not None:
            return self.choices[0]
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        if self.step is not None:
            middle = self.low + math.floor((middle - self.low) / self.step) * self.step
        return math.floor(middle) if self.integer else middle

    def ends(self) -> tuple[Value, ...]:
        """Return the choices, or the least and the greatest value."""
        if self.choices is not None:
            return self.choices
        if self.step is None:
            return (self.low, self.high)
        # The upper end counts as on the grid if a billionth of a step is missing.
        return (self.low, self.low + math.floor((self.high - self.low) / self.step + 1e-9) * self.step)

    def checked(self, value: Any, name: str) -> Value:
        """Return the value converted to the type of this mark; UserError if it is not one of its values."""
        if self.choices is not None:
            if value not in self.choices:
                raise UserError(f"{name} must be one of {', '.join(map(str, self.choices))}, got {shown(value)}")
            return self.choices[self.choices.index(value)]
        if not is_number(value):
            raise UserError(f"{name} must be a number, got {shown(value)}")
        if not self.integer:
            return float(value)
        if value != int(value):
            raise UserError(f"{name} must be a whole number, got {value}")
        return int(value)


@dataclass(frozen=True)
class MarkedSchedule:
    """A schedule that contains ranges to search."""

    document: Document  # the document with a `SearchTag` in place of each range
    marks: Mapping[str, Mark]  # by name, in the order of the file: ``name`` if given, else the dotted path
    names: Mapping[Path, str] = field(repr=False)  # name of the mark at each path

    def fill(self, values: Mapping[str, Value]) -> dict[str, Any]:
        """Return the schedule's plain mapping with the values, one for each mark, in place of the ranges.

        UserError: a name is unknown, a mark has no value, or a value has the wrong type.
        """
        for name in values:
            if name not in self.marks:
                raise unknown_name("search range", name, self.marks)
        for name in self.marks:
            if name not in values:
                raise UserError(f"{name} needs a value: it is a range to search")
        right = {name: mark.checked(values[name], name) for name, mark in self.marks.items()}
        found: Any = plain(self.document.value)
        for path, name in self.names.items():
            reduce(getitem, path[:-1], found)[path[-1]] = right[name]
        return dict(found)

    def filled(self, values: Mapping[str, Value]) -> Document:
        """Return the document with values in place of the ranges."""
        return replace(self.document, value=self.fill(values))

    def read(
        self, values: Mapping[str, Value], *, compatible: bool = False, check_lr: CheckLR | None = None
    ) -> Schedule:
        """Read the filled schedule as `read_schedule` does, with the file's lines in messages."""
        return _read(self.filled(values), compatible, check_lr)

    def middles(self) -> dict[str, Value]:
        """Return the middle of each range, or the first choice, by name."""
        return {name: mark.middle() for name, mark in self.marks.items()}


def read_marks(given: str | os.PathLike[str]) -> MarkedSchedule:
    """Read the ranges in a schedule's file or text, given as in `read_schedule`; there may be none.

    ScheduleError: it is not YAML or not a map, or ranges are invalid; with all errors.
    """
    document = open_document(given)
    findings = Findings(document.source, document.lines)
    marks: dict[str, Mark] = {}
    names: dict[Path, str] = {}
    if not isinstance(document.value, dict):
        findings.error((), f"a schedule must be a map with version and policies, got {shown(document.value)}")
    for path, tag in search_tags(document.value):
        problems = list(_mark_problems(tag.definition, path))
        findings.errors += problems
        if problems:
            continue
        values = dict(tag.definition)
        name = values.pop("name", dotted(path))
        mark = Mark(**({"choices": tuple(values["choices"])} if "choices" in values else values))
        if marks.setdefault(name, mark) != mark:
            other = dotted(next(place for place, taken in names.items() if taken == name))
            findings.error(path, f"shares the name {name!r} with {other}, so low, high, ... must be the same there")
        names[path] = name
    findings.raise_or_warn()
    return MarkedSchedule(document, marks, names)


def _mark_problems(given: Any, path: Path) -> Iterator[Problem]:
    if not isinstance(given, dict):
        yield Problem(path, f"!search must be a map such as {{low: 0.1, high: 0.9}}, got {shown(given)}")
        return
    for key in given:
        if key not in KEYS:
            yield Problem((*path, key), f"unknown key of !search{nearest(key, KEYS)}")
    name = given.get("name", "x")
    if not isinstance(name, str) or not name:
        yield Problem((*path, "name"), f"must be text, got {shown(name)}")
    if rule := _broken_rule(given):
        yield Problem(path, f"!search {rule}")


def _broken_rule(given: Mapping[str, Any]) -> str:
    """Return the rule that a definition breaks, or ""."""
    if "choices" in given:
        beside = [key for key in KEYS[:4] if key in given]
        if beside:
            return f"takes choices or low and high, got choices and {beside[0]}"
        choices = given["choices"]
        if not isinstance(choices, list) or not all(isinstance(c, (int, float, str)) for c in choices):
            return f"needs choices that are a list of plain values, got {shown(choices)}"
        return "" if len(set(choices)) > 1 else f"needs at least two different choices, got {shown(choices)}"
    if given.get("low") is None or given.get("high") is None:
        return "needs low and high, or choices"
    low, high, step, log = given["low"], given["high"], given.get("step"), given.get("log", False)
    for key, value in (("low", low), ("high", high), ("step", step)):
        if value is not None and not is_number(value):
            return f"needs a number for {key}, got {shown(value)}"
    rules = (
        (low < high, f"needs low < high, got low {low} and high {high}"),
        (isinstance(log, bool), f"needs true or false for log, got {shown(log)}"),
        (not log or low > 0, f"needs low > 0 with log, got {low}"),
        (not log or step is None, "takes log or step, got both"),
        (step is None or 0 < step <= high - low, f"needs a step in (0, high - low], got {step}"),
    )
    return next((rule for is_kept, rule in rules if not is_kept), "")


#: Number of combinations of the other marks' values that a value is tried with before it is rejected.
_MOST_OTHERS = 256


def check_marks(
    marked: MarkedSchedule, facts: ModelFacts, *, compatible: bool = False, check_lr: CheckLR | None = None
) -> None:
    """Check that every choice of each mark, and both ends of each range, are valid in their place on a model.

    A value is valid if it is with the other marks at their middle, lower or upper ends (the first or last choice), or
    with any of the first `_MOST_OTHERS` combinations of these. Invalid combinations of valid values are no error here:
    a search skips them. ScheduleError: with all invalid values.
    """

    def errors(values: Mapping[str, Value], places: list[Path]) -> tuple[str, ...]:
        """Return the problems of the places, of what is inside them, and of what contains them."""
        schedule, findings = examine(marked.filled(values), compatible=compatible, check_lr=check_lr)
        match_schedule(schedule, facts, findings)  # as far as it could be read
        return findings.said(
            problem
            for problem in findings.errors
            if any(problem.path[: len(place)] == place[: len(problem.path)] for place in places)
        )

    wrong: dict[str, None] = {}
    for name, mark in marked.marks.items():
        places = [path for path, other in marked.names.items() if other == name]
        ends = {other: there.ends() for other, there in marked.marks.items() if other != name}
        combinations = islice(product(*ends.values()), _MOST_OTHERS)
        highest = {other: values[-1] for other, values in ends.items()}
        # The most likely to be valid first.
        others = [marked.middles(), highest, *(dict(zip(ends, values, strict=True)) for values in combinations)]
        for value in mark.ends():
            tried = (errors({**beside, name: value}, places) for beside in others)
            first = next(tried)
            if first and all(tried):
                wrong.update(dict.fromkeys(first))
    if wrong:
        raise ScheduleError(list(wrong))


# --- Validation of arguments, with pydantic's errors reworded for this project ----------------------------------------

S = TypeVar("S", bound=ComponentConfig)

#: Rules by pydantic's error type; ``{x}`` is filled in from the error's context.
_RULES = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "dict_type": "must be a map",
    "model_type": "must be a map",
    "tuple_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entry",
}


def validated(model: type[S], given: Mapping[str, Any], path: Path, findings: Findings) -> S | None:
    """Return arguments as settings of their class, or None if there is a problem, which is recorded."""
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        errors = [(tuple(part for part in found["loc"] if part != "[key]"), found) for found in error.errors()]
        misspelt = [loc for loc, found in errors if found["type"] == "extra_forbidden"]
        for loc, found in errors:
            if found["type"] == "missing" and any(
                other[:-1] == loc[:-1] and nearest_name(str(other[-1]), [str(loc[-1])]) for other in misspelt
            ):
                continue  # reported already as a misspelt argument
            if found["type"] == "too_short" and any(other[: len(loc)] == loc != other for other, _ in errors):
                continue  # it has entries, but invalid ones
            findings.error((*path, *loc), _said(found, model, loc))
        return None


def _said(error: ErrorDetails, model: type[ComponentConfig], loc: Path) -> str:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    owner = model.nested.get(str(loc[0]), model) if len(loc) > 1 else model
    if kind == "extra_forbidden":
        return f"unknown argument of {owner.class_ or loc[-2]}{nearest(str(loc[-1]), owner.model_fields)}"
    if kind == "missing":
        too_short = isinstance(loc[-1], int)
        return f"is missing: {'the list is too short' if too_short else f'{owner.class_ or loc[-2]} needs it'}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        expected = str(context["expected"])
        near = nearest_name(str(given), re.findall(r"'([^']*)'", expected))
        return f"must be {expected}, got {shown(given)}{f', did you mean {near!r}?' if near else ''}"
    rule = error["msg"][0].lower() + error["msg"][1:]
    if kind in _RULES:
        rule = _RULES[kind].format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})
    return f"{rule}, got {shown(given)}"


VERSION = 1
SECTIONS = ("version", *KINDS.values(), "policies")


def read_schedule(
    given: str | os.PathLike[str] | Mapping[str, Any], *, compatible: bool = False, check_lr: CheckLR | None = None
) -> Schedule:
    """Read the schedule of a file, a text or a mapping, given as in `open_document`.

    Args:
        given: the schedule.
        compatible: whether problems that the original silently accepted give a `UserWarning` instead of an error.
        check_lr: called with each learning-rate scheduler's class and arguments; raises UserError if they are invalid.

    ScheduleError: with all errors, each with file and line.
    """
    return _read(open_document(given), compatible, check_lr)


def _read(document: Document, compatible: bool, check_lr: CheckLR | None) -> Schedule:
    schedule, findings = examine(document, compatible=compatible, check_lr=check_lr)
    findings.raise_or_warn()
    return schedule


def examine(
    document: Document, *, compatible: bool = False, check_lr: CheckLR | None = None
) -> tuple[Schedule, Findings]:
    """Return a document's schedule as far as it can be read, and all its problems; raises nothing."""
    findings = Findings(document.source, document.lines, compatible=compatible)
    for path, text in document.duplicates:
        findings.lenient(path, text)
    schedule = Schedule(source=document.source, lines=document.lines)
    if not isinstance(document.value, dict):
        findings.error((), f"a schedule must be a map with version and policies, got {shown(document.value)}")
        return schedule, findings
    tags = list(search_tags(document.value))
    for path, _ in tags:
        findings.error(path, "is a range to search (!search), which a search fills: give a value to train with it")
    return schedule if tags else _Reader(document.value, findings, check_lr).read(schedule), findings


class _Reader:
    def __init__(self, given: Mapping[str, Any], findings: Findings, check_lr: CheckLR | None) -> None:
        self._given, self._findings, self._check_lr = given, findings, check_lr
        self._components: dict[str, dict[str, Component | None]] = {}
        """By section and name, in the order of the file; None for one that is invalid."""
        self._used: set[tuple[str, str]] = set()  # sections and names that policies mention, also invalid ones

    def read(self, empty: Schedule) -> Schedule:
        for name in self._given:
            if name not in SECTIONS:
                self._findings.lenient((name,), f"unknown section{nearest(name, SECTIONS)}")
        if "version" not in self._given:  # as in many published
            text = f"version is missing: begin the file with version: {VERSION}"
            self._findings.warnings.append(Problem((), text))
        elif self._given["version"] != VERSION or isinstance(self._given["version"], bool):
            self._findings.error(("version",), f"must be {VERSION}, got {shown(self._given['version'])}")
        self._components = {section: self._section(section, self._given.get(section)) for section in KINDS.values()}
        policies = self._policies(self._given.get("policies"))
        sections = {
            section: {name: component for name, component in components.items() if component is not None}
            for section, components in self._components.items()
        }
        schedule = replace(empty, policies=tuple(policies), sections=sections)
        for component in schedule.components():
            if (place := (component.section, component.name)) not in self._used:
                self._findings.warnings.append(Problem(place, "is used by no policy: add one, or leave it out"))
        for policy in policies:
            _check_use(policy, schedule.component(policy), self._findings)
        return schedule

    def _known_keys(self, given: Mapping[str, Any], known: Sequence[str], path: Path, what: str) -> dict[str, Any]:
        """Return the entries with known keys; report the others."""
        for key in given:
            if key not in known:
                self._findings.lenient((*path, key), f"unknown key of {what}{nearest(key, known)}")
        return {key: value for key, value in given.items() if key in known}

    def _section(self, section: str, given: Any) -> dict[str, Component | None]:
        if given is None:  # `pruners:` with everything under it commented out
            return {}
        if not isinstance(given, dict):
            self._findings.error((section,), f"must be a map from names to components, got {shown(given)}")
            return {}
        if section == "quantizers" and len(given) > 1:
            self._findings.error((section,), f"must hold one quantizer at most, got {', '.join(given)}")
        return {name: self._component(section, name, component) for name, component in given.items()}

    def _component(self, section: str, name: str, given: Any) -> Component | None:
        path: Path = (section, name)
        if not isinstance(given, dict):
            self._findings.error(path, f"must be a map of class and its arguments, got {shown(given)}")
            return None
        class_name, classes = given.get("class"), CLASSES.get(section)
        if not isinstance(class_name, str) or not class_name:
            one_of = ", such as StepLR" if classes is None else f": {', '.join(classes)}"
            got = f", got {shown(class_name)}" if "class" in given else ""
            self._findings.error(path, f"needs a class{one_of}{got}")
            return None
        arguments = {key: value for key, value in given.items() if key != "class"}
        if classes is None:
            try:
                if self._check_lr is not None:
                    self._check_lr(class_name, arguments)
            except UserError as error:
                self._findings.error(path, str(error))
                return None
            return Component(section=section, name=name, class_name=class_name, arguments=arguments)
        is_own = ":" in class_name and section in ("pruners", "regularizers", "quantizers")
        if class_name not in classes and not is_own:
            home = next((other for other, there in CLASSES.items() if class_name in there), None)
            elsewhere = f": it belongs under {home}" if home else nearest(class_name, classes)
            self._findings.error((*path, "class"), f"unknown class {class_name!r} of {section}{elsewhere}")
            return None
        model = own_config(class_name) if is_own else classes[class_name]
        settings = validated(model, arguments, path, self._findings)
        if settings is None:
            return None
        return Component(section=section, name=name, class_name=class_name, settings=settings)

    def _policies(self, given: Any) -> list[PlannedPolicy]:
        sections = [there for section in KINDS.values() if isinstance(there := self._given.get(section), dict)]
        classes = [isinstance(one, dict) and one.get("class") for there in sections for one in there.values()]
        if given is None and classes == ["PostTrainLinearQuantizer"]:
            text = "is missing, so nothing acts while a model trains: a trained one takes export-model --quantize FILE"
            self._findings.warnings.append(Problem(("policies",), text))
            self._used |= {("quantizers", name) for name in self._components["quantizers"]}
            return []
        if not isinstance(given, list) or not given:
            got = "is missing" if given is None else f"got {shown(given)}"
            self._findings.error(("policies",), f"must be a list of what acts when, with at least one entry; {got}")
            return []
        found = [self._policy(policy, position) for position, policy in enumerate(given)]
        return [policy for policy in found if policy is not None]

    def _policy(self, given: Any, position: int) -> PlannedPolicy | None:
        path: Path = ("policies", position)
        kinds = [kind for kind in KINDS if isinstance(given, dict) and kind in given]
        if not kinds:
            self._findings.error(path, f"must be a map with one of {', '.join(KINDS)}, got {shown(given)}")
            return None
        if len(kinds) > 1:
            self._findings.lenient(path, f"has {' and '.join(kinds)}: write a policy each; only {kinds[0]} counts")
        self._used |= {(KINDS[k], str(given[k].get("instance_name"))) for k in kinds if isinstance(given[k], dict)}
        self._known_keys(given, (*KINDS, *RANGE, "epochs"), path, "a policy")
        timing = self._timing(given, path)
        kind, inner, before = kinds[0], given[kinds[0]], len(self._findings.errors)
        section, path = KINDS[kind], (*path, kind)
        if not isinstance(inner, dict) or not isinstance(inner.get("instance_name"), str):
            self._findings.error(path, f"needs instance_name, the name of one of {section}, got {shown(inner)}")
            return None
        self._known_keys(inner, ("instance_name", "args"), path, f"{kind} policies")
        args = self._args(kind, inner.get("args"), (*path, "args"))
        name, known = inner["instance_name"], self._components[section]
        if name not in known:
            what = nearest(name, known) if known else f": the schedule has no {section}"
            self._findings.error((*path, "instance_name"), f"unknown {kind} {name!r}{what}")
        if timing is None or known.get(name) is None or len(self._findings.errors) > before:
            return None
        return PlannedPolicy(kind=kind, instance_name=name, timing=timing, args=args, position=position)

    def _args(self, kind: str, given: Any, path: Path) -> PrunerPolicyConfig | RegularizerPolicyConfig | None:
        given = {} if given is None else given
        if not isinstance(given, dict):
            self._findings.error(path, f"must be a map, got {shown(given)}")
            return None
        if kind == "pruner":  # the original ignores unknown keys here
            known = self._known_keys(given, tuple(PrunerPolicyConfig.model_fields), path, PrunerPolicyConfig.class_)
            return validated(PrunerPolicyConfig, known, path, self._findings)
        if kind == "regularizer":
            return validated(RegularizerPolicyConfig, given, path, self._findings)
        if given:
            self._findings.lenient(path, f"{kind} policies take no args, got {', '.join(given)}")
        return None

    def _timing(self, given: Mapping[str, Any], path: Path) -> Timing | None:
        """Read ``epochs``, or ``starting_epoch``, ``ending_epoch`` and ``frequency``, which the original requires."""
        arguments = {key: given[key] for key in RANGE if key in given}
        missing = [key for key in RANGE[:2] if key not in given]
        if "epochs" in given:
            epochs = given["epochs"]
            if arguments:
                said = f"epochs and {next(iter(arguments))} exclude each other: give one, epochs counts"
                self._findings.lenient((*path, "epochs"), said)
            if not isinstance(epochs, list) or not all(map(_is_epoch, epochs)):
                said = f"must be a list of integers such as [0, 2, 4], got {shown(epochs)}"
                self._findings.error((*path, "epochs"), said)
                return None
            arguments = {"epochs": tuple(epochs)}
        elif missing:
            self._findings.error(path, f"needs {' and '.join(missing)}, or epochs such as [0, 2, 4]")
            return None
        elif wrong := [key for key, value in arguments.items() if not _is_epoch(value)]:
            self._findings.errors += [
                Problem((*path, key), f"must be an integer, got {shown(given[key])}") for key in wrong
            ]
            return None
        try:
            return Timing(**arguments)
        except UserError as error:
            key, _, rule = str(error).partition(" ")  # each message of `Timing` begins with the key
            self._findings.error((*path, key), rule)
            return None


def _is_epoch(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_use(policy: PlannedPolicy, component: Component, findings: Findings) -> None:
    path: Path = ("policies", policy.position)
    settings = component.settings
    first, last = policy.timing.starting_epoch, policy.timing.last_epoch
    if isinstance(settings, GradualConfig) and first == last:
        findings.error(
            path,
            f"{component.class_name} {component.name!r} rises over its active epochs, so it needs at least two, got "
            f"{first}",
        )
    if isinstance(settings, BaiduRNNPrunerConfig) and not first <= settings.ramp_from(first) <= last:
        given = "ramp_epoch" if settings.ramp_epoch is not None else "ramp_epoch_offset"
        findings.lenient(
            (component.section, component.name, given),
            f"must be in the epochs {first} to {last} of its policy, got {settings.ramp_from(first)}",
        )
    levels = policy.args.levels if isinstance(policy.args, PrunerPolicyConfig) else None
    if levels is not None and component.class_name != WITH_LEVELS:
        text = f"has no effect on {component.class_name}: only {WITH_LEVELS} has levels"
        findings.lenient((*path, "pruner", "args", "levels"), text)


# --- Schedules as mappings and as readable YAML: sections in order, short lists on one line ---------------------------


class _Writer(yaml.SafeDumper):
    """Write block style, except for lists of scalars."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Iterable[Any]) -> SequenceNode:
        data = list(data)
        scalars = not any(isinstance(item, (dict, list)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=scalars)


_Writer.add_representer(list, _Writer.represent_list)
# Text that the reader would read as a number is quoted.
_Writer.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, FLOAT_BEGINS)


def dump(schedule: Mapping[str, Any]) -> str:
    """Return a schedule's plain mapping as YAML; `read_schedule` reads the same schedule from it.

    Sections are written in the language's order, unknown sections before the policies.
    """
    values = plain(schedule)
    unknown = [name for name in values if name not in SECTIONS]
    parts = [
        yaml.dump({name: values[name]}, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100)
        for name in (*SECTIONS[:-1], *unknown, SECTIONS[-1])
        if name in values
    ]
    return "\n".join(parts)


def to_mapping(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as plain values, as in a file: only arguments that were given, ``version`` 1."""
    sections: dict[str, dict[str, Any]] = {}
    for component in schedule.components():
        settings = component.settings
        given = component.arguments if settings is None else settings.model_dump(exclude_unset=True)
        sections.setdefault(component.section, {})[component.name] = {"class": component.class_name, **plain(given)}
    policies = []
    for policy in schedule.policies:
        args = {} if policy.args is None else plain(policy.args.model_dump(exclude_unset=True))
        inner = {"instance_name": policy.instance_name, **({"args": args} if args else {})}
        keys = RANGE if policy.timing.epochs is None else ("epochs",)
        policies.append({policy.kind: inner, **{key: plain(getattr(policy.timing, key)) for key in keys}})
    return {"version": VERSION, **sections, "policies": policies}
