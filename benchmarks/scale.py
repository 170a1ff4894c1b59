"""What a search costs besides its training, over many trials: driver time, memory, journal, resuming, ranking.

    python benchmarks/scale.py simulated [--trials 1000] [--at-a-time 2]
    python benchmarks/scale.py ray [--trials 1000] [--at-a-time 2] [--no-sharing]

The stub (`stub_training.py`) trains in milliseconds. ``simulated`` drives the searcher, its journal and the progress
line without Ray: that many trials are open at a time, and a random one of them ends with made-up results. ``ray`` is a
real search in a process of its own, watched from outside: its driver is that process, its actors the workers of Ray.
Times of the simulation are CPU times of its process, split into Optuna's sampler, its journal file and the rest, ours.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from machine import header, spread

HERE = Path(__file__).resolve().parent
WORKLOAD, SPACE, EPOCHS = "stub_training:make", "stub_training:space", 4
DROP, MB = 0.01, 2**20


def main() -> None:
    """Run one of the two and print what it measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["simulated", "ray", "searched"])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--at-a-time", type=int)
    parser.add_argument("--space", default=SPACE)
    parser.add_argument("--no-sharing", action="store_true")
    parser.add_argument("--profile", help="file for cProfile's figures of the driver")
    parser.add_argument("--folder", help="where the study is kept; a temporary folder otherwise")
    asked = parser.parse_args()
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if asked.kind == "searched":
        search_in_this_process(asked)
        return
    print(header(f"benchmarks/scale.py {' '.join(sys.argv[1:])}"), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        asked.folder = str(Path(asked.folder or temporary).resolve())
        (simulated if asked.kind == "simulated" else on_ray)(asked)


# --- without Ray ----------------------------------------------------------------------------------------------------


class Spent:
    """CPU seconds of the calls that are watched, by name, without those inside others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def watch(self, owner: Any, name: str, called: str) -> None:
        """Replace a method by one that is timed."""
        real = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            if self._inside:
                return real(*arguments, **more)
            self._inside, begun = True, time.process_time()
            try:
                return real(*arguments, **more)
            finally:
                self._inside = False
                self.seconds[called] = self.seconds.get(called, 0.0) + time.process_time() - begun

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


def options_of(asked: argparse.Namespace) -> Any:
    """Return the options of the search."""
    from tune_cac.study.options import SearchOptions

    return SearchOptions(
        workload=WORKLOAD, space=asked.space, epochs=EPOCHS, trials=asked.trials, results=asked.folder, name="scale",
        seed=0, controls=False, allowed_drop=DROP, sharing=not asked.no_sharing,
    )  # fmt: skip


def opened(asked: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return layout, searcher and progress of the study, as a search and a resumed search make them."""
    from tune_cac.study.folder import open_study
    from tune_cac.tuning.progress import SearchProgress
    from tune_cac.tuning.run_context import baseline_config, context_of
    from tune_cac.tuning.study_search import _completed, _searcher

    options = options_of(asked)
    layout = open_study(options)
    layout.write_info(replace(layout.read_info(), trials=asked.trials, allowed_drop=DROP))
    base = baseline_config(options, device="cpu")
    searcher, _ = _searcher(layout, options, context_of(base), base, None)
    searcher.plan(asked.trials)
    progress = SearchProgress(searcher, finished_before=_completed(layout), to_run=asked.trials, allowed_drop=DROP)
    return layout, searcher, progress


def result_of(config: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Return a made-up last row: more is saved, and more lost, where thresholds are high and starts early."""
    early = 1 - config.get("CAC_VAR_START_ITR", 0) / 20
    saved = max(0.0, 10 * (config.get("CAC_VAR_START_THR", 0.9) - 0.9) * early) * 0.5
    executed = round((1 - saved) * baseline["dense_flops"])
    noise = random.Random(json.dumps(config, sort_keys=True)).gauss(0, 0.005)
    return {
        **baseline, "accuracy": baseline["accuracy"] - saved**2 / 4 + noise, "compute_saved": saved,
        "executed_flops": executed, "search_flops": executed,
    }  # fmt: skip


def simulated(asked: argparse.Namespace) -> None:
    """Print cost, memory and journal for each tenth of the trials, and the cost of opening the study again."""
    from optuna.samplers import TPESampler
    from optuna.storages.journal import JournalFileBackend

    from trainables.stage_tree.shared_run import SharedRun, Sharing

    at_a_time = asked.at_a_time or 1000
    spent = Spent()
    for name in ("sample_relative", "sample_independent", "infer_relative_search_space", "after_trial"):
        spent.watch(TPESampler, name, "sampler")
    for name in ("append_logs", "read_logs"):
        spent.watch(JournalFileBackend, name, "journal")
    layout, searcher, progress = opened(asked)
    open_trials: dict[str, dict[str, Any]] = {}
    draw, begun = random.Random(0), 0
    baseline: dict[str, Any] = {}
    with redirect_stderr(open(os.devnull, "w")):
        first = searcher.suggest("baseline")
        with SharedRun(_config(first), Sharing(tree=layout.tree.resolve(), budget_bytes=0)) as run:
            while not run.finished:
                baseline = run.train_epoch()
        _end(searcher, progress, "baseline", first, baseline)
        profile = cProfile.Profile() if asked.profile else None
        print(f"{at_a_time} at a time; CPU ms a trial by number of ended trials:", file=sys.stdout)
        spent.take()
        ended, since, cpu = 1, 1, time.process_time()
        part = max(1, asked.trials // 10)
        if profile:
            profile.enable()
        while ended < asked.trials:
            while len(open_trials) < at_a_time:
                name = f"t{begun}"
                suggested = searcher.suggest(name)
                if not isinstance(suggested, dict):
                    break
                open_trials[name] = suggested
                begun += 1
            name = draw.choice(list(open_trials))
            suggested = open_trials.pop(name)
            _end(searcher, progress, name, suggested, result_of(suggested["config"], baseline))
            ended += 1
            if ended % part == 0:
                taken, each = spent.take(), 1000 / (ended - since)
                all_of_it = time.process_time() - cpu
                sampler, journal = (taken.get(key, 0.0) for key in ("sampler", "journal"))
                print(
                    f"{ended:>7}: {all_of_it * each:7.2f} = sampler {sampler * each:.2f} + journal {journal * each:.2f}"
                    f" + ours {(all_of_it - sampler - journal) * each:.2f}; memory {_rss():.0f} MB, journal "
                    f"{layout.journal.stat().st_size / max(1, begun):.0f} bytes a trial",
                    file=sys.stdout, flush=True,
                )  # fmt: skip
                since, cpu = ended, time.process_time()
        if profile:
            profile.disable()
            profile.dump_stats(asked.profile)
    reopened(asked, layout)


def _config(suggested: dict[str, Any]) -> Any:
    from trainables.config import TrialConfig

    return TrialConfig.from_mapping(suggested["config"])


def _end(searcher: Any, progress: Any, name: str, suggested: dict[str, Any], row: dict[str, Any]) -> None:
    """Report a trial's end as Ray's controller does: searcher first, then the callbacks."""
    trial = SimpleNamespace(trial_id=name, config=suggested)
    searcher.on_trial_result(name, row)
    progress.on_trial_result(0, [], trial, row)
    searcher.on_trial_complete(name, row)
    progress.on_trial_complete(0, [], trial)


def _rss() -> float:
    return float(psutil.Process().memory_info().rss / MB)


def reopened(asked: argparse.Namespace, layout: Any) -> None:
    """Print the time to open the study again until it suggests, and to rank and report it, each in a new process."""
    code = (
        f"import argparse, sys, time; sys.path.insert(0, {str(HERE)!r}); import scale;"
        "import tune_cac.tuning.study_searcher, tune_cac.tuning.progress; begun = time.perf_counter();"
        f"_, searcher, _ = scale.opened(argparse.Namespace(**{vars(asked)!r}));"
        "there = time.perf_counter(); searcher.suggest('x'); print(there - begun, time.perf_counter() - there)"
    )
    found = [_child([sys.executable, "-c", code]) for _ in range(3)]
    opening, first = zip(*(map(float, text.split()[-2:]) for text, _, _ in found), strict=True)
    print("resume: opened, running trials adopted, s:", spread(list(opening)))
    print("resume: first suggestion, s:", spread(list(first)))
    for command in ("rank", "report"):
        took = [_child([sys.executable, "-m", "tune_cac", command, str(layout.root)])[1:] for _ in range(3)]
        print(f"{command}: command, s:", spread([wall for wall, _ in took]), f"memory {took[0][1]:.0f} MB")


def _child(command: list[str]) -> tuple[str, float, float]:
    """Return output, wall seconds and largest memory in MB of a command."""
    begun = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    largest = 0.0

    def watch() -> None:
        nonlocal largest
        while process.is_running():
            try:
                largest = max(largest, process.memory_info().rss / MB)
            except psutil.Error:
                return
            time.sleep(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return out, time.perf_counter() - begun, largest


# --- on Ray ---------------------------------------------------------------------------------------------------------


def search_in_this_process(asked: argparse.Namespace) -> None:
    """Search; the child of `on_ray`."""
    import tune_cac

    def run() -> None:
        tune_cac.search(
            workload=WORKLOAD, space=asked.space, epochs=EPOCHS, trials=asked.trials, results=asked.folder,
            name="scale", seed=0, controls=False, sharing=not asked.no_sharing, concurrency=asked.at_a_time,
        )  # fmt: skip

    if asked.profile:
        with cProfile.Profile() as profile:
            run()
        profile.dump_stats(asked.profile)
    else:
        run()


def on_ray(asked: argparse.Namespace) -> None:
    """Print wall and driver time, memory and journal for each tenth of the trials of a real search."""
    asked.at_a_time = asked.at_a_time or 2
    command = [sys.executable, __file__, "searched", "--folder", asked.folder]
    for name in ("trials", "at_a_time", "space", "profile"):
        if getattr(asked, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
    if asked.no_sharing:
        command.append("--no-sharing")
    journal = Path(asked.folder) / "scale" / "optuna.journal"
    driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    print(f"{asked.at_a_time} at a time, {'no sharing' if asked.no_sharing else 'sharing'}; by number of ended trials:")
    part = max(1, asked.trials // 10)
    before: tuple[int, float, float] | None = None
    told = ""
    with driving(driver):
        assert driver.stderr is not None
        for line in driver.stderr:
            if not line.startswith("["):
                told = line
                continue
            ended = int(line[1:].split("/")[0])
            now = time.perf_counter(), sum(driver.cpu_times()[:2])
            if before is None:
                before = (ended, *now)
            elif ended % part == 0:
                each = 1000 / (ended - before[0])
                print(
                    f"{ended:>7}: wall {(now[0] - before[1]) * each:.1f} ms a trial, driver's CPU "
                    f"{(now[1] - before[2]) * each:.1f} ms; memory: {_memory(driver)}; journal "
                    f"{journal.stat().st_size / ended:.0f} bytes a trial",
                    flush=True,
                )
                before = (ended, *now)
        if driver.wait():
            raise SystemExit(f"the search ended with {driver.returncode}: {told}")
    from analysis.io.layout import Layout

    reopened(asked, Layout(Path(asked.folder) / "scale"))


@contextmanager
def driving(driver: psutil.Popen) -> Iterator[None]:
    """Kill the search if the block raises."""
    try:
        yield
    except BaseException:
        if driver.is_running():
            driver.kill()
        raise


def _memory(driver: psutil.Popen) -> str:
    """Return the resident memory of the driver and of Ray's processes in MB, by kind."""
    found: dict[str, list[float]] = {"driver": [driver.memory_info().rss / MB]}
    for process in driver.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            kind = next((name for name in ("SearchTrial", "CoordinatorLeases", "gcs_server", "raylet/raylet")
                         if name in title), None)  # fmt: skip
            if kind is not None:
                found.setdefault(kind, []).append(process.memory_info().rss / MB)
        except psutil.Error:
            continue
    return ", ".join(f"{kind} {'+'.join(f'{size:.0f}' for size in sizes)}" for kind, sizes in sorted(found.items()))


if __name__ == "__main__":
    main()
