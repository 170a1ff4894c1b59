"""Run a user's training script under observation for a few steps, report and stop it.

Run as ``python -m trainables.training.doctor.script_probe SCRIPT ARGUMENTS`` or ``... -m MODULE ARGUMENTS``. The script
is ended after `STEPS` optimizer steps, without its own end: nothing that it would write then is written.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.checks import Observation, examine, report_text
from trainables.training.doctor.observation import NetworkCalls, StepWatch, parameters_of, replaced, zeroed_gradients

#: Steps that are run before the timed ones, the timed ones, and those whose operations are looked at.
FIRST, TIMED, WATCHED = 3, 8, 2
STEPS = FIRST + TIMED + WATCHED


class Probe:
    """Observer of a script's training; what it sees begins with its construction."""

    def __init__(self) -> None:
        self.steps = 0
        self._stack = ExitStack()
        self._optimizers: dict[Optimizer, None] = {}  # the first one's steps are the training's
        self._calls = self._stack.enter_context(NetworkCalls().recorded())
        self._zeroed = self._stack.enter_context(zeroed_gradients())
        self._stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self._stack.enter_context(replaced(DataLoader, "__iter__", self._timed))
        self._loader: DataLoader[Any] | None = None
        self._waited = self._begun = 0.0
        self._share: float | None = None
        self._watch: StepWatch | None = None

    def _timed(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """Return a loader's ``__iter__`` that adds up the time of its batches."""

        def timed(loader: DataLoader[Any]) -> Iterator[Any]:
            batches = iterate(loader)
            while True:
                begun = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if self._calls.trains:
                    self._loader = loader
                    self._waited += time.perf_counter() - begun
                yield batch

        return timed

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers.setdefault(optimizer)
        if optimizer is not next(iter(self._optimizers)):
            return
        self.steps += 1
        if self.steps == FIRST:
            self._begun, self._waited = self._now(), 0.0
        elif self.steps == FIRST + TIMED:
            self._share = self._waited / (self._now() - self._begun)
            self._watch = self._stack.enter_context(StepWatch(self._device()))
        elif self.steps == STEPS:
            self.finish()
        if self._watch is not None:
            self._watch.steps += 1

    def _device(self) -> torch.device:
        return next((p.device for p in parameters_of(next(iter(self._optimizers)))), torch.device("cpu"))

    def _now(self) -> float:
        if self._device().type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def finish(self) -> None:
        """Report what was seen and end the process."""
        self._stack.close()
        status = 0
        try:
            print(self.report(), flush=True)
        except Exception as error:  # noqa: BLE001  # a model may raise anything when it runs again
            print(f"tune_cac: error: the doctor could not finish: {error}", file=sys.stderr, flush=True)
            status = 1
        sys.stdout.flush()
        os._exit(status)  # the script must not train on, whatever it catches

    def report(self) -> str:
        if not self._optimizers:
            return "recipe: no step of a torch optimizer was seen: the script must train in its own process"
        device = self._device()
        with torch.enable_grad(), kept_generators([device]):
            seen = Observation(
                device=device,
                networks=self._calls.by_network,
                optimizers=self._optimizers,
                loader=self._loader,
                loader_share=self._share,
                watch=self._watch,
                zeroed=self._zeroed,
            )
            findings = examine(seen)
        told = f"seen: {self.steps} optimizer steps"
        if self._share is None:
            told += f", of {STEPS} that the doctor wants: times were not measured"
        return f"{told}\n{report_text(findings)}"


def main(arguments: list[str]) -> None:
    """Run the script; end with its report."""
    probe = Probe()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    probe.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
