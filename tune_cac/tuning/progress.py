"""A search while Ray runs it: its progress on the screen, and its budgets.

Progress is a live line on a terminal, one plain line per trial elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from ray import tune
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from analysis.formatting import drop_text, drop_words, percent, plural, value_text
from analysis.metrics.over_seeds import OTHER_SEED
from analysis.metrics.ranking import CUT
from analysis.presentation.markdown_report import full_trainings
from trainables.script.run import RUN_FACTS
from tune_cac.messages import say
from tune_cac.ray_backend.workers import failure_of
from tune_cac.tuning.searcher import StudySearch
from tune_cac.tuning.trials import saved_of_row


class SearchProgress(tune.Callback):
    """Count trials, sum the executed FLOPs, show both with the best so far, and report failures to the searcher."""

    def __init__(self, searcher: StudySearch, *, to_run: int) -> None:
        self._searcher, self._to_run = searcher, to_run
        self._quality, self._saving = searcher.plan.base.quality, searcher.plan.base.saving
        self._best = ""  # in words; empty until it is asked for again
        self.baselines: dict[str, Mapping[str, Any]] = {}  # their rows, by the options of the workload if searched
        self._dense_flops = 0  # of the largest baseline
        for baseline in searcher.trials.baselines():
            if "row" in baseline.user_attrs:
                self._know_baseline(baseline.user_attrs["row"], baseline.user_attrs.get("options", ""))
        self._live: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, float] = {}  # when a trial began or reported last, by `time.monotonic`
        self._spent_flops, self._spent_trainings = 0, 0.0  # by ended trials, the latter of their own budgets
        self.ended = 0  # trials that ended; controls do not count
        self.controls = 0  # controls that ended
        self.failures: list[tuple[int, str]] = []
        self._warnings: set[str] = set()  # kinds that a script's optimizer gave; each is said once
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles its callbacks for a restore that we do not use; a terminal cannot be pickled.
        return {}

    def __enter__(self) -> SearchProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total} trials"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("starting Ray", total=self._to_run)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Note when a trial began."""
        self._heard[trial.trial_id] = time.monotonic()

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        """Show an epoch's row."""
        self._heard[trial.trial_id] = time.monotonic()
        self._live[trial.trial_id] = result
        self._show()

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Count a trial that ended well, and show its result; the searcher has it already."""
        row = self._end_live(trial)
        for kind, text in json.loads(row.get(RUN_FACTS, "{}")).get("warned", {}).items():
            if kind not in self._warnings:
                self._warnings.add(kind)
                say(f"trial {trial.config['trial']} warns: {text}")
        number, role, options = trial.config["trial"], trial.config["role"], trial.config.get("options", "")
        further = self._is_further_baseline(role)
        if role == "baseline":
            self._know_baseline(row, options)
        measured = f"{self._quality.name} {value_text(row['quality'], self._quality)}"
        if role == CUT:
            measured = f"{plural(row['epoch'], 'dense epoch')}, {measured}"
        elif role == "control":
            trials, seed = self._searcher.trials, trial.config["config"]["seed"]
            attrs, baselines = trials.all()[number].user_attrs, [one.number for one in trials.baselines()]
            what = "the baseline" if attrs.get("candidate") in baselines else f"trial {attrs.get('candidate')}"
            what = what if attrs.get("control") == OTHER_SEED else plural(row["epoch"], "dense epoch")
            measured += f", {what}{'' if seed == self._searcher.plan.base.seed else f' on seed {seed}'}"
        elif role != "control" and not further:
            measured += f", saved {percent(saved_of_row(row, self._saving, self.baselines.get(options)))}"
        named = f"baseline of {options}, trial {number}" if further else f"trial {number}"
        self._end(role, f"{named}: {measured}", further=further)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Report a trial that raised to the searcher and show its message."""
        now = time.monotonic()
        silent_s = now - self._heard.pop(trial.trial_id, now)
        failure = failure_of(trial, silent_s=silent_s, timeout_s=self._searcher.plan.trial_timeout_s)
        message, number, role = failure.message, trial.config["trial"], trial.config["role"]
        self._end_live(trial)
        if self._searcher.tell_failure(trial.trial_id, message, died=failure.died, out_of_memory=failure.out_of_memory):
            self._say(f"trial {number} failed and is begun again: {message}")
            return
        self.failures.append((number, message))
        self._end(role, f"trial {number} failed: {message}", further=self._is_further_baseline(role))

    def _is_further_baseline(self, role: str) -> bool:
        """Return whether this is the baseline of another combination of options than the first one's."""
        return role == "baseline" and bool(self.baselines) and self._searcher.judges

    def _know_baseline(self, row: Mapping[str, Any], options: str) -> None:
        self.baselines.setdefault(options, row)
        self._dense_flops = max(self._dense_flops, row["dense_flops"] or 0)

    def _end(self, role: str, line: str, *, further: bool) -> None:
        """Count a trial or a control, and say how it ended."""
        if role in ("control", CUT):
            self.controls += 1
            line = f"[control {self.controls}] {line}"
        elif not further:
            self.ended += 1
            line = f"[{self.ended}/{self._to_run}] {line}; {self.summary()}"
        self._say(line)

    def _say(self, line: str) -> None:
        if self._bar is None:
            say(line)
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.ended, description=self.summary())

    def summary(self) -> str:
        """Return the best so far, failures and what this search executed, as one line."""
        parts = [self._best_so_far()]
        if self.failures:
            parts.append(f"{len(self.failures)} failed")
        if self.ended or self._live:
            parts.append(f"compute so far: {full_trainings(self.trainings())}")
        if self.controls:
            parts.append(plural(self.controls, "control"))
        return ", ".join(parts)

    def _end_live(self, trial: Any) -> Mapping[str, Any]:
        """Count what a trial that ended has executed; return its last row."""
        row, self._best = self._live.pop(trial.trial_id, {}), ""
        self._spent_flops += search_flops(row)
        # Scripts that report no FLOPs report what they saved, which is final at the end.
        known = row.get("dense_flops") or "compute_saved" not in row
        self._spent_trainings += in_trainings(row) if known else 1 - row["compute_saved"]
        return row

    def trainings(self) -> float:
        """Return what this search executed in full trainings of the baseline, or of each trial until that ended."""
        live = self._live.values()
        if not self._dense_flops:
            return self._spent_trainings + sum(map(in_trainings, live))
        return float((self._spent_flops + sum(map(search_flops, live))) / self._dense_flops)

    def _best_so_far(self) -> str:
        if not self._searcher.judges:
            return "confirming"
        if not self.baselines:
            return "no baseline yet"
        if not self._best:
            best = self._searcher.best(self._saving)
            self._best = "nothing saved yet"
            if best is not None:
                amount = f"{drop_text(best.lost, self._quality)} of" if best.lost > 0 else "no"
                lost = f"{amount} {drop_words(self._quality)}"
                self._best = f"best {percent(best.saved)} saved at {lost} (trial {best.trial})"
        return self._best


def in_trainings(row: Mapping[str, Any]) -> float:
    """Return what the search executed for a trial up to this row, in full trainings; 0 before its first row."""
    dense = row.get("dense_flops") or 0
    return search_flops(row) / dense if dense else 0.0


def search_flops(row: Mapping[str, Any]) -> int:
    """Return the FLOPs that the search executed for a trial up to this row; 0 before its first row."""
    return int(row.get("search_flops", row.get("executed_flops")) or 0)  # None: a script that reports none


def duration_text(seconds: float) -> str:
    """Return a duration in words, such as ``1 h 30 min``."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"


class Budget(tune.Stopper):
    """End a Ray Tune run when its time (seconds) or its compute (full trainings) is used up.

    When the time is up, running trials are stopped as by Ctrl-C: a resumed search continues them from their last
    checkpoints. When the compute is used up, no further trial begins, and running ones finish, so that somewhat more is
    executed. ``begun`` is when the search began, by `time.monotonic`.
    """

    def __init__(
        self, searcher: StudySearch, progress: SearchProgress, *, time_s: float | None, trainings: float | None,
        begun: float,
    ) -> None:  # fmt: skip
        self._searcher, self._progress = searcher, progress
        self._time_s, self._trainings, self._begun = time_s, trainings, begun
        self._time_is_up = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as above

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: no trial ends before the others."""
        return False

    def stop_all(self) -> bool:
        """Return whether to stop every trial; Ray asks after each event."""
        if self._cost_is_used_up():
            self._searcher.ask_for(0)
        self._time_is_up = self._time_s is not None and time.monotonic() - self._begun >= self._time_s
        return self._time_is_up

    def _cost_is_used_up(self) -> bool:
        # A baseline says what a full training costs.
        most, known = self._trainings, bool(self._progress.baselines)
        return most is not None and known and self._progress.trainings() >= most

    def reason(self) -> str:
        """Return which budget is used up, as the beginning of a sentence; empty if none is."""
        if self._time_is_up and self._time_s is not None:
            return f"The time budget of {duration_text(self._time_s)} is used up"
        if self._trainings is None or not self._cost_is_used_up() or self._searcher.trials.has_unfinished():
            return ""  # trials that still run were interrupted by the user
        executed = f"{self._progress.trainings():.1f} executed"
        return f"The cost budget of {full_trainings(self._trainings)} is used up ({executed})"
