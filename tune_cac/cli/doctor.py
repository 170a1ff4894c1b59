"""The command ``doctor``: layers, cost and repeatability of a training run on this machine, by a short dry run."""

from __future__ import annotations

import argparse
import shlex
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from analysis.formatting import percent, plural
from trainables.config import TrialConfig
from trainables.errors import UserError
from tune_cac.cli.arguments import RUN, config_from_arguments
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_sentences, print_table

if TYPE_CHECKING:
    from trainables.training.doctor.dry_run import DryRun, ParameterFacts


@command(
    *RUN,
    argument(
        "--script", metavar="COMMAND", help="look at your own training instead, 'python train.py ...': it is run for "
        "some steps and ended",
    ),
    help="a short dry run: layers, FLOPs, memory, times, and whether it repeats exactly",
    description="A short dry run of a training: layers with numbers, names and FLOPs, memory, time of a step, "
    "and whether training repeats bit for bit on this machine.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Train and evaluate briefly; print what a run costs, and whether it repeats bit for bit."""
    if arguments.script is not None:
        return _look_at_script(arguments.script)
    config = config_from_arguments(arguments, method="none")
    from trainables.stage_tree.root import device_kind
    from trainables.training.doctor.determinism import why_not_repeatable
    from trainables.training.doctor.dry_run import dry_run, run_findings
    from trainables.workloads import build_for
    from tune_cac.study.folder import package_versions

    build_for(config).check(config.seed)
    found = dry_run(config)
    print_sentences("versions: " + ", ".join(f"{name} {version}" for name, version in package_versions().items()))
    print_sentences(
        f"device: {config.device} ({device_kind(config.device)}), {plural(config.threads, 'thread')} a trial"
    )
    samples = "" if found.train_samples is None else f"{found.train_samples:,} samples, "
    shapes = ", ".join(f"{shape} {dtype}" for shape, dtype in found.batch_shapes)
    print_sentences(
        f"run: {samples}{found.steps_per_epoch:,} steps an epoch, {found.epochs:,} epochs, "
        f"{found.total_steps:,} steps in all; a batch is {shapes}"
    )
    print()
    _print_layers(found)
    print()
    _print_costs(found, config)
    if reason := why_not_repeatable(config):
        print_sentences(
            f"training {config.workload} does not repeat bit for bit here: {reason}. A search of one's own workload "
            "then trains every trial alone. On a GPU, call torch.use_deterministic_algorithms(True) in the workload"
        )
    else:
        print_sentences(
            f"training {config.workload} repeats bit for bit: a trial forked from another equals the trial alone"
        )
    print(run_findings(config, found.loader_share))
    return 0


def _look_at_script(command: str) -> int:
    """Run the user's command under observation; return its exit status."""
    import subprocess
    import sys

    program, *rest = shlex.split(command) or [""]
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest = rest[1:]
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    if not Path(program).name.startswith("python") or not rest or (rest[0].startswith("-") and not is_module):
        raise UserError(f"--script of doctor must be 'python FILE ...' or 'python -m MODULE ...', got {command!r}")
    if not is_module and not Path(rest[0]).is_file():
        raise UserError(f"--script of doctor must name a file that is there, got {rest[0]}")
    from trainables.training.doctor import script_probe

    return subprocess.run([sys.executable, "-m", script_probe.__name__, *rest]).returncode


def _print_layers(found: DryRun) -> None:
    """Print one row a unit, named by the parameter whose module computes most, and notes on how to read them."""
    rows = found.parameters
    units: list[list[ParameterFacts]] = [[]]  # parameters after the last unit's end form one more group
    for row in rows:
        units[-1].append(row)
        if row.unit_end:
            units.append([])
    print_sentences(
        f"layers: {len(rows)} parameters in the model's order, {sum(row.elements for row in rows):,} elements"
    )
    table = [["number", "unit", "parameters", "elements", "watched", "saved"]]
    for unit in filter(None, units):
        last = unit[-1]
        cells = [
            str(last.number),
            max(unit, key=lambda row: row.elements).name,
            str(len(unit)),
            f"{sum(row.elements for row in unit):,}",
            "yes" if any(row.watched for row in unit) else "",
            "" if last.saved is None else percent(last.saved),
        ]
        table.append(cells)
    print_table(table)
    print_sentences(
        "unit: a layer with its bias and norm. number: what CAC_STOP_LAYER_NUM takes; a stop at N stops the parameters "
        "0..N. saved: share of a step's FLOPs that is gone then, counted for some of many units"
    )
    if not any(row.watched for row in rows):
        print_sentences(
            "the rule watches nothing here by default (CAC_WATCH=conv): set CAC_WATCH=linear, or module classes"
        )


def _print_costs(found: DryRun, config: TrialConfig) -> None:
    """Print lines with the FLOPs, the memory and the times of steps and runs."""
    flops = (found.step_cost.forward_flops, found.step_cost.backward_flops, found.run_flops)
    forward, backward, of_run = (quantity_text(count, "FLOP") for count in flops)
    most = "at most " if found.train_samples is None else ""  # the last batch may be smaller
    print_sentences(f"compute: a step {forward} forward, {backward} backward; a run {most}{of_run}")
    memory = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes, found.peak_bytes)
    parameters, gradients, optimizer, peak = (quantity_text(count, "B") for count in memory)
    whose = "allocated on the device" if config.device == "cuda" else "of the process"
    print_sentences(
        f"memory: parameters {parameters}, gradients {gradients}, optimizer {optimizer}; peak {whose} {peak}"
    )
    if found.moved_norms:
        distances, ratios = zip(*found.moved_norms, strict=True)
        print_sentences(
            f"norms: {len(ratios)} have statistics of an earlier training. The means of this one's batches lie "
            f"{median(distances):.2f} deviations away (median), their variances are {min(ratios):.2f} to "
            f"{max(ratios):.2f} of the earlier ones. CAC_NORM_STATISTICS=hold_all keeps the earlier ones; search "
            "--space frozen_prefix measures what that gains"
        )
    times = found.step_times_s
    print_sentences(
        f"time: a step {time_text(found.step_time_s)} (median of {len(times)}, {time_text(min(times))} to "
        f"{time_text(max(times))}), {percent(found.loader_share)} of it waiting for the batch; an evaluation "
        f"{time_text(found.evaluation_time_s)}; a run {time_text(found.run_time_s)}"
    )


def quantity_text(count: float, unit: str) -> str:
    """Return a quantity as text with four digits, in powers of 1000 of its unit.

    >>> quantity_text(0, "FLOP"), quantity_text(1_234_567, "FLOP"), quantity_text(94_000_000, "B")
    ('0 FLOP', '1.235 MFLOP', '94 MB')
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 999.95:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} E{unit}"


def time_text(seconds: float) -> str:
    """Return a time as text, from microseconds to days.

    >>> [time_text(s) for s in (0.00025, 0.0123, 4.0, 75, 200_000)]
    ['0.25 ms', '12.3 ms', '4 s', '0:01:15', '2 days, 7:33:20']
    """
    if seconds >= 59.95:
        return str(timedelta(seconds=round(seconds)))
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
