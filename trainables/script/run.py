"""A trial that a user's command trains: it gets variables and reports rows.

A row is delayed until the next report comes or the command has ended, because the last row is given only after a
successful end.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig, field_names
from trainables.errors import TrainingDiverged, UserError
from trainables.gradskip.script_counting.trace_file import TRACE_VARIABLE, TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.gradskip.variable_types import is_number
from trainables.gradskip.variables import BY_NAME
from trainables.metrics import METHOD_DEFAULTS, METRICS, MODEL_DEFAULTS, further_columns
from trainables.savings import share_saved
from trainables.script.launcher_output import lines_of_failed_process
from trainables.script.own_length import OwnLength
from trainables.script.placeholders import EPOCHS_VARIABLE, fill
from trainables.script.process import ScriptProcess
from trainables.script.report_lines import REPORTS_FILE, ReportError, read_report, takes_no_step, tells_cost
from trainables.storage import DiskFiles, copy_files, files_of, is_uri
from trainables.workload_options import SCRIPT_OPTIONS, read_options

#: The script's output, in the trial's folder.
LOG_FILE = "output.log"
#: Additional column of a row: facts about the run that a space may use, as JSON.
RUN_FACTS = "run_facts"
#: Lines of output that a failure shows, of those that are read.
_SHOWN_LINES, _READ_LINES = 12, 400
_SHOWN_CHARACTERS = 200
#: Savings of a baseline up to this value are rounding errors.
_NOTHING = 1e-6
#: Folder in the trial's for what torchrun's processes print, other than the first.
RANKS_FOLDER = "ranks"
#: Defaults of torchrun and accelerate, which start several processes: stdout of all but the first goes into files, so
#: that no metric counts twice. torchrun takes one digit for a process.
_REDIRECTS = ",".join(f"{rank}:1" for rank in range(1, 10))
#: Columns that only our optimizers count.
_COUNTED = ("forward_flops", "backward_flops", "gradient_bytes", "optimizer_bytes")


class ScriptFailed(RuntimeError):
    """The user's command failed, or reported too little."""


def settings_of(config: TrialConfig) -> Settings:
    """Return the settings for the script's optimizer; the baseline's is switched off."""
    return Settings(start_thr=-1) if config.method == "none" else config.gradskip_settings()


def placeholders(config: TrialConfig, folder: Path) -> dict[str, Any]:
    """Return the values of ``{NAME}`` in the command.

    These are the variables, seed, epochs, trial_dir, forward_cache_mb, and options that a space searches.
    """
    settings = settings_of(config)
    variables = {name: getattr(settings, variable.field) for name, variable in BY_NAME.items()}
    searched = {name: value for name, value in read_options(config.options).items() if name not in SCRIPT_OPTIONS}
    return {
        **searched,
        **variables,
        "CAC_VAR_SAMPLES": settings.sampling_interval,
        "seed": config.seed,
        "epochs": config.epochs,
        "trial_dir": str(folder),
        "forward_cache_mb": config.forward_cache_mb,
    }


def filled_command(config: TrialConfig, folder: Path) -> str:
    """Return the trial's command line.

    Raises:
        UserError: the command has an unknown placeholder.
    """
    values = placeholders(config, folder)
    return fill(read_options(config.options)["command"], values, list(values))


def check_command(config: TrialConfig) -> None:
    """Raise UserError where the command has an unknown placeholder, or several workers are asked for."""
    filled_command(config, Path("trial"))
    if config.workers > 1:
        raise UserError(
            f"--workers-per-trial must be 1 with --script, got {config.workers}: a script starts its own, as with "
            "torchrun"
        )


def environment_of(config: TrialConfig, folder: Path, trace: str = "") -> dict[str, str]:
    """Return the command's environment: this process's, with the trial's variables in place of all ``CAC_*``.

    The epochs of an answer that the shell has sourced are no trial's either.

    Where a launcher such as torchrun starts several processes, only the first one's stdout is read.

    Args:
        config: of the trial.
        folder: of the trial.
        trace: what its optimizer records (`trace_file.TRACE_VARIABLE`); empty for nothing.
    """
    left_out = ("CAC_", EPOCHS_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        "PET_REDIRECTS": _REDIRECTS,
        "PET_LOG_DIR": str(folder / RANKS_FOLDER),
        **inherited,
        **settings_of(config).to_environment(),
        "TUNE_CAC_SEED": str(config.seed),
        TRIAL_FOLDER: str(folder),
        TRACE_VARIABLE: trace,
        "OMP_NUM_THREADS": str(config.threads),
    }


def working_directory(config: TrialConfig) -> Path:
    """Return the folder in which the command runs: the one in which the search was started.

    Raises:
        ScriptFailed: that folder does not exist, for example on another machine.
    """
    wanted = Path(read_options(config.options).get("cwd", os.curdir))
    if not wanted.is_dir():
        raise ScriptFailed(
            f"{wanted}, from where the search was started, is not there on {platform.node()}: start a search with "
            "--script in a folder that every node sees"
        )
    return wanted.absolute()


class ScriptRun:
    """One run of the user's command, with the same interface as `TrainingRun`.

    Args:
        config: of the trial, with the options ``command`` and ``cwd``.
        folder: of the trial; the command's output is kept there. Of a URI, the command has a folder of this machine,
            whose files are written there when the run is closed.
        trace: as in `environment_of`.
        length: what the trial's length asks of it; None for the baseline.

    Raises (in `train_epoch`):
        ScriptFailed: the command ended with an error, reported nothing, or no savings.
        TrainingDiverged: an accuracy that is not finite.
    """

    def __init__(
        self, config: TrialConfig, folder: Path | str, *, trace: str = "", length: OwnLength | None = None
    ) -> None:
        self.config = config
        self._length = length
        self._begun_s = time.time()
        self.row: dict[str, Any] | None = None
        """The last report's row; None before the first."""
        self.finished = False
        """True if the command has ended successfully and its last row was returned."""
        self._begun = time.perf_counter()
        self._place = folder
        self._here = Path(tempfile.mkdtemp(prefix="tune_cac-")) if is_uri(folder) else Path(folder).absolute()
        here = self._here
        here.mkdir(parents=True, exist_ok=True)
        self._cwd = working_directory(config)
        self._process = ScriptProcess(
            filled_command(config, here),
            environment=environment_of(config, here, trace),
            cwd=self._cwd,
            log=here / LOG_FILE,
            reports=here / REPORTS_FILE,
        )
        self._rows = self._read()

    def close(self) -> None:
        """End the command and all processes that it started."""
        self._process.close()
        self._keep_files()

    def _keep_files(self) -> None:
        """Copy what the command wrote into object storage; before the last row, for the process may end after it."""
        if is_uri(self._place) and self._here.is_dir():
            try:
                copy_files(DiskFiles(self._here), files_of(self._place))
            except OSError as error:
                warnings.warn(f"the script's output was not kept in {self._place}: {error}", stacklevel=2)
            shutil.rmtree(self._here, ignore_errors=True)

    def train_epoch(self) -> dict[str, Any]:
        """Return the next report's row, with the facts about the run that a space may use."""
        try:
            self.row = next(self._rows)
        except BaseException:
            self.close()
            raise
        return self.row

    def _read(self) -> Iterator[dict[str, Any]]:
        held: dict[str, Any] | None = None
        last: dict[str, Any] = {}
        early: list[dict[str, Any]] = []
        count, name = 0, self.config.quality.name
        for line in self._process.lines():
            try:
                told = read_report(line, self.config.quality.name)
            except ReportError as error:
                raise ScriptFailed(f"the script printed a report that cannot be read: {error}") from None
            if told is None:
                continue
            if held is None and (takes_no_step(told) or not (early or tells_cost(told))):
                early.append(told)  # an evaluation before the training is no epoch
                continue
            if held is not None:
                yield held
            count += 1
            held, last = self._row(told, count), told
        if self._process.returncode != 0:
            raise ScriptFailed(self._how_it_failed(self._process.returncode))
        if held is None and early and not takes_no_step(early[-1]):
            held = self._row(early[-1], 1)  # which says what it lacks
        if held is None and early:
            raise ScriptFailed(
                f"the script reported before its first optimizer step alone ({len(early)} times): report after each "
                "epoch of training" + self._left_behind() + self._tail()
            )
        if held is None:
            raise ScriptFailed(
                f"the script printed no metric: call tune_cac.report({name}=..., step=...), or print a line such as "
                f'{{"{name}": 0.91, "step": 100}}' + self._left_behind() + self._tail()
            )
        if self._length is not None and (fault := self._length.fault(last, **self._where())):
            raise ScriptFailed(fault)
        self.close()
        value = held[self.config.quality.key]
        if not math.isfinite(value):
            raise TrainingDiverged(f"the {name} is {value} in the last report")
        self.finished = True
        yield held

    def _where(self) -> dict[str, Any]:
        return {"cwd": self._cwd, "folder": self._here, "begun_s": self._begun_s}

    def _left_behind(self) -> str:
        return "" if self._length is None else self._length.left_behind(*self._where().values())

    def _how_it_failed(self, code: int | None) -> str:
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        if code is not None and 128 < code <= 192:
            how += f" (signal {code - 128}, as a shell says it)"
        return f"the script {how}{self._tail()}"

    def _tail(self) -> str:
        printed = lines_of_failed_process(self._process.last_lines(_READ_LINES))[-_SHOWN_LINES:]
        lines = [line.strip()[:_SHOWN_CHARACTERS] for line in printed if line.strip()]
        return "; its last lines: " + " | ".join(lines) if lines else "; it printed nothing"

    def _row(self, told: Mapping[str, Any], count: int) -> dict[str, Any]:
        quality = self.config.quality
        further = {name: told[name] for name in ("accuracy", "test_accuracy") if name in told}
        further |= told.get("extra", {})
        measured = {quality.name: told.get(quality.name, further.pop(quality.name, None))}
        measured[quality.test] = told.get(quality.test, further.pop(quality.test, None))
        value = measured[quality.name]
        if value is None:
            raise ScriptFailed(
                f"a report must have {'an accuracy' if quality.is_accuracy else f'a value of {quality.name}'}, such as "
                f'{{"{quality.name}": 0.91, "step": 100}}'
            )
        _check_ranges(told, method=self.config.method)
        if quality.is_accuracy and not math.isfinite(value):
            raise TrainingDiverged(f"the accuracy is {value} in report {count}")
        counted = told.get("gradskip") or {}
        costs = costs_of(told, counted)
        wall_time_s = time.perf_counter() - self._begun
        step = told.get("step", counted.get("iteration"))
        return {
            "epoch": int(told.get("epoch", count)),
            "step": None if step is None else int(step),
            "train_loss": told.get("train_loss", told.get("loss")),
            quality.key: float(value),
            quality.test_key: measured[quality.test],
            **further_columns(_numbers(further)),
            **costs,
            "search_flops": costs["executed_flops"],
            "train_time_s": float(told.get("train_time_s", wall_time_s)),
            "wall_time_s": wall_time_s,
            "peak_memory_bytes": counted.get("peak_memory_bytes"),
            "learning_rate": None,
            "stage": "",
            **MODEL_DEFAULTS,
            **METHOD_DEFAULTS,
            **_stops(counted),
            RUN_FACTS: json.dumps(_facts(counted, step)),
        }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the further metrics of a report: its other numbers, without names that columns of results have."""
    taken = {*METRICS, *field_names()} - {"accuracy", "test_accuracy"}
    return {k: float(v) for k, v in values.items() if is_number(v) and k not in taken}


def _check_ranges(told: Mapping[str, Any], *, method: str) -> None:
    """Raise ScriptFailed for a number that is out of its range."""
    for name, rule, holds in (
        ("accuracy", "a fraction, 1 at most: divide a percentage by 100", lambda value: not value > 1),
        ("test_accuracy", "a fraction, 1 at most: divide a percentage by 100", lambda value: not value > 1),
        ("compute_saved", "a fraction, 1 at most", lambda value: value <= 1),
        ("executed_flops", ">= 0", lambda value: value >= 0),
        ("dense_flops", "> 0", lambda value: value > 0),
        ("step", ">= 1", lambda value: value >= 1),
    ):
        if told.get(name) is not None and not holds(told[name]):
            raise ScriptFailed(f"{name} of a report must be {rule}, got {told[name]:g}")
    if method == "none" and abs(told.get("compute_saved", 0.0)) > _NOTHING:
        raise ScriptFailed(
            "the baseline's compute_saved must be 0, for the others are compared with it, got "
            f"{told['compute_saved']:g}"
        )


def costs_of(told: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the FLOPs and the savings: as the script reports them, or as its optimizer counted them.

    If a script reports ``executed_flops`` without ``dense_flops``, the baseline's are used for these; if it reports
    only ``compute_saved``, no FLOPs are known.

    Raises:
        ScriptFailed: nothing is known.
    """
    nothing: dict[str, Any] = dict.fromkeys(_COUNTED)
    if "executed_flops" in told:
        executed = round(told["executed_flops"])
        dense = round(told.get("dense_flops", executed))
        saved = share_saved(executed, dense)
        return {
            **nothing,
            "compute_saved": float(told.get("compute_saved", saved)),
            "backward_saved": None,
            "executed_flops": executed,
            "dense_flops": dense,
        }
    if "compute_saved" in told:
        saved = float(told["compute_saved"])
        return {**nothing, "compute_saved": saved, "backward_saved": None, "executed_flops": None, "dense_flops": None}
    if counted.get("uncounted"):
        raise ScriptFailed(
            f"the FLOPs of {', '.join(counted['uncounted'])} are not known, so what was saved is not: report "
            "executed_flops or compute_saved"
        )
    if counted.get("dense_flops"):
        executed, backward = counted["forward_flops"] + counted["backward_flops"], counted["dense_backward_flops"]
        return {
            "compute_saved": share_saved(executed, counted["dense_flops"]),
            "backward_saved": share_saved(counted["backward_flops"], backward),
            "executed_flops": executed,
            "dense_flops": counted["dense_flops"],
            **{name: counted[name] for name in nothing},
        }
    if counted.get("steps"):
        raise ScriptFailed(
            "no FLOPs of the script's training could be counted, as where torch.compile hides them: train without it, "
            "or report executed_flops or compute_saved"
        )
    raise ScriptFailed(
        "the script tells nothing of what it computed: train with an optimizer of tune_cac.gradskip and report with "
        "tune_cac.report, or print compute_saved or executed_flops beside the accuracy"
    )


def _stops(counted: Mapping[str, Any]) -> dict[str, Any]:
    if not counted:
        return {}
    return {"stopped_through": counted["stopped_through"], "stop_events": json.dumps(counted["events"])}


def _facts(counted: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    names = counted.get("layer_names") or [f"parameter {number}" for number in range(counted.get("parameters", 0))]
    steps = counted.get("longest_iteration", step)  # thresholds are iterations of one optimizer
    return {
        "total_steps": None if steps is None else int(steps),
        "layer_names": names,
        "unit_ends": counted.get("unit_ends", []),
        "watch": counted.get("watch", []),
        "weight_decays": counted.get("weight_decays"),
        "steps": counted.get("steps", step),
        "measured_steps": counted.get("measured_steps"),
        "sizes": counted.get("sizes"),
    }
