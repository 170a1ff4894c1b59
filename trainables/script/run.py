"""A trial that a user's command trains: it gets variables and reports rows.

A row is delayed until the next report comes or the command has ended, because the last row is given only after a
successful end.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from trainables.config import TrialConfig, field_names
from trainables.errors import TrainingDiverged, UserError
from trainables.gradskip.script_counting.trace_file import METRIC_VARIABLE, TRACE_VARIABLE, TRIAL_FOLDER
from trainables.gradskip.settings import OFF, Settings
from trainables.gradskip.variables import BY_NAME, is_number
from trainables.metrics import METHOD_DEFAULTS, METRICS, MODEL_DEFAULTS, further_columns
from trainables.savings import share_saved
from trainables.script.placeholders import CACHE_VARIABLE, EPOCHS_VARIABLE, fill
from trainables.script.report_lines import REPORTS_FILE, ReportError, read_report
from trainables.storage import DiskFiles, copy_files, files_of, is_uri
from trainables.workload_options import SCRIPT_OPTIONS, read_options

# --- A shell command as a child process: its output is read as it arrives, and no process of it is left behind --------

#: Maximum number of bytes kept of a line.
LINE_BYTES = 2**20
#: Maximum number of bytes read from a log's end.
TAIL_BYTES = 2**18
#: Seconds between two looks at what the command has printed and reported.
_LOOK_S = 0.1
#: Seconds to wait for a killed process to disappear.
KILL_S = 10.0


class ScriptProcess:
    """A running command; a context manager that ends it.

    A guard process (`trainables.script.guard`) runs the command: it ends the command and all its descendants when
    `close` is called, and also when this process dies in any way.

    Args:
        command: a command line for ``/bin/sh -c``. It runs in its own session, with an empty stdin.
        environment: the complete environment of the command: nothing else is inherited. ``PYTHONUNBUFFERED=1`` is added
            unless it is given, because Python scripts would buffer their lines.
        cwd: the command's working directory.
        folder: where stdout and stderr are appended to `LOG_FILE` and `ERRORS_FILE`, and `REPORTS_FILE` is made empty.

    OSError: a file cannot be opened, a folder does not exist, or no process can be started.
    """

    def __init__(self, command: str, *, environment: Mapping[str, str], cwd: Path, folder: Path) -> None:
        self._waiting = threading.Lock()
        folder = folder.absolute()
        with ExitStack() as opened, ExitStack() as on_failure:
            log, errors = (opened.enter_context((folder / name).open("ab")) for name in (LOG_FILE, ERRORS_FILE))
            self._printed = [(folder / LOG_FILE, log.tell()), (folder / ERRORS_FILE, errors.tell())]
            (folder / REPORTS_FILE).write_bytes(b"")
            sources = ((folder / REPORTS_FILE, 0), self._printed[0])
            self._sources = [GrowingFile(path, start) for path, start in sources]
            for source in self._sources:
                on_failure.callback(source.close)
            self._guard, theirs = socket.socketpair()
            on_failure.enter_context(self._guard)
            opened.enter_context(theirs)
            # -I -S: neither the user's variables nor installed packages can change the guard.
            arguments = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(os.getpid())]
            started = subprocess.run(  # it ends as soon as the guard has detached itself
                [*arguments, environment.get("LC_CTYPE", ""), command, str(Path(psutil.__file__).parents[1])],
                env={"PYTHONUNBUFFERED": "1", **environment}, cwd=cwd, stdin=theirs.fileno(), stdout=log, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
            if started.returncode != 0:
                raise OSError(
                    f"the guard of a script could not be started (exit status {started.returncode}): see "
                    f"{folder / ERRORS_FILE}"
                )
            on_failure.pop_all()
        self._lines = self._read_lines()
        self.returncode: int | None = None
        """The command's exit status once it has ended, negative for signals; known when `lines` has ended.

        Also -9 if the guard was killed from outside.
        """

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self) -> Iterator[str]:
        """Return the lines of the reports and of stdout, as they arrive, without ends, until the command has ended.

        Every call returns the same iterator. It ends when no process writes any more, at the latest a second after the
        command itself, and after `close`.
        """
        return self._lines

    def last_lines(self, n: int = 20) -> list[str]:
        """Return up to ``n`` last lines that this command printed on stdout and then on stderr."""
        lines = [line for path, start in self._printed for line in tail(path, n, start=start)]
        return lines[max(0, len(lines) - n) :]

    def close(self, grace_s: float = 5.0) -> None:
        """End the command and all its descendants: SIGTERM, then SIGKILL after ``grace_s`` seconds; callable twice.

        If another thread is waiting in `lines`, its loop ends. A process that hangs in the kernel can outlive this
        call; the guard continues until it ends.
        """
        with suppress(OSError):  # the guard has ended, or this is the second call
            self._guard.send(f"{grace_s}\n".encode())
        self._wait(all_gone=True, timeout_s=max(0.0, grace_s) + KILL_S)
        self._guard.close()
        for source in self._sources:
            source.close()

    def _read_lines(self) -> Iterator[str]:
        has_ended = False
        with suppress(ValueError):  # closed meanwhile
            while not has_ended:
                self._wait(all_gone=False, timeout_s=_LOOK_S)
                has_ended = self.returncode is not None
                for source in self._sources:
                    yield from source.lines(to_the_end=has_ended)

    def _wait(self, *, all_gone: bool, timeout_s: float | None) -> None:
        """Wait until the exit status is known, or until no process of the script runs."""
        with self._waiting, suppress(OSError):  # the time is over, or it has been closed
            self._guard.settimeout(timeout_s)
            while all_gone or self.returncode is None:
                text = self._guard.recv(64)
                if text:
                    self.returncode = int(text)
                    continue
                if self.returncode is None:  # only SIGKILL ends the guard before the script
                    self.returncode = -signal.SIGKILL
                return


class GrowingFile:
    r"""Lines of a text file that is being written, from a byte on.

    Bytes that are not UTF-8 become U+FFFD, ``\r`` and ``\r\n`` also end a line, and longer lines are cut to their first
    `LINE_BYTES` bytes.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self._file = path.open("rb")
        self._file.seek(start)
        self._begun = b""

    def close(self) -> None:
        """Close it; callable twice."""
        self._file.close()

    def lines(self, *, to_the_end: bool) -> Iterator[str]:
        """Yield the lines that have come since the last call; one that has not ended only if nothing more will come.

        ValueError: it is closed.
        """
        while data := self._file.read(LINE_BYTES):
            data = (self._begun + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *whole, self._begun = data.split(b"\n")
            self._begun = self._begun[:LINE_BYTES]
            for line in whole:
                yield line[:LINE_BYTES].decode("utf-8", errors="replace")
        if to_the_end and self._begun:
            yield self._begun.decode("utf-8", errors="replace")
            self._begun = b""


def tail(path: Path, n: int, *, start: int = 0) -> list[str]:
    """Return up to ``n`` last lines of a text file, read from its end: `TAIL_BYTES` at most, from byte ``start`` on.

    A line that was overwritten with carriage returns (a progress bar) gives its last state.
    """
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        data = file.read()
    lines = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[max(0, len(lines) - n) :]] if data else []


# --- Lines of a process that failed, apart from those that torchrun and accelerate print about its failure ------------

#: First line of a launcher's report, logged by torch's elastic agent: "E1123 05:31:40.446000 29506 torch/...".
_REPORT = re.compile(r"[A-Z]\d{4} [\d:.]+ .*torch/distributed/elastic/")
#: An exception in one of several processes that are connected.
_EXCEPTION = re.compile(r"(\[rank\d+\]:) Traceback")
#: Last lines of a log that are read.
_READ_LINES = 400


def last_lines_of_failed_process(script: ScriptProcess) -> Sequence[str]:
    """Return the last lines of the process that raised first; others fail after it. Of all if no line says which."""
    lines = script.last_lines(_READ_LINES)
    printed = lines[: next((number for number, line in enumerate(lines) if _REPORT.match(line)), None)]
    first = next((found[1] for line in printed if (found := _EXCEPTION.match(line))), "")
    return [line for line in printed if line.startswith(first)]


#: What the script prints on stdout and on stderr, in the trial's folder.
LOG_FILE, ERRORS_FILE = "output.log", "errors.log"
#: Additional column of a row: facts about the run that a space may use, as JSON.
RUN_FACTS = "run_facts"
#: Lines of output that a failure shows, and characters of each.
_SHOWN_LINES, _SHOWN_CHARACTERS = 12, 200
#: End of the first line of a traceback, and what is said of one that a stop causes.
_TRACEBACK = "Traceback (most recent call last):"
_NO_GRADIENT = ". A stopped parameter's grad is None: let the script pass over those"
#: Begin of the last line of a traceback of an error of ours.
_OUR_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "
#: Share of the baseline's steps, scaled to a trial's epochs, that a trial must take: a scaler may skip some.
_LEAST = 0.98
#: Why a trial may fail that goes on from another one's checkpoint, and what to do.
_OWN_FOLDER = (
    "it may have gone on from what an earlier trial left. Give each trial a folder of its own for its checkpoints, "
    "{trial_dir} in the command"
)
#: Savings of a baseline up to this value are rounding errors.
_NOTHING = 1e-6
#: Folder in the trial's for what torchrun's processes print, other than the first.
RANKS_FOLDER = "ranks"
#: Defaults of torchrun and accelerate, which start several processes: stdout of all but the first goes into files, so
#: that no metric counts twice. torchrun takes one digit for a process.
_REDIRECTS = ",".join(f"{rank}:1" for rank in range(1, 10))
#: Columns that only our optimizers count.
_COUNTED = ("forward_flops", "backward_flops", "gradient_bytes", "optimizer_bytes")
#: Names that further metrics of a report cannot have, since columns of results have them.
_COLUMNS = {*METRICS, *field_names()} - {"accuracy", "test_accuracy"}


class ScriptFailed(RuntimeError):
    """The user's command failed, or reported too little."""


def _settings(config: TrialConfig) -> Settings:
    """Return the settings for the script's optimizer; the baseline's is switched off."""
    return OFF if config.method == "none" else config.gradskip_settings()


def placeholders(config: TrialConfig, folder: Path) -> dict[str, Any]:
    """Return the values of ``{NAME}`` in the command."""
    settings = _settings(config)
    return {
        **{name: value for name, value in read_options(config.options).items() if name not in SCRIPT_OPTIONS},
        **{name: getattr(settings, variable.field) for name, variable in BY_NAME.items()},
        "CAC_VAR_SAMPLES": settings.sampling_interval,
        "seed": config.seed,
        "epochs": config.epochs,
        "trial_dir": str(folder),
        "forward_cache_mb": config.forward_cache_mb,
    }


def _filled_command(config: TrialConfig, folder: Path) -> str:
    return fill(read_options(config.options)["command"], placeholders(config, folder))


def check_command(config: TrialConfig) -> None:
    """Raise UserError where the command has an unknown placeholder, or several workers are asked for."""
    _filled_command(config, Path("trial"))
    if config.workers > 1:
        raise UserError(
            f"--workers-per-trial must be 1 with --script, got {config.workers}: a script starts its own, as with "
            "torchrun"
        )


def _working_directory(config: TrialConfig) -> Path:
    """Return the folder in which the command runs: the one in which the search was started."""
    wanted = Path(read_options(config.options).get("cwd", os.curdir))
    if not wanted.is_dir():
        raise ScriptFailed(
            f"{wanted}, from where the search was started, is not there on {platform.node()}: start a search with "
            "--script in a folder that every node sees"
        )
    return wanted.absolute()


def _environment(config: TrialConfig, folder: Path, trace: str) -> dict[str, str]:
    """Return this process's variables, with the trial's in place of all ``CAC_*`` and of a sourced ``best.env``."""
    others = ("CAC_", EPOCHS_VARIABLE, CACHE_VARIABLE)
    return {
        "PET_REDIRECTS": _REDIRECTS,
        "PET_LOG_DIR": str(folder / RANKS_FOLDER),
        **{name: value for name, value in os.environ.items() if not name.startswith(others)},
        **_settings(config).to_environment(),
        "TUNE_CAC_SEED": str(config.seed),
        TRIAL_FOLDER: str(folder),
        METRIC_VARIABLE: config.quality.name,
        TRACE_VARIABLE: trace,
        "OMP_NUM_THREADS": str(config.threads),
    }


class ScriptRun:
    """One run of the user's command, with the same interface as `TrainingRun`.

    Args:
        config: of the trial, with the options ``command`` and ``cwd``.
        folder: of the trial. Of a URI, the command has a folder of this machine, which is copied there at the end.
        trace: what its optimizer records (`trace_file.TRACE_VARIABLE`); empty for nothing.
        steps: of the baseline's optimizer, scaled to the trial's epochs; None for the baseline.

    UserError: the command has an unknown placeholder. ScriptFailed: its folder is not here; in `train_epoch`, it ended
    with an error or reported no metric or savings. TrainingDiverged: in `train_epoch`, an accuracy that is not finite.
    """

    def __init__(self, config: TrialConfig, folder: Path | str, *, trace: str = "", steps: int | None = None) -> None:
        self.config = config
        self._steps = steps
        self._begun = time.perf_counter()
        self.row: dict[str, Any] | None = None  # the last report's row; None before the first
        self.finished = False  # true if the command has ended successfully and its last row was returned
        self._place = folder
        self._here = Path(tempfile.mkdtemp(prefix="tune_cac-")) if is_uri(folder) else Path(folder).absolute()
        self._here.mkdir(parents=True, exist_ok=True)
        self._process = ScriptProcess(
            _filled_command(config, self._here),
            environment=_environment(config, self._here, trace),
            cwd=_working_directory(config),
            folder=self._here,
        )
        self._rows = self._read()

    def close(self) -> None:
        """End the command and all its processes; copy what it wrote into object storage, if its folder is there."""
        self._process.close()
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
        pending: dict[str, Any] | None = None
        last: dict[str, Any] = {}
        evaluations: list[dict[str, Any]] = []
        count, name = 0, self.config.quality.name
        for line in self._process.lines():
            try:
                report = read_report(line, name)
            except ReportError as error:
                raise ScriptFailed(f"the script printed a report that cannot be read: {error}") from None
            if report is None:
                continue
            step = _steps_of(report)
            has_cost = not report.keys().isdisjoint(("executed_flops", "compute_saved", "gradskip"))
            if pending is None and (step == 0 or not (evaluations or has_cost)):
                evaluations.append(report)  # an evaluation before the training is no epoch
                continue
            same_step = pending is not None and step is not None and step == _steps_of(last)
            if not same_step:  # else another evaluation of the same epoch, such as that of the test split
                if pending is not None:
                    yield pending
                count += 1
            pending, last = self._row(report, count), report
        if (code := self._process.returncode) != 0:
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            said = self._tail()
            hint = "; tune_cac shim DIR lets it import ours" if "No module named 'cac'" in said else ""
            if "the state to load is of" in said:  # of another trial's settings
                hint = f"; {_OWN_FOLDER}"
            raise ScriptFailed(f"the script {how}{said}{hint}")
        if pending is None and evaluations and _steps_of(evaluations[-1]) != 0:
            pending = self._row(evaluations[-1], 1)  # which says what it lacks
        if pending is None:
            lacking = (
                f"reported before its first optimizer step alone ({len(evaluations)} times): report after each epoch "
                "of training"
                if evaluations
                else f"printed no metric: call tune_cac.report({name}=..., step=...), or print a line such as "
                f'{{"{name}": 0.91, "step": 100}}'
            )
            raise ScriptFailed(f"the script {lacking}{self._tail()}")
        steps, stopped_early = _steps_of(last), last.get("extra", {}).get("early_stopped")
        # A script that resumes by itself trains on from the checkpoint of another trial in a folder that all share, and
        # seems to cost next to nothing.
        if self._steps is not None and steps is not None and steps < _LEAST * self._steps and not stopped_early:
            raise ScriptFailed(
                f"the script took {int(steps)} optimizer steps where a run of its length takes {self._steps}: "
                f"{_OWN_FOLDER}. If it stopped early by itself, let its last report say so: "
                "report(..., early_stopped=True)"
            )
        self.close()
        if not math.isfinite(pending["quality"]):
            raise TrainingDiverged(f"the {name} is {pending['quality']} in the last report")
        self.finished = True
        yield pending

    def _tail(self) -> str:
        printed = [line.strip() for line in last_lines_of_failed_process(self._process)]
        for line in reversed(printed[-_SHOWN_LINES:]):
            if _OUR_ERROR in line:  # it says all; what precedes it is its traceback
                return f": {line.partition(_OUR_ERROR)[2]}"
        traceback = (n for n, line in reversed([*enumerate(printed)]) if line.endswith(_TRACEBACK))
        lines = [line for line in printed[next(traceback, 0) :] if line.strip("^~ ")]  # but marks below expressions
        shown = " | ".join(line[:_SHOWN_CHARACTERS] for line in lines[-_SHOWN_LINES:])
        reads = any("NoneType" in line for line in lines[-1:]) and ".grad" in " ".join(lines[-3:])
        hint = _NO_GRADIENT if reads and self.config.method != "none" else ""
        return f"; its last lines: {shown}{hint}" if shown else "; it printed nothing"

    def _row(self, report: Mapping[str, Any], count: int) -> dict[str, Any]:
        quality = self.config.quality
        further = {name: report[name] for name in ("accuracy", "test_accuracy") if name in report}
        further |= report.get("extra", {})
        measured = {quality.name: report.get(quality.name, further.pop(quality.name, None))}
        measured[quality.test] = report.get(quality.test, further.pop(quality.test, None))
        value = measured[quality.name]
        if value is None:
            raise ScriptFailed(
                f"a report must have {'an accuracy' if quality.is_accuracy else f'a value of {quality.name}'}, such as "
                f'{{"{quality.name}": 0.91, "step": 100}}'
            )
        _check_ranges(report, method=self.config.method)
        if quality.is_accuracy and not math.isfinite(value):
            raise TrainingDiverged(f"the accuracy is {value} in report {count}")
        counted = report.get("gradskip") or {}
        costs = _costs(report, counted)
        wall_time_s = time.perf_counter() - self._begun
        step = report.get("step", counted.get("iteration"))
        stops = {}
        if counted:
            stops = {"stopped_through": counted["stopped_through"], "stop_events": json.dumps(counted["events"])}
        return {
            "epoch": int(report.get("epoch", count)),
            "step": None if step is None else int(step),
            "train_loss": report.get("train_loss", report.get("loss")),
            "quality": float(value),
            "test_quality": measured[quality.test],
            **further_columns({k: float(v) for k, v in further.items() if is_number(v) and k not in _COLUMNS}),
            **costs,
            "search_flops": costs["executed_flops"],
            "train_time_s": float(report.get("train_time_s", wall_time_s)),
            "train_energy_j": None,
            "wall_time_s": wall_time_s,
            "peak_memory_bytes": counted.get("peak_memory_bytes"),
            "learning_rate": None,
            "stage": "",
            **MODEL_DEFAULTS,
            **METHOD_DEFAULTS,
            **stops,
            RUN_FACTS: json.dumps(_facts(counted, step)),
        }


def _steps_of(report: Mapping[str, Any]) -> float | None:
    """Return the optimizer steps before a report; None where it says nothing of them."""
    steps: float | None = (report.get("gradskip") or {}).get("steps", report.get("step"))
    return steps


def _check_ranges(report: Mapping[str, Any], *, method: str) -> None:
    """Raise ScriptFailed for a number that is out of its range."""
    for name, rule, low, high in (
        ("accuracy", "a fraction, 1 at most: divide a percentage by 100", -math.inf, 1),
        ("test_accuracy", "a fraction, 1 at most: divide a percentage by 100", -math.inf, 1),
        ("compute_saved", "a fraction, 1 at most", -math.inf, 1),
        ("executed_flops", ">= 0", 0, math.inf),
        ("dense_flops", ">= 1", 1, math.inf),
        ("step", ">= 1", 1, math.inf),
    ):
        value = report.get(name)
        if value is not None and (value < low or value > high):
            raise ScriptFailed(f"{name} of a report must be {rule}, got {value:g}")
    if method == "none" and abs(report.get("compute_saved", 0.0)) > _NOTHING:
        raise ScriptFailed(
            "the baseline's compute_saved must be 0, for the others are compared with it, got "
            f"{report['compute_saved']:g}"
        )


def _costs(report: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the FLOPs and the savings, as the script reports them or as its optimizer counted them.

    ScriptFailed: nothing is known.
    """
    unknown = dict.fromkeys((*_COUNTED, "backward_saved", "executed_flops", "dense_flops"))
    if "executed_flops" in report:
        executed = round(report["executed_flops"])
        dense = round(report.get("dense_flops", executed))
        saved = report.get("compute_saved", share_saved(executed, dense))
        return {**unknown, "compute_saved": float(saved), "executed_flops": executed, "dense_flops": dense}
    if "compute_saved" in report:
        return {**unknown, "compute_saved": float(report["compute_saved"])}
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
            **{name: counted[name] for name in _COUNTED},
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


def _facts(counted: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    names = counted.get("layer_names") or [f"parameter {number}" for number in range(counted.get("parameters", 0))]
    steps = counted.get("longest_iteration", step)  # thresholds are iterations of one optimizer
    return {
        "total_steps": None if steps is None else int(steps),
        "layer_names": names,
        "unit_ends": counted.get("unit_ends", []),
        "watch": counted.get("watch", []),
        "has_model": counted.get("has_model", False),
        "has_norms": counted.get("has_norms", False),
        "weight_decays": counted.get("weight_decays"),
        "steps": counted.get("steps", step),
        "measured_steps": counted.get("measured_steps"),
        "sizes": counted.get("sizes"),
        "warned": counted.get("warned", {}),
    }
