"""The command ``doctor``: layers, cost and repeatability of a training run on this machine, by a short dry run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analysis.formatting import percent
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.workloads import default_epochs
from tune_cac.cli.console import print_table
from tune_cac.cli.workload_arguments import add_workload_options, workload_options

if TYPE_CHECKING:
    from trainables.training.doctor.determinism import Repetition
    from trainables.training.doctor.dry_run import DryRun, ParameterFacts

#: Most parameters to show one by one; larger models are shown by units.
MOST_ROWS = 60
#: Trials of a search unless asked otherwise, as in `tune_cac.study.options.SearchOptions`.
DEFAULT_TRIALS = 24
_FLOPS_HEADER = ["forward", "backward", "saved"]


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor", parents=[debug], help="a short dry run: layers, FLOPs, memory, times, and whether it repeats exactly",
        description="A short dry run of a training: layers with numbers, names and FLOPs, memory, time of a step, how "
        "long a search would take, and whether training repeats bit for bit on this machine.",
    )  # fmt: skip
    parser.add_argument("--workload", default="digits", help="what is trained (default: digits)")
    add_workload_options(parser)
    parser.add_argument("--epochs", type=int, help="epochs of a run (default: the workload's)")
    parser.add_argument("--trials", type=int, default=24, help="trials of the search that is estimated (default: 24)")
    parser.add_argument("--all-layers", action="store_true", help="show every parameter of a large model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train and evaluate briefly; print what a run costs, and whether it repeats bit for bit."""
    options = workload_options(arguments)
    epochs = getattr(arguments, "epochs", None)
    all_layers = getattr(arguments, "all_layers", False)
    trials = getattr(arguments, "trials", DEFAULT_TRIALS)
    if trials < 1:
        raise UserError(f"--trials must be an integer >= 1, got {trials}")
    config = TrialConfig(
        workload=arguments.workload,
        workload_options=options,
        epochs=default_epochs(arguments.workload, options or ()) if epochs is None else epochs,
        method="none",
        device=arguments.device,
        threads=arguments.threads,
    )
    from trainables.stage_tree.root import device_kind
    from trainables.training.doctor.determinism import repetition
    from trainables.training.doctor.dry_run import MOST_UNITS, dry_run
    from trainables.workloads import build
    from tune_cac.study.folder import package_versions

    build(config.workload, config.options).check(config.seed)
    found = dry_run(config, most_units=None if all_layers else MOST_UNITS)
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    print("versions: " + ", ".join(f"{name} {version}" for name, version in package_versions().items()))
    print(f"device: {config.device} ({device_kind(config.device)}), {threads} a trial")
    print(length_line(found))
    print()
    _print_layers(found, all_layers)
    print()
    print(compute_line(found))
    print(memory_line(found, config.device))
    print(time_line(found))
    print(search_line(found, trials, trials_at_a_time(config)))
    print(repeats_line(config.workload, repetition(config)))
    return 0


def length_line(found: DryRun) -> str:
    """Return a line with the length of a run and the shapes of its batches."""
    samples = "" if found.train_samples is None else f"{found.train_samples:,} samples, "
    shapes = ", ".join(f"{shape} {dtype}" for shape, dtype in found.batch_shapes)
    return (
        f"run: {samples}{found.steps_per_epoch:,} steps an epoch, {found.epochs:,} epochs, "
        f"{found.total_steps:,} steps in all; a batch is {shapes}"
    )


def _print_layers(found: DryRun, all_layers: bool) -> None:
    rows = found.parameters
    elements = sum(row.elements for row in rows)
    units = units_of(rows)
    by_units = len(rows) > MOST_ROWS and len(units) > 1 and not all_layers
    print(f"layers: {len(rows)} parameters in the model's order, {elements:,} elements")
    print_table(unit_cells(units) if by_units else parameter_cells(rows))
    print("\n".join(layer_notes(found, by_units)))


def layer_notes(found: DryRun, by_units: bool) -> list[str]:
    """Return notes on FLOPs outside layers and on how to read the table."""
    rows = found.parameters
    notes = []
    outside = (found.outside_forward_flops, found.outside_backward_flops)
    if any(outside):
        notes.append(f"outside layers: {flops_text(outside[0])} forward, {flops_text(outside[1])} backward")
    notes.append(
        "number: what CAC_STOP_LAYER_NUM takes; a stop at N stops the parameters 0..N. saved: share of a step's FLOPs "
        "that is gone then, at the ends of units (a layer with its bias and norm)"
    )
    ends = [row for row in rows if row.unit_end]
    uncounted = sum(row.saved is None for row in ends)
    if uncounted:
        notes.append(f"saved is not counted for {uncounted} of the {len(ends)} units: --all-layers counts each")
    if by_units:
        notes.append(f"one row a unit, for the model has more than {MOST_ROWS} parameters: --all-layers shows each")
    if not any(row.watched for row in rows):
        notes.append(
            "the rule watches nothing here by default (CAC_WATCH=conv): set CAC_WATCH=linear, or module classes"
        )
    return notes


def parameter_cells(rows: Sequence[ParameterFacts]) -> list[list[str]]:
    """Return a table of text cells with one row per parameter."""
    cells = [["number", "parameter", "shape", "elements", "watched", *_FLOPS_HEADER]]
    for row in rows:
        shape = "x".join(str(size) for size in row.shape) or "scalar"
        watched = "yes" if row.watched else ""
        cost = ["" if flops is None else flops_text(flops) for flops in (row.forward_flops, row.backward_flops)]
        cells.append([str(row.number), row.name, shape, f"{row.elements:,}", watched, *cost, _share(row.saved)])
    return cells


def units_of(rows: Sequence[ParameterFacts]) -> list[list[ParameterFacts]]:
    """Return parameters by unit; those after the last unit's end form one more group."""
    groups: list[list[ParameterFacts]] = [[]]
    for row in rows:
        groups[-1].append(row)
        if row.unit_end:
            groups.append([])
    return [group for group in groups if group]


def unit_cells(units: Sequence[Sequence[ParameterFacts]]) -> list[list[str]]:
    """Return a table of text cells with one row per unit, named by the parameter whose module computes most."""
    cells = [["number", "unit", "parameters", "elements", "watched", *_FLOPS_HEADER]]
    for unit in units:
        leading = max(unit, key=lambda row: row.forward_flops or 0)
        cells.append(
            [
                str(unit[-1].number),
                leading.name,
                str(len(unit)),
                f"{sum(row.elements for row in unit):,}",
                "yes" if any(row.watched for row in unit) else "",
                flops_text(sum(row.forward_flops or 0 for row in unit)),
                flops_text(sum(row.backward_flops or 0 for row in unit)),
                _share(unit[-1].saved),
            ]
        )
    return cells


def compute_line(found: DryRun) -> str:
    """Return a line with the FLOPs of a step and of a run."""
    cost = found.step_cost
    most = "at most " if found.train_samples is None else ""  # the last batch may be smaller
    return (
        f"compute: a step {flops_text(cost.forward_flops)} forward, {flops_text(cost.backward_flops)} backward; "
        f"a run {most}{flops_text(found.run_flops)}"
    )


def memory_line(found: DryRun, device: str) -> str:
    """Return a line with the memory of parameters, gradients and optimizer, and the peak."""
    memory = found.memory
    whose = "allocated on the device" if device == "cuda" else "of the process"
    return (
        f"memory: parameters {bytes_text(memory.parameter_bytes)}, gradients {bytes_text(memory.gradient_bytes)}, "
        f"optimizer {bytes_text(memory.optimizer_bytes)}; peak {whose} {bytes_text(memory.peak_bytes)}"
    )


def time_line(found: DryRun) -> str:
    """Return a line with the times of a step, of loading, of an evaluation and of a run."""
    times = found.times
    spread = f"{time_text(min(times.step_times_s))} to {time_text(max(times.step_times_s))}"
    count = len(times.step_times_s)
    return (
        f"time: a step {time_text(times.step_time_s)} (median of {count}, {spread}), {percent(times.loader_share)} of "
        f"it waiting for the batch; an evaluation {time_text(times.evaluation_time_s)}; a run "
        f"{time_text(found.run_time_s)}"
    )


def search_line(found: DryRun, trials: int, at_a_time: int) -> str:
    """Return a line with the time of a search in which every trial trains alone."""
    return (
        f"search: {trials} trials, {at_a_time} at a time and each trained alone, would take "
        f"{time_text(found.search_time_s(trials, at_a_time))} if they do not slow each other down (controls come on "
        "top); trials share what they have in common, which makes a search several times shorter (docs/stage-tree.md)"
    )


def repeats_line(workload: str, found: Repetition) -> str:
    """Return a line on whether training repeats, and the consequences if it does not."""
    if not found.reason:
        return f"training {workload} repeats bit for bit: a trial that is forked from another equals the trial alone"
    return (
        f"training {workload} does not repeat bit for bit here: {found.reason}. A search of one's own workload then "
        "trains every trial alone, in a process of its own. On a GPU, call "
        "torch.use_deterministic_algorithms(True) in the workload: operations with deterministic kernels then repeat"
    )


def trials_at_a_time(config: TrialConfig) -> int:
    """Return how many trials this machine trains at a time: one per GPU, or as many as the processors allow."""
    if config.device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    return max(1, (os.cpu_count() or 1) // config.threads)


def flops_text(flops: int) -> str:
    """Return FLOPs as text with four digits.

    >>> flops_text(0), flops_text(1_234_567), flops_text(80_000_000_000)
    ('0 FLOP', '1.235 MFLOP', '80 GFLOP')
    """
    return _with_prefix(flops, "FLOP")


def bytes_text(count: int) -> str:
    """Return bytes as text with four digits, in powers of 1000.

    >>> bytes_text(512), bytes_text(94_000_000)
    ('512 B', '94 MB')
    """
    return _with_prefix(count, "B")


def time_text(seconds: float) -> str:
    """Return a time as text, from microseconds to days.

    >>> [time_text(s) for s in (0.00025, 0.0123, 4.0, 75, 7500, 200_000)]
    ['0.25 ms', '12.3 ms', '4 s', '1 min 15 s', '2 h 05 min', '2 d 7 h']
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _with_prefix(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 999.95:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} E{unit}"


def _share(fraction: float | None) -> str:
    return "" if fraction is None else percent(fraction)
