"""Arguments that several commands share, and what is read from them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.io.study_options import RESULTS
from trainables.config import TrialConfig
from trainables.gradskip.variables import EXAMPLE
from trainables.quality import read_drop
from trainables.training.device_choice import choose_device, sees_gpu
from trainables.workload_options import canonical, read_options
from trainables.workloads import default_epochs
from tune_cac.cli.command import argument
from tune_cac.messages import say

if TYPE_CHECKING:
    from analysis.io.study_files import Layout, StudyInfo

#: A study.
STUDY = (
    argument("study", metavar="STUDY", help="a study's folder, or its name under --results"),
    argument("--results", default=RESULTS, help="folder that holds the studies"),
)
ALLOWED_DROP = argument(
    "--allowed-drop", help="how much worse the metric may be, such as 0.005 or 2% (default: the study's)"
)
#: Variables, for `read_assignments`.
ASSIGNMENTS = argument(
    "--set", action="append", default=[], metavar="VARIABLE=VALUE", dest="assignments",
    help=f"a variable, such as {EXAMPLE}; may be repeated",
)  # fmt: skip
COMPATIBLE = argument(
    "--compatible", action="store_true", help="warn of what Distiller silently accepted instead of refusing it"
)
#: The options of a workload that many have.
DATA_AND_MODEL = (
    argument("--data", metavar="PATH", help="the workload's data, such as image Parquet or a folder"),
    argument("--model", help="the workload's model, such as resnet18, transformers:NAME or a folder"),
    argument("--weights", metavar="FILE", help="weights that the model begins with"),
)
#: Options of a workload, for `workload_options`.
WORKLOAD_OPTIONS = (
    *DATA_AND_MODEL,
    argument(
        "--option", dest="workload_options", action="append", metavar="NAME=VALUE",
        help="another option of the workload; may be repeated",
    ),
)  # fmt: skip


#: Arguments of a training run, for `config_from_arguments`.
RUN = (
    argument("--workload", default="digits", help="what is trained"),
    *WORKLOAD_OPTIONS,
    argument("--epochs", type=int, help="epochs (default: the workload's)"),
    argument("--seed", type=int, default=0, help="seed"),
    argument("--device", default="auto", help="cpu, cuda, or auto: what trains faster, by 20 steps on each"),
    argument("--threads", type=int, default=1, help="CPU threads"),
)


def workload_options(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the workload's options as a configuration holds them; None if none was given."""
    texts = list(getattr(arguments, "workload_options", None) or [])
    for name in ("data", "model", "weights"):
        if (value := getattr(arguments, name, None)) is not None:
            prefix = "transformers:" if value.startswith("transformers:") else ""
            path = Path(value.removeprefix(prefix)).expanduser()
            # A trial has another working directory. A folder of a model's name need not be meant.
            if path.exists() and (name != "model" or prefix or (path / "config.json").is_file()):
                value = f"{prefix}{path.absolute()}"
            texts.append(f"{name}={value}")
    return canonical(read_options(texts)) if texts else None


def config_from_arguments(arguments: argparse.Namespace, **values: Any) -> TrialConfig:
    """Return the configuration that the arguments `RUN` ask for, with other fields."""
    options = workload_options(arguments) or ()
    is_auto = arguments.device == "auto"
    config = TrialConfig(
        workload=arguments.workload,
        workload_options=options,
        epochs=default_epochs(arguments.workload, options) if arguments.epochs is None else arguments.epochs,
        seed=arguments.seed,
        device="cpu" if is_auto else arguments.device,
        threads=arguments.threads,
        **values,
    )
    if not (is_auto and sees_gpu()):
        return config
    found = choose_device(replace(config, method="none"))
    say(f"training {found}")
    return replace(config, device=found.device)


def study_of(arguments: argparse.Namespace) -> tuple[Layout, StudyInfo, float | str]:
    """Return the layout and the settings of the study that is asked for, and the allowed drop of its metric."""
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    info = layout.read_info()
    drop = info.allowed_drop if arguments.allowed_drop is None else read_drop(arguments.allowed_drop, info.quality)
    return layout, info, drop
