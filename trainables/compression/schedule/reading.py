"""The schedule language: reads a file into a checked `Schedule` and collects all problems. Does not import torch.

Sections: ``version`` (1), ``pruners``, ``regularizers``, ``quantizers`` (one at most), ``lr_schedulers``,
``extensions``, ``distillers`` (not in the original), ``policies``. Strict by default; `compatibility` lists what the
compatibility switch accepts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainables.compression.schedule.compatibility import check_uses, known_keys
from trainables.compression.schedule.configs import (
    DISTILLERS,
    EXTENSIONS,
    PRUNERS,
    QUANTIZERS,
    REGULARIZERS,
    ComponentConfig,
)
from trainables.compression.schedule.document import open_document
from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule
from trainables.compression.schedule.policy_configs import (
    KINDS,
    RANGE,
    PrunerPolicyConfig,
    RegularizerPolicyConfig,
    read_timing,
)
from trainables.compression.schedule.positions import Document, search_tags
from trainables.compression.schedule.problems import Findings, Path, nearest, shown
from trainables.compression.schedule.validation import validated
from trainables.errors import UserError

VERSION = 1
#: Classes of each section; those of ``lr_schedulers`` are torch's and are checked by ``check_lr``.
CLASSES: Mapping[str, Mapping[str, type[ComponentConfig]]] = {
    "pruners": PRUNERS,
    "regularizers": REGULARIZERS,
    "quantizers": QUANTIZERS,
    "extensions": EXTENSIONS,
    "distillers": DISTILLERS,
}
SECTIONS = ("version", *KINDS.values(), "policies")
#: Sections and names of components that are present but invalid, in the file's order.
Unread = dict[tuple[str, str], None]
#: Checks a learning-rate scheduler's class and arguments; raises UserError.
CheckLR = Callable[[str, Mapping[str, Any]], object]


def read_schedule(
    given: str | os.PathLike[str] | Mapping[str, Any],
    *,
    compatible: bool = False,
    check_lr: CheckLR | None = None,
    source: str | None = None,
) -> Schedule:
    """Read the schedule of a file, a text or a mapping.

    Args:
        given: path of a YAML file; or its text, if it has several lines or begins with ``{``; or a mapping.
        compatible: whether problems that the original silently accepted give a `UserWarning` instead of an error.
        check_lr: called with each learning-rate scheduler's class and arguments; raises UserError if they are invalid.
        source: name of the schedule in messages; by default the file's name.

    Raises:
        ScheduleError: with all errors, each with file and line.
    """
    schedule, findings = examine(open_document(given, source), compatible=compatible, check_lr=check_lr)
    findings.settle()
    return schedule


def examine(
    document: Document, *, compatible: bool = False, check_lr: CheckLR | None = None
) -> tuple[Schedule, Findings]:
    """Return a document's schedule as far as it can be read, and all its problems; raises nothing.

    Args:
        document: as opened.
        compatible: as in `read_schedule`.
        check_lr: as in `read_schedule`.
    """
    findings = Findings(document.source, document.lines, compatible=compatible)
    findings.errors += document.problems
    for duplicate in document.duplicates:
        findings.lenient(duplicate.path, duplicate.text, duplicate.line)
    schedule = Schedule(source=document.source, lines=document.lines)
    if not isinstance(document.value, dict):
        findings.error((), f"a schedule must be a map with version and policies, got {shown(document.value)}")
        return schedule, findings
    tags = list(search_tags(document.value))
    for path, _ in tags:
        findings.error(path, "is a range to search (!search), which a search fills: give a value to train with it")
    if tags:
        return schedule, findings
    _check_sections(document.value, findings)
    sections: dict[str, Any] = {}
    unread: Unread = {}
    for section in KINDS.values():
        sections[section] = _read_section(document.value.get(section), section, findings, unread, check_lr)
    policies = _read_policies(document.value.get("policies"), sections, unread, findings)
    schedule = replace(schedule, policies=policies, **sections)
    check_uses(schedule, findings, used=_named(document.value.get("policies")))
    return schedule, findings


def _check_sections(value: Mapping[str, Any], findings: Findings) -> None:
    for name in value:
        if name not in SECTIONS:
            findings.lenient((name,), f"unknown section{nearest(name, SECTIONS)}")
    if "version" not in value:
        findings.warning((), f"version is missing: begin the file with version: {VERSION}")  # as in many published
    elif value["version"] != VERSION or isinstance(value["version"], bool):
        findings.error(("version",), f"must be {VERSION}, got {shown(value['version'])}")


# --- components -----------------------------------------------------------------------------------------------------


def _read_section(
    given: Any, section: str, findings: Findings, unread: Unread, check_lr: CheckLR | None
) -> dict[str, Component]:
    found: dict[str, Component] = {}
    if given is None:  # `pruners:` with everything under it commented out
        return found
    if not isinstance(given, dict):
        findings.error((section,), f"must be a map from names to components, got {shown(given)}")
        return found
    for name, arguments in given.items():
        component = _read_component(section, name, arguments, findings, check_lr)
        if component is None:
            unread[section, name] = None
        else:
            found[name] = component
    if section == "quantizers" and len(given) > 1:
        findings.error((section,), f"must hold one quantizer at most, got {', '.join(given)}")
    return found


def _read_component(
    section: str, name: str, given: Any, findings: Findings, check_lr: CheckLR | None
) -> Component | None:
    path: Path = (section, name)
    if not isinstance(given, dict):
        findings.error(path, f"must be a map of class and its arguments, got {shown(given)}")
        return None
    class_name = given.get("class")
    if not isinstance(class_name, str) or not class_name:
        one_of = f": {', '.join(CLASSES[section])}" if section in CLASSES else ", such as StepLR"
        findings.error(path, f"needs a class{one_of}" + (f", got {shown(class_name)}" if "class" in given else ""))
        return None
    arguments = {key: value for key, value in given.items() if key != "class"}
    if section not in CLASSES:
        try:
            if check_lr is not None:
                check_lr(class_name, arguments)
        except UserError as error:
            findings.error(path, str(error))
            return None
        return Component(section=section, name=name, class_name=class_name, arguments=arguments)
    model = CLASSES[section].get(class_name)
    if model is None:
        home = next((other for other, classes in CLASSES.items() if class_name in classes), None)
        elsewhere = f": it belongs under {home}" if home else nearest(class_name, CLASSES[section])
        findings.error((*path, "class"), f"unknown class {class_name!r} of {section}{elsewhere}")
        return None
    settings = validated(model, arguments, path, findings)
    if settings is None:
        return None
    return Component(section=section, name=name, class_name=class_name, settings=settings)


# --- policies -------------------------------------------------------------------------------------------------------


def _read_policies(
    given: Any, sections: Mapping[str, Mapping[str, Component]], unread: Unread, findings: Findings
) -> tuple[PlannedPolicy, ...]:
    if not isinstance(given, list) or not given:
        got = "is missing" if given is None else f"got {shown(given)}"
        findings.error(("policies",), f"must be a list of what acts when, with at least one entry; {got}")
        return ()
    found = (_read_policy(policy, position, sections, unread, findings) for position, policy in enumerate(given))
    return tuple(policy for policy in found if policy is not None)


def _named(policies: Any) -> set[tuple[str, str]]:
    """Return sections and names that any policy mentions, including invalid policies, for the check of unused ones."""
    found = set()
    for policy in policies if isinstance(policies, list) else []:
        for kind, section in KINDS.items():
            inner = policy.get(kind) if isinstance(policy, dict) else None
            if isinstance(inner, dict):
                found.add((section, str(inner.get("instance_name"))))
    return found


def _read_policy(
    given: Any,
    position: int,
    sections: Mapping[str, Mapping[str, Component]],
    unread: Unread,
    findings: Findings,
) -> PlannedPolicy | None:
    path: Path = ("policies", position)
    kinds = [kind for kind in KINDS if isinstance(given, dict) and kind in given]
    if not kinds:
        findings.error(path, f"must be a map with one of {', '.join(KINDS)}, got {shown(given)}")
        return None
    if len(kinds) > 1:
        findings.lenient(path, f"has {' and '.join(kinds)}: write a policy each; only {kinds[0]} counts")
    known_keys(given, (*KINDS, *RANGE, "epochs"), path, "a policy", findings)
    timing = read_timing(given, path, findings)
    kind, inner, before = kinds[0], given[kinds[0]], len(findings.errors)
    path = (*path, kind)
    if not isinstance(inner, dict) or not isinstance(inner.get("instance_name"), str):
        findings.error(path, f"needs instance_name, the name of one of {KINDS[kind]}, got {shown(inner)}")
        return None
    known_keys(inner, ("instance_name", "args"), path, f"{kind} policies", findings)
    args = _read_args(kind, inner.get("args"), (*path, "args"), findings)
    name, section = inner["instance_name"], KINDS[kind]
    if name not in sections[section]:
        if (section, name) not in unread:
            known = [*sections[section], *(other for at, other in unread if at == section)]
            what = nearest(name, known) if known else f": the schedule has no {section}"
            findings.error((*path, "instance_name"), f"unknown {kind} {name!r}{what}")
        return None
    if timing is None or len(findings.errors) > before:
        return None
    return PlannedPolicy(kind=kind, instance_name=name, timing=timing, args=args, position=position)


def _read_args(
    kind: str, given: Any, path: Path, findings: Findings
) -> PrunerPolicyConfig | RegularizerPolicyConfig | None:
    models: dict[str, type[PrunerPolicyConfig] | type[RegularizerPolicyConfig]] = {
        "pruner": PrunerPolicyConfig,
        "regularizer": RegularizerPolicyConfig,
    }
    model = models.get(kind)
    if given is not None and not isinstance(given, dict):
        findings.error(path, f"must be a map, got {shown(given)}")
        return None
    if model is None:
        if given:
            findings.lenient(path, f"{kind} policies take no args, got {', '.join(given)}")
        return None
    given = given or {}
    if kind == "pruner":  # the original ignores unknown keys here
        known_keys(given, tuple(model.model_fields), path, model.class_, findings)
        given = {key: value for key, value in given.items() if key in model.model_fields}
    return validated(model, given, path, findings)
