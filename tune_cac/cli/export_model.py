"""The command ``export-model``: a trained model as a file that other programs run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from analysis.io.study_options import RESULTS
from trainables.errors import UserError, unknown_name
from trainables.registry import SCRIPT
from tune_cac.cli.arguments import ALLOWED_DROP, study_of
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_sentences, print_table
from tune_cac.cli.export import answer_of_study, trial_of_study
from tune_cac.messages import say

if TYPE_CHECKING:
    from torch import nn

    from trainables.config import TrialConfig
    from trainables.deployment.call import Call
    from trainables.deployment.exporting import ExportedModel
    from trainables.training.run import TrainingRun

#: Samples of the batches whose latency is measured.
BATCHES = (1, 32)
#: Training batches from which --int8 takes ranges of activations.
CALIBRATION_BATCHES = 16


@command(
    argument("source", metavar="STUDY|FILE", help="a study, or what trial --save wrote"),
    argument("--to", default="onnx", help="onnx, or torch: a file of torch.export"),
    argument("--output", metavar="FILE", help="the file to write (default: model.onnx, model.pt2)"),
    argument(
        "--int8", action="store_true", help="quantize what the training did not, by onnxruntime and training data"
    ),
    argument("--quantize", metavar="FILE", help="quantize by a PostTrainLinearQuantizer's settings in YAML"),
    argument("--trial", type=int, help="number of the study's trial (default: the best)"),
    argument("--results", default=RESULTS, help="folder that holds the studies"),
    ALLOWED_DROP,
    help="write a trained model as ONNX or torch.export file, and compare it",
    description="Write a trained model as a file that other programs run: pruned and thinned as it is, quantized "
    "weights as int8; run the file on the validation split, and compare its outputs with the model's, size and latency "
    "with the model as built. A study keeps no weights, so its trial is trained here once more.",
)
def run(arguments: argparse.Namespace) -> int:
    """Export a model and print the comparison; 1 if the file's outputs are not the model's."""
    from trainables.deployment.exporting import FORMATS, check_output

    if arguments.to not in FORMATS:
        raise unknown_name("--to", arguments.to, FORMATS)
    if arguments.int8 and arguments.to != "onnx":
        raise UserError("--int8 is onnxruntime's: leave it out, or use --to onnx")
    output = Path(arguments.output or f"model{FORMATS[arguments.to]}")
    if output.suffix != FORMATS[arguments.to]:
        raise UserError(f"--output must end in {FORMATS[arguments.to]} for --to {arguments.to}, got {output}")
    check_output(output, arguments.to)
    with _trained(arguments) as trained:
        return _export(trained, output, int8=arguments.int8, quantize=arguments.quantize)


@contextmanager
def _trained(arguments: argparse.Namespace) -> Iterator[TrainingRun]:
    """Yield a run with trained weights: those of a file, or a study's trial trained again."""
    from trainables.config import TrialConfig
    from trainables.training.run import TrainingRun
    from trainables.workloads.models.pretrained import read_weights

    file = Path(arguments.source)
    if file.suffix in (".pt", ".pth") and not file.exists():
        raise UserError(f"there is no file {file}: give what trial --save wrote, or a study")
    if file.is_file():
        if arguments.trial is not None:
            raise UserError(f"--trial is a study's, got the file {file}: leave it out")
        weights: Any = read_weights(file, "the model of")
        about = getattr(weights, "trained_with", None)
        if about is None:
            raise UserError(
                f"{file} must be what trial --save wrote, which says how the model is built: for a model of your own "
                "call tune_cac.export_model(model, (inputs,), 'model.onnx')"
            )
        with TrainingRun(TrialConfig.from_mapping(about["config"])) as run:
            if about["method"]:
                run.method.prepare_structure(about["method"])
            run.model.load_state_dict(weights)
            yield run
        return
    config, quality = _of_study(arguments)
    with TrainingRun(config) as run:
        while not run.finished:
            row = run.train_epoch()
        if row["quality"] != quality:
            say(f"warning: trained again, its {run.quality.name} is {row['quality']:.5g}, in the study {quality:.5g}: "
                "another machine or version rounds otherwise")  # fmt: skip
        yield run


def _of_study(arguments: argparse.Namespace) -> tuple[TrialConfig, float]:
    """Return the configuration of the trial that is asked for, and its quality."""
    from analysis.presentation.summary_text import config_of

    arguments.study = arguments.source
    layout, _, drop = study_of(arguments)
    row = answer_of_study(layout, drop)[1] if arguments.trial is None else trial_of_study(layout, arguments.trial)
    if row["status"] != "completed":
        raise UserError(f"only a completed trial has a model, trial {row['trial']} is {row['status']}: choose another")
    config = config_of(row)
    if config.workload == SCRIPT:
        raise UserError(
            "the model of a script is known to the script alone: end it with "
            "tune_cac.export_model(model, (inputs,), 'model.onnx')"
        )
    say(f"training trial {row['trial']} again: {config.epochs} epochs")
    return config, float(row["accuracy"])


def _export(run: TrainingRun, output: Path, *, int8: bool, quantize: str | None) -> int:
    import torch

    from analysis.formatting import value_text
    from trainables.compression.quantizers import is_quantized
    from trainables.deployment.comparison import RoundedAlike, call_of, compare, latencies, tolerance
    from trainables.deployment.exporting import Deployed, export_model, quantized_after
    from trainables.deployment.fixed_model import cpu_copy

    workload, quality, threads = run.workload, run.quality, run.config.threads
    if (int8 or quantize) and is_quantized(run.model):
        raise UserError("--int8 and --quantize are for a model without a quantizer: leave them out")
    model, cpu = cpu_copy(run.model), torch.device("cpu")
    with torch.no_grad():
        metrics = workload.metrics_on(model, "validation", cpu, quality.name)
        call = call_of(model, partial(workload.evaluate, model, "validation", cpu))
        built = workload.make_model().eval()
        if quantize is not None:
            _quantize(run, model, quantize)
        exported = export_model(model, call.args, output, kwargs=call.kwargs)
        # As the graph is written, and what the kernels make of it.
        written, executed = (RoundedAlike(model, exported, as_written=as_written) if exported.rounded else model
                             for as_written in (True, False))  # fmt: skip
        same = compare(written, Deployed(exported, model, as_written=True), workload, quality.name)
        if int8:
            batches = islice(workload.train_batches(0, run.config.seed), CALIBRATION_BATCHES)
            fixed = quantized_after(
                exported, [call_of(model, partial(workload.loss, model, batch)) for batch in batches]
            )
        deployed = Deployed(exported, model, threads=threads)
        ran = compare(executed, deployed, workload, quality.name)
        most = tolerance(model, workload, quality.name, getattr(executed, "quantizers", ()))
        for title, other in {"as built": built, **_teachers(run, built)}.items():
            with TemporaryDirectory() as folder:
                whole = export_model(other, call.args, Path(folder, output.name), kwargs=call.kwargs)
                print_table(_table(title, whole, exported, Deployed(whole, other, threads=threads), deployed, call))
            print()
        simulated = latencies(model, deployed, call.repeated(BATCHES[-1])) if is_quantized(model) else None
    of_model, of_file = (value_text(found[quality.name], quality) for found in (metrics, ran.metrics))
    lines = [
        f"{quality.name} on {same.samples} samples of validation: {of_model}, of the file {of_file}",
        f"outputs differ by {same.difference:.1e} of their size (rms; tolerance {most:.2g}), as executed by "
        f"{ran.difference:.1e}",
    ]
    wrong = 0
    if isinstance(written, RoundedAlike) and isinstance(executed, RoundedAlike):
        wrong = written.wrong + executed.wrong
        lines.append(
            f"of {executed.activations:,} rounded activations {executed.between:,} lie between two steps and fall on "
            f"another in the file, as in the model here; {wrong:,} are rounded otherwise"
        )
    if simulated is not None:
        lines.append(
            f"the simulation in torch takes {1000 * simulated.first_s:.3g} ms for a batch of {BATCHES[-1]}, the file "
            f"{simulated.ratio:.2f} of that"
        )
    if quantize is not None:
        lines.append(f"{quality.name} by {quantize} as simulated: {value_text(same.metrics[quality.name], quality)}")
    if int8:
        how = f"from {CALIBRATION_BATCHES} training batches" if fixed else "anew at every call"
        lines.append(f"ranges of activations: {how}")
    print_sentences(*lines, *_about(exported, model))
    if max(same.difference, 0 if int8 else ran.difference) <= most and not wrong:
        return 0
    say(f"tune_cac: {output} does not compute what the model computes: do not use it")
    return 1


def _quantize(run: TrainingRun, model: nn.Module, file: str) -> None:
    """Quantize a trained model in place by a file's settings, with ranges of its statistics or of training batches."""
    from trainables.compression.quantizers import build_quantizer
    from trainables.compression.quantizers.quantized_modules import CalibratedRange
    from trainables.compression.schedule import read_schedule

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is for a trained model
        components = list(read_schedule(Path(file)).components())
    if [one.class_name for one in components] != ["PostTrainLinearQuantizer"] or components[0].settings is None:
        raise UserError(f"--quantize {file} must have a PostTrainLinearQuantizer and nothing else")
    quantizer = build_quantizer(components[0].name, components[0].settings, model)
    quantizer.prepare(model, None)
    for module in model.modules():
        if isinstance(module, CalibratedRange):
            module.train()
    for batch in islice(run.workload.train_batches(0, run.config.seed), CALIBRATION_BATCHES):
        run.workload.loss(model, batch)
    quantizer.finish_epoch(model)
    model.eval()


def _teachers(run: TrainingRun, built: nn.Module) -> dict[str, nn.Module]:
    """Return the models, with any weights, that the run's model has learned from, unless they are built like it."""
    from trainables.compression.distillation import SAME, build_teacher
    from trainables.compression.schedule.configs import KnowledgeDistillationConfig
    from trainables.compression.trial.from_config import schedule_of

    found = {}
    for given in schedule_of(run.config).get("distillers", {}).values():
        if (name := given.get("teacher") or SAME) != SAME:
            settings = KnowledgeDistillationConfig(teacher=name, pretrained=given.get("pretrained", False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it has random weights
                found[f"teacher {name}"] = build_teacher(settings, built).eval()
    return found


def _table(
    title: str, whole: ExportedModel, exported: ExportedModel, before: nn.Module, after: nn.Module, call: Call
) -> list[list[str]]:
    """Return what the file costs beside another model in the same format, such as the model as it was built."""
    from trainables.deployment.comparison import latencies

    def line(name: str, first: int, second: int) -> list[str]:
        return [name, f"{first:,}", f"{second:,}", f"{second / first:.2f}" if first else "-"]

    rows = [
        ["", title, exported.file.name, "ratio"],
        line("bytes", whole.bytes, exported.bytes),
        line("bytes, zipped", whole.zipped_bytes, exported.zipped_bytes),
        line("multiply-adds a sample", whole.macs, exported.macs),
    ]
    for size in BATCHES:
        found = latencies(before, after, call.repeated(size))
        times = (f"{1000 * seconds:.3g} ms" for seconds in (found.first_s, found.second_s))
        spread = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
        rows.append([f"latency, batch of {size}", *times, spread])
    return rows


def _about(exported: ExportedModel, model: nn.Module) -> list[str]:
    """Return what of a model's compression saves time, and what does not."""
    from analysis.formatting import percent
    from trainables.compression.measures import zero_share
    from trainables.compression.quantizers import is_quantized
    from trainables.deployment.exporting import EXACT_SUMS, executed_products

    lines = []
    if exported.file.suffix == ".onnx":
        integers, floats = executed_products(exported.file)
        if integers:
            lines.append(f"onnxruntime multiplies integers in {integers} of {integers + floats} layers")
            lines.append(f"on x86 CPUs without VNNI sums saturate unless a session has {'='.join(EXACT_SUMS)}")
        elif is_quantized(model):
            lines.append(f"simulated only: onnxruntime multiplies floats in all {floats} layers")
    elif exported.has_integers:
        lines.append("simulated only: int8 weights are multiplied as floats here; --to onnx executes them")
    if exported.simulated:
        lines.append(f"simulated only, by floats of few values: {', '.join(exported.simulated)}")
    alone = zero_share(model)
    if alone >= 0.005:
        lines.append(
            f"{percent(alone)} of the weights are zero: no kernel here skips them, they save zipped bytes alone"
        )
    return lines
