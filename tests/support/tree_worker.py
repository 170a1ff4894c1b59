"""A process that trains trials over a stage tree, with an accident on the way if asked for one.

    python tree_worker.py TREE ACCIDENT CONFIG...

Prints one line of JSON a configuration: its rows. ACCIDENT is ``none``, ``full:BYTES`` (no file may grow past that),
or ``kill-before:N``: SIGKILL while the N-th checkpoint is written, before it has its name; or ``kill-step:N``: SIGKILL
in the N-th step that is trained, with a checkpoint at the end of every epoch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import tiny_workload

from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(count: int) -> None:
    real = os.replace
    seen = [0]

    def replace(source: Any, target: Any) -> None:
        seen[0] += "checkpoints" in Path(target).parts
        if seen[0] == count:
            die()
        real(source, target)

    os.replace = replace  # type: ignore[assignment]


def kill_step(count: int) -> None:
    real = TrainingRun.train_step
    seen = [0]

    def train_step(self: TrainingRun) -> None:
        seen[0] += 1
        if seen[0] == count:
            die()
        real(self)

    TrainingRun.train_step = train_step  # type: ignore[method-assign]


def main() -> None:
    tree, accident, *texts = sys.argv[1:]
    tiny_workload.register()
    kind, _, number = accident.partition(":")
    if kind == "kill-before":
        kill_before(int(number))
    elif kind == "kill-step":
        kill_step(int(number))
    sharing = Sharing(tree=Path(tree), trials=10**6, checkpoint_every_s=0 if kind == "kill-step" else 60)
    with TrainingRun(TrialConfig(**json.loads(texts[0]))):
        pass  # libraries that write caches of their own have done so
    for text in texts:
        warnings.simplefilter("always")
        with SharedRun(TrialConfig(**json.loads(text)), sharing) as trial:
            if kind == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), int(number)))
            rows = []
            while not trial.finished:
                rows.append(trial.train_epoch())
            print(json.dumps({"rows": rows, "trained": trial.trained_steps}), flush=True)


if __name__ == "__main__":
    main()
