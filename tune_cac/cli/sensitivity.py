"""The command ``sensitivity``: how much of each layer can be pruned alone, and pruners for a schedule from that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainables.errors import UserError
from trainables.quality import DEFAULT_DROP, DEFAULT_RELATIVE_DROP, Quality, default_drop, read_drop
from tune_cac.cli.arguments import RUN, config_from_arguments
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_table, write_asked
from tune_cac.messages import say

if TYPE_CHECKING:
    from trainables.compression.sensitivity import Proposal, Row
    from trainables.training.run import TrainingRun

_KINDS = ("element", "filter", "channel")


@command(
    *RUN,
    argument(
        "--checkpoint", metavar="FILE", help="weights to analyse: a state_dict as torch.save writes it, or a trial's"
    ),
    argument("--kind", default="element", help="what is pruned: element, filter or channel"),
    argument(
        "--levels", metavar="LIST", help="shares to prune, such as 0,0.5,0.9 (default: 0 to 0.95 in steps of 0.05)"
    ),
    argument("--layers", nargs="+", metavar="PATTERN", help="names or patterns of the weights (default: all)"),
    argument(
        "--allowed-drop", help="how much worse the metric may be, in its own unit or such as 2% (default: "
        f"{DEFAULT_DROP}; of a metric that is no fraction {DEFAULT_RELATIVE_DROP})",
    ),
    argument("--output", default="sensitivity", metavar="DIR", help="folder to write"),
    help="prune each layer alone, and propose sensitivities for a schedule",
    description="Prune one layer at a time at rising levels and evaluate on the validation split; say how much "
    "each layer tolerates within the allowed drop of its metric. Writes sensitivity.csv, sensitivity.html and "
    "sensitivities.yaml, a schedule's pruners. Without --checkpoint the workload is trained first.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Train or load a model, analyse it, print the table and write the files."""
    levels = None if arguments.levels is None else _read_levels(arguments.levels)
    kind, folder = arguments.kind, Path(arguments.output)
    if kind not in _KINDS:
        raise UserError(f"--kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    if arguments.checkpoint is not None and arguments.epochs is not None:
        raise UserError("--checkpoint is analysed as it is, so it takes no --epochs: leave one of them out")
    config = config_from_arguments(arguments, method="none")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --output {folder}: {error.strerror or error}; choose another folder") from None
    from trainables.compression.distillation import load_weights
    from trainables.compression.schedule.names import match_names
    from trainables.compression.sensitivity import (
        evaluate_workload,
        proposed_sensitivities,
        prunable,
        sensitivity_analysis,
    )
    from trainables.training.run import TrainingRun

    with TrainingRun(config) as run:
        quality, given = run.quality, arguments.allowed_drop
        allowed = default_drop(quality) if given is None else read_drop(given, quality)
        weights = prunable(run.model, kind)
        # A name that matches nothing is reported before hours of training.
        layers = [name for pattern in arguments.layers or () for name in match_names(pattern, list(weights))] or None
        if arguments.checkpoint is None:
            _train(run)
        else:
            load_weights(run.model, arguments.checkpoint, what="--checkpoint", of=f"the model of {config.workload}")
        rows = sensitivity_analysis(
            run.model,
            lambda model: evaluate_workload(run.workload, model, "validation", run.device),
            layers=layers,
            levels=levels,
            kind=kind,
            on_row=lambda row: say(f"pruning {row.parameter}") if row.sparsity == 0 else None,
        )
        proposals = proposed_sensitivities(rows, weights, allowed, quality)
    _print(rows, proposals, kind, allowed, quality)
    _write(folder, rows, proposals, arguments, allowed, quality)
    return 0


def _read_levels(text: str) -> list[float]:
    with suppress(ValueError):
        levels = [float(part) for part in text.split(",")]
        if all(0 <= level <= 1 for level in levels):
            return levels
    raise UserError(f"--levels must be numbers in [0, 1] separated by commas, such as 0,0.5,0.9, got {text!r}")


def _train(run: TrainingRun) -> None:
    from analysis.formatting import value_text

    while not run.finished:
        row = run.train_epoch()
        say(
            f"epoch {row['epoch']} of {run.config.epochs}: loss {row['train_loss']:.4f}, "
            f"{run.quality.name} {value_text(row['quality'], run.quality)}"
        )


def _print(
    rows: Sequence[Row], proposals: Sequence[Proposal], kind: str, allowed: float | str, quality: Quality
) -> None:
    from analysis.formatting import drop_text, value_text

    with_sensitivity = kind == "element"
    table = [["layer", "elements", "level", quality.name, *(["sensitivity"] if with_sensitivity else [])]]
    for found in proposals:
        cells = [
            found.parameter, f"{found.elements:,}", f"{100 * found.level:g} %", value_text(found.top1, quality)
        ]  # fmt: skip
        table.append([*cells, *([f"{found.sensitivity:.4f}"] if with_sensitivity else [])])
    amount = f"{allowed.removesuffix('%')} %" if isinstance(allowed, str) else drop_text(allowed, quality)
    print(
        f"{quality.name.capitalize() if quality.is_accuracy else quality.name} {value_text(rows[0].top1, quality)} "
        f"unpruned. Largest level of {kind}s that costs at most {amount}, each layer pruned alone:\n"
    )
    print_table(table)


def _write(
    folder: Path, rows: Sequence[Row], proposals: Sequence[Proposal], arguments: argparse.Namespace,
    allowed: float | str, quality: Quality,
) -> None:  # fmt: skip
    import yaml

    from analysis.presentation.figures.sensitivity import sensitivity
    from analysis.presentation.html import figure_html
    from trainables.compression.sensitivity import pruners_section, to_csv

    section = pruners_section(proposals, arguments.kind)
    schedule = (
        f"# Proposed by: tune_cac sensitivity --workload {arguments.workload} --kind {arguments.kind} "
        f"--allowed-drop {allowed}\n"
        "# Each layer was pruned alone and not retrained: together they lose more, and with retraining less.\n"
        "# A section to paste into a schedule, which needs version and policies, too.\n"
        + yaml.safe_dump({"pruners": section}, sort_keys=False)
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row.parameter, []).append((row.sparsity, row.top1))

    def write(name: str, content: str, what: str) -> None:
        write_asked(folder / name, content, "--output", "choose another folder")
        print(f"{what}: {folder / name}")

    print()
    write("sensitivity.csv", to_csv(rows), "Accuracies" if quality.is_accuracy else "Values")
    write("sensitivities.yaml", schedule, "Pruners for a schedule")
    drawn = sensitivity(curves, allowed_drop=allowed, quality=quality, pruned=f"{arguments.kind}s")
    title = f"{arguments.workload}: each layer pruned alone, not retrained"
    write("sensitivity.html", figure_html(title, drawn), "Picture")
    if not section:
        print("No layer tolerates any of these levels within the allowed drop, so no pruner is proposed.")
