"""The command ``sensitivity``: how much of each layer can be pruned alone, and pruners for a schedule from that."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.errors import UserError
from trainables.quality import DEFAULT_DROP, DEFAULT_RELATIVE_DROP, Quality, default_drop, read_drop
from tune_cac.cli.options import add_compatible
from tune_cac.cli.workload_arguments import add_run, config_from_arguments
from tune_cac.messages import say

if TYPE_CHECKING:
    from torch import Tensor

    from trainables.compression.sensitivity import Proposal, Row
    from trainables.training.run import TrainingRun

CSV_FILE, PICTURE_FILE, SCHEDULE_FILE = "sensitivity.csv", "sensitivity.html", "sensitivities.yaml"
_KINDS = ("element", "filter", "channel")


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser's commands; load nothing heavy."""
    parser = commands.add_parser(
        "sensitivity", parents=[debug], help="prune each layer alone, and propose sensitivities for a schedule",
        description="Prune one layer at a time at rising levels and evaluate on the validation split; say how much "
        "each layer tolerates within the allowed drop of its metric. Writes sensitivity.csv, sensitivity.html and "
        "sensitivities.yaml, a schedule's pruners. Without --checkpoint the workload is trained first.",
    )  # fmt: skip
    add_run(parser, epochs="epochs to train", seed="seed of the training")
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="weights to analyse: a state_dict as torch.save writes it, or a trial's"
    )
    parser.add_argument("--kind", default="element", help="what is pruned: element (default), filter or channel")
    parser.add_argument(
        "--levels", metavar="LIST", help="shares to prune, such as 0,0.5,0.9 (default: 0 to 0.95 in steps of 0.05)"
    )
    parser.add_argument(
        "--layers", nargs="+", metavar="PATTERN", help="names or patterns of the weights (default: all)"
    )
    add_compatible(parser)
    parser.add_argument(
        "--allowed-drop",
        help=f"how much worse the metric may be, in its own unit or such as 2%% (default: {DEFAULT_DROP}; of a metric "
        f"that is no fraction {DEFAULT_RELATIVE_DROP}%)",
    )
    parser.add_argument("--output", default="sensitivity", metavar="DIR", help="folder to write (default: sensitivity)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train or load a model, analyse it, print the table and write the files."""
    levels = _levels(arguments.levels)
    if arguments.kind not in _KINDS:
        raise UserError(f"--kind must be one of {', '.join(_KINDS)}, got {arguments.kind!r}")
    if arguments.checkpoint is not None and arguments.epochs is not None:
        raise UserError("--checkpoint is analysed as it is, so it takes no --epochs: leave one of them out")
    config = config_from_arguments(arguments, method="none")
    folder = _made(Path(arguments.output))
    from trainables.compression.schedule.names import listed
    from trainables.compression.sensitivity import evaluate_workload as evaluate
    from trainables.compression.sensitivity import proposed_sensitivities, prunable, sensitivity_analysis
    from trainables.training.run import TrainingRun

    with TrainingRun(config) as run:
        quality, given = run.quality, arguments.allowed_drop
        allowed = default_drop(quality) if given is None else read_drop(given, quality)
        weights = prunable(run.model, arguments.kind)
        layers = arguments.layers
        if layers is not None:  # a name that matches nothing is reported before hours of training
            layers = listed(layers if not arguments.compatible else _matching(layers, list(weights)), list(weights))
        if arguments.checkpoint is None:
            _train(run)
        else:
            _load(run, Path(arguments.checkpoint))
        rows = sensitivity_analysis(
            run.model,
            lambda model: evaluate(run.workload, model, "validation", run.device, seed=config.seed),
            layers=layers,
            levels=levels,
            kind=arguments.kind,
            on_row=_say_layer,
        )
        proposals = proposed_sensitivities(rows, weights, allowed, quality)
    _show(rows, proposals, weights, arguments, allowed, quality)
    _write(folder, rows, proposals, arguments, allowed, quality)
    return 0


def _matching(patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the patterns that match a weight, with a warning for each other one; UserError if none matches."""
    from trainables.compression.schedule.names import match_names

    found = []
    for pattern in patterns:
        try:
            match_names(pattern, known)
        except UserError as error:
            say(f"warning: {error}")
            continue
        found.append(pattern)
    if not found:
        raise UserError("--layers must match at least one weight, and none of them does")
    return found


def _levels(text: str | None) -> list[float] | None:
    """Return the numbers between commas; None if no text is given."""
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--levels must be numbers between commas, such as 0,0.5,0.9, got {text!r}") from None
    if not all(0 <= level <= 1 for level in found):
        raise UserError(f"--levels must be in [0, 1], got {text}")
    return found


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --output {folder}: {error.strerror or error}; choose another folder") from None
    return folder


def _train(run: TrainingRun) -> None:
    from analysis.formatting import value_text

    while not run.finished:
        row = run.train_epoch()
        say(
            f"epoch {row['epoch']} of {run.config.epochs}: loss {row['train_loss']:.4f}, "
            f"{run.quality.name} {value_text(row['quality'], run.quality)}"
        )


def _load(run: TrainingRun, file: Path) -> None:
    """Load the weights of a file into the run's model."""
    import pickle

    from trainables.compression.schedule.names import plain_name
    from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE, read_state

    file = file / CHECKPOINT_FILE if file.is_dir() else file
    try:
        state: Any = read_state(file)
    except OSError as error:
        raise UserError(f"cannot read --checkpoint {file}: {error.strerror or error}") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError):
        raise UserError(f"--checkpoint {file} is no checkpoint: give a file that torch.save wrote") from None
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise UserError(f"--checkpoint {file} holds no weights by name: give a state_dict")
    try:
        run.model.load_state_dict({plain_name(str(name)): value for name, value in state.items()})
    except (RuntimeError, AttributeError) as error:
        reason = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"--checkpoint {file} does not fit the model of {run.config.workload}: {reason}") from None


def _say_layer(row: Row) -> None:
    if row.sparsity == 0:
        say(f"pruning {row.parameter}")


def _counted(shape: Sequence[int], level: float, kind: str) -> str:
    """Return how many filters or channels of a weight a level prunes."""
    from trainables.compression.sensitivity import count_at

    number = shape[0 if kind == "filter" else 1]
    return f"{count_at(level, number)} of {number}"


def _show(
    rows: Sequence[Row], proposals: Sequence[Proposal], weights: Mapping[str, Tensor], arguments: argparse.Namespace,
    allowed: float | str, quality: Quality,
) -> None:  # fmt: skip
    from analysis.formatting import drop_text, value_text
    from tune_cac.cli.console import print_table

    element = arguments.kind == "element"
    amount = f"{allowed.removesuffix('%')} %" if isinstance(allowed, str) else drop_text(allowed, quality)
    # A small level may prune none of a few filters, so their number is shown.
    table = [["layer", "elements", "level", *([] if element else [f"{arguments.kind}s"]), quality.name,
              *(["sensitivity"] if element else [])]]  # fmt: skip
    for found in proposals:
        table.append(
            [
                found.parameter,
                f"{found.elements:,}",
                f"{100 * found.level:g} %",
                *([] if element else [_counted(weights[found.parameter].shape, found.level, arguments.kind)]),
                value_text(found.top1, quality),
                *([f"{found.sensitivity:.4f}"] if element else []),
            ]
        )
    print(
        f"{quality.name.capitalize() if quality.is_accuracy else quality.name} {value_text(rows[0].top1, quality)} "
        f"unpruned. Largest level of {arguments.kind}s that costs at most "
        f"{amount}, each layer pruned alone:\n"
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
    from tune_cac.cli.console import write_asked

    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row.parameter, []).append((row.sparsity, row.top1))
    picture = figure_html(
        f"{arguments.workload}: each layer pruned alone, not retrained",
        sensitivity(curves, allowed_drop=allowed, quality=quality, pruned=f"{arguments.kind}s"),
    )
    section = pruners_section(proposals, arguments.kind)
    schedule = (
        f"# Proposed by: tune_cac sensitivity --workload {arguments.workload} --kind {arguments.kind} "
        f"--allowed-drop {allowed}\n"
        "# Each layer was pruned alone and not retrained: together they lose more, and with retraining less.\n"
        "# A section to paste into a schedule, which needs version and policies, too.\n"
        + yaml.safe_dump({"pruners": section}, sort_keys=False)
    )
    print()
    for name, content, what in (
        (CSV_FILE, to_csv(rows), "Accuracies" if quality.is_accuracy else "Values"),
        (PICTURE_FILE, picture, "Picture"),
        (SCHEDULE_FILE, schedule, "Pruners for a schedule"),
    ):
        write_asked(folder / name, content, "--output", "choose another folder")
        print(f"{what}: {folder / name}")
    if not section:
        print("No layer tolerates any of these levels within the allowed drop, so no pruner is proposed.")
