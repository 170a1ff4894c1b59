"""The command ``doctor``: layers, cost and repeatability of a training run on this machine, by a short dry run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.formatting import percent, plural
from analysis.io.study_options import TRIALS
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.runtime.processors import processors
from tune_cac.cli.arguments import config_from_arguments, run_arguments
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_table

if TYPE_CHECKING:
    from trainables.training.doctor.dry_run import DryRun, ParameterFacts

#: Most parameters to show one by one; larger models are shown by units.
MOST_ROWS = 60


@command(
    *run_arguments(epochs="epochs of a run", seed="seed of the run"),
    argument("--trials", default=TRIALS, at_least=1, help="trials of the search that is estimated"),
    argument(
        "--script", metavar="COMMAND", help="look at your own training instead, 'python train.py ...': it is run for "
        "some steps and ended",
    ),
    argument("--all-layers", action="store_true", help="show every parameter of a large model"),
    help="a short dry run: layers, FLOPs, memory, times, and whether it repeats exactly",
    description="A short dry run of a training: layers with numbers, names and FLOPs, memory, time of a step, how long "
    "a search would take, and whether training repeats bit for bit on this machine.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Train and evaluate briefly; print what a run costs, and whether it repeats bit for bit."""
    if arguments.script is not None:
        return _look_at_script(arguments.script)
    config = config_from_arguments(arguments, method="none")
    from trainables.stage_tree.root import device_kind
    from trainables.training.doctor.determinism import why_not_repeatable
    from trainables.training.doctor.dry_run import MOST_UNITS, dry_run, run_findings
    from trainables.workloads import build_for
    from tune_cac.study.folder import package_versions

    build_for(config).check(config.seed)
    found = dry_run(config, most_units=None if arguments.all_layers else MOST_UNITS)
    print("versions: " + ", ".join(f"{name} {version}" for name, version in package_versions().items()))
    print(f"device: {config.device} ({device_kind(config.device)}), {plural(config.threads, 'thread')} a trial")
    samples = "" if found.train_samples is None else f"{found.train_samples:,} samples, "
    shapes = ", ".join(f"{shape} {dtype}" for shape, dtype in found.batch_shapes)
    print(
        f"run: {samples}{found.steps_per_epoch:,} steps an epoch, {found.epochs:,} epochs, "
        f"{found.total_steps:,} steps in all; a batch is {shapes}\n"
    )
    _print_layers(found, arguments.all_layers)
    print()
    _print_costs(found, config, arguments.trials)
    if reason := why_not_repeatable(config):
        print(
            f"training {config.workload} does not repeat bit for bit here: {reason}. A search of one's own workload "
            "then trains every trial alone, in a process of its own. On a GPU, call "
            "torch.use_deterministic_algorithms(True) in the workload: operations with deterministic kernels then "
            "repeat"
        )
    else:
        trial = "a trial that is forked from another equals the trial alone"
        print(f"training {config.workload} repeats bit for bit: {trial}")
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


def _print_layers(found: DryRun, all_layers: bool) -> None:
    """Print one row a parameter, or for a large model one a unit, and notes on how to read them."""
    rows = found.parameters
    units: list[list[ParameterFacts]] = [[]]  # parameters after the last unit's end form one more group
    for row in rows:
        units[-1].append(row)
        if row.unit_end:
            units.append([])
    units = [unit for unit in units if unit]
    by_units = len(rows) > MOST_ROWS and len(units) > 1 and not all_layers
    print(f"layers: {len(rows)} parameters in the model's order, {sum(row.elements for row in rows):,} elements")
    names = ["unit", "parameters"] if by_units else ["parameter", "shape"]
    header = ["number", *names, "elements", "watched", "saved"]
    print_table([header, *(_cells(group, by_units) for group in (units if by_units else [[row] for row in rows]))])
    print(
        "number: what CAC_STOP_LAYER_NUM takes; a stop at N stops the parameters 0..N. saved: share of a step's FLOPs "
        "that is gone then, at the ends of units (a layer with its bias and norm)"
    )
    ends = [row for row in rows if row.unit_end]
    if uncounted := sum(row.saved is None for row in ends):
        print(f"saved is not counted for {uncounted} of the {len(ends)} units: --all-layers counts each")
    if by_units:
        print(f"one row a unit, for the model has more than {MOST_ROWS} parameters: --all-layers shows each")
    if not any(row.watched for row in rows):
        print("the rule watches nothing here by default (CAC_WATCH=conv): set CAC_WATCH=linear, or module classes")


def _cells(group: Sequence[ParameterFacts], by_units: bool) -> list[str]:
    """Return the row of a parameter, or of a unit, named by its largest parameter."""
    leading, last = max(group, key=lambda row: row.elements), group[-1]
    return [
        str(last.number),
        leading.name,
        str(len(group)) if by_units else "x".join(map(str, leading.shape)) or "scalar",
        f"{sum(row.elements for row in group):,}",
        "yes" if any(row.watched for row in group) else "",
        "" if last.saved is None else percent(last.saved),
    ]


def _print_costs(found: DryRun, config: TrialConfig, trials: int) -> None:
    """Print lines with the FLOPs, the memory and the times of steps, runs and a search."""
    flops = (found.step_cost.forward_flops, found.step_cost.backward_flops, found.run_flops)
    forward, backward, of_run = (quantity_text(count, "FLOP") for count in flops)
    most = "at most " if found.train_samples is None else ""  # the last batch may be smaller
    print(f"compute: a step {forward} forward, {backward} backward; a run {most}{of_run}")
    memory = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes, found.peak_bytes)
    parameters, gradients, optimizer, peak = (quantity_text(count, "B") for count in memory)
    whose = "allocated on the device" if config.device == "cuda" else "of the process"
    print(f"memory: parameters {parameters}, gradients {gradients}, optimizer {optimizer}; peak {whose} {peak}")
    times = found.step_times_s
    print(
        f"time: a step {time_text(found.step_time_s)} (median of {len(times)}, {time_text(min(times))} to "
        f"{time_text(max(times))}), {percent(found.loader_share)} of it waiting for the batch; an evaluation "
        f"{time_text(found.evaluation_time_s)}; a run {time_text(found.run_time_s)}"
    )
    at_a_time = max(1, processors() // config.threads)
    if config.device == "cuda":
        import torch

        at_a_time = max(1, torch.cuda.device_count())
    print(
        f"search: {trials} trials, {at_a_time} at a time and each trained alone, would take "
        f"{time_text(found.search_time_s(trials, at_a_time))} if they do not slow each other down (controls "
        "come on top); trials share what they have in common, which makes a search several times shorter "
        "(docs/stage-tree.md)"
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
