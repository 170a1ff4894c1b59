"""The command ``schedule check``: what a compression schedule does to a model, and all errors in it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.formatting import plural
from trainables.errors import UserError
from trainables.registry import WORKLOADS
from trainables.workload_options import read_options
from trainables.workloads import build, default_epochs
from tune_cac.cli.arguments import COMPATIBLE, WORKLOAD_OPTIONS, workload_options
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_table
from tune_cac.messages import say

if TYPE_CHECKING:
    from trainables.compression.schedule.matching import ModelFacts, Resolved
    from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule

#: Most names that are shown of a list.
MOST_NAMES = 8


@command(
    argument("action", choices=["check"], help="the only one so far"),
    argument("file", metavar="FILE", help="the schedule, YAML; ranges to search stand at their middle"),
    argument("--workload", help="whose model is compressed; images needs no --data for its own models"),
    *WORKLOAD_OPTIONS,
    argument("--epochs", at_least=1, help="epochs of the training (default: the workload's)"),
    COMPATIBLE,
    help="look at a compression schedule before training with it",
    description="Check a compression schedule: its language, strictly, and with --workload also the names of "
    "layers; print what each policy acts on and when, and the planned sparsity epoch by epoch.",
)
def run(arguments: argparse.Namespace) -> int:
    """Print what a schedule does and each error on its own line; return 2 if there are errors."""
    workload, options = arguments.workload, workload_options(arguments) or ()
    if workload is None and options:
        raise UserError(f"{options[0]} needs --workload, whose option it is")
    from trainables.compression.lr_schedulers import check_lr_scheduler
    from trainables.compression.schedule.document import ScheduleError
    from trainables.compression.schedule.matching import match_schedule
    from trainables.compression.schedule.reading import examine, read_marks
    from trainables.workloads.user_code import import_attribute

    try:
        marked = read_marks(Path(arguments.file))
    except ScheduleError as error:
        return _refuse(error.errors)
    document = marked.filled(marked.middles())
    schedule, findings = examine(document, compatible=arguments.compatible, check_lr=check_lr_scheduler)
    policies, epochs = schedule.policies, arguments.epochs
    resolved, on = None, "checked without names of layers: give --workload, too"
    if workload is not None:
        facts, what = facts_of_workload(workload, options)
        resolved, on = match_schedule(schedule, facts, findings), f"on {what}"
    for component in schedule.components():
        if ":" in component.class_name:
            try:
                import_attribute(component.class_name, component.section.removesuffix("s"))
            except UserError as error:
                findings.error((component.section, component.name, "class"), str(error))
    if epochs is None and workload is None:
        epochs = max((policy.timing.last_epoch + 1 for policy in policies), default=1)
    elif epochs is None:
        own = WORKLOADS.get(workload)
        epochs = default_epochs(workload, options) if own is None else own.default_epochs
    for policy in policies:
        if (begins := policy.timing.starting_epoch) >= epochs:
            findings.error(
                ("policies", policy.position),
                f"never acts: it begins in epoch {begins}, and the training's last is {epochs - 1}; begin earlier, or "
                "give --epochs",
            )
    for text in findings.said(findings.warnings):
        say(f"warning: {text}")
    if policies:
        print(f"{document.source}: {_counted(schedule)}; {on}")
        _print_schedule(schedule, resolved, epochs)
        for name, mark in marked.marks.items():
            among = ", ".join(map(str, mark.choices)) if mark.choices else f"{mark.low} to {mark.high}"
            middle = mark.middle()
            middle = f"{middle:.6g}" if isinstance(middle, float) else middle
            print(f"note: {name} is searched ({among}); shown with {middle}")
    return _refuse(findings.said(findings.errors)) if findings.errors else 0


def _refuse(errors: Sequence[str]) -> int:
    for text in errors:
        say(text)
    say(plural(len(errors), "error"))
    return 2


def facts_of_workload(name: str, options: Sequence[str]) -> tuple[ModelFacts, str]:
    """Return names and shapes of a workload's model, and its name in messages.

    A built-in model of the workload ``images`` needs no data; it then has as many classes as where it was published.
    UserError: as in `trainables.workloads.build`, or raised by the model.
    """
    from trainables.compression.policies import model_facts
    from trainables.runtime.isolation import isolated

    given = read_options(options)
    with isolated(seed=0, threads=1):
        if name != "images" or "data" in given:
            return model_facts(build(name, options).make_model()), name
        import torch

        from trainables.workloads.models import MODELS, build_model

        model = given.get("model", "resnet20")
        if ":" in model:
            raise UserError(f"model {model} is tried on images of the data: give --data PATH, too")
        published = MODELS[model].classes if model in MODELS else 1000
        if not (count := given.get("classes", str(published))).isdecimal():
            raise UserError(f"classes of workload images must be an integer, got {count!r}")
        classes = int(count)
        with torch.device("meta"):  # shapes only, which saves time and memory
            return model_facts(build_model(model, classes)), f"{model} with {classes} classes (without data)"


def _counted(schedule: Schedule) -> str:
    from trainables.compression.schedule.parts import KINDS

    sections = schedule.sections
    counts = [plural(len(sections[section]), kind) for kind, section in KINDS.items() if sections.get(section)]
    policies = len(schedule.policies)
    return ", ".join([*counts, f"{policies} {'policy' if policies == 1 else 'policies'}"])


def _print_schedule(schedule: Schedule, resolved: Resolved | None, epochs: int) -> None:
    from trainables.compression.schedule.parts import epoch_table

    shown = schedule if resolved is None else resolved.schedule
    for policy in shown.policies:
        component = shown.component(policy)
        print(f"\n{policy.kind} {component.name}, {component.class_name}: {_when(policy)}")
        if names := _names(component, resolved):
            print(f"  {names}")
    if len(table := epoch_table(shown, epochs)) > 1:
        print(f"\n{epochs} epochs; shares are planned ones, of elements or of structures")
        print_table(table)


def _when(policy: PlannedPolicy) -> str:
    timing = policy.timing
    if timing.epochs is not None:
        return f"epoch{'s' if len(timing.epochs) > 1 else ''} {', '.join(map(str, timing.epochs))}"
    if timing.last_epoch == timing.starting_epoch:
        return f"epoch {timing.starting_epoch}"
    every = f" every {timing.frequency}" if timing.frequency > 1 else ""
    return f"epochs {timing.starting_epoch}-{timing.last_epoch}{every}"


def _names(component: Component, resolved: Resolved | None) -> str:
    """Return the component's matched names with shapes; without a model, the text of the schedule."""
    from trainables.compression.schedule.matching import MODULES, names_argument

    argument = names_argument(component.settings)
    if argument is None:
        return ", ".join(f"{name} {value}" for name, value in component.arguments.items())
    if resolved is None:
        names = [str(pattern) for pattern in getattr(component.settings, argument)]
    else:
        shapes = resolved.facts.parameters
        names = [
            f"{name} ({', '.join(map(str, shapes[name]))})" if name in shapes else name
            for name in resolved.of(component)
        ]
    if len(names) > MOST_NAMES:
        names[MOST_NAMES - 2 :] = [f"... {len(names) - MOST_NAMES + 2} more"]
    return ("overrides of " if argument == MODULES and names else "") + ", ".join(names)
