"""The steps at which a trial writes a checkpoint on its path, and how it goes on from one."""

from __future__ import annotations

import copy
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainables.config import TrialConfig
from trainables.interventions import MethodReplay
from trainables.runtime.checkpoint_folder import read_state
from trainables.stage_tree.checkpoints import Checkpoints, StageWeight
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.store import Stage, StageStore
from trainables.training.run import TrainingRun

#: Devices whose runs go on while their checkpoints are written: a copy in page-locked memory is queued behind the
#: kernels of the step before. On a CPU the writing would take the training's own processor.
WRITTEN_BEHIND = ("cuda",)


def host_copy(state: Any) -> Any:
    """Return a copy of a state in the host's memory, of a GPU's tensors without waiting for it; aliases stay aliases.

    It may be read when the device has done what it was given before.
    """
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in copies:
                host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                copies[key] = host.copy_(value, non_blocking=True)
            return copies[key]
        if isinstance(value, dict):
            found = copy.copy(value)  # with the attributes of a module's state, its versions
            found.update((name, copied(part)) for name, part in value.items())
            return found
        if isinstance(value, (list, tuple)):
            return type(value)(copied(part) for part in value)
        return copy.deepcopy(value)

    return copied(state)


# --- Interval between a stage's checkpoints: short where forks are likely and training is expensive, long elsewhere ---
# Symbols: w seconds to write a checkpoint; c seconds of a step; n forks expected over a stage's N steps.
# With checkpoints s steps apart, each step costs w / s for writing and n / N * c * s / 2 for forks. The sum is least at
# s = sqrt(2 w N / (c n)).

#: Expected forks from the first stage, as a share of the trials, and the factor by which each level below has fewer.
FORKS_OF_FIRST, FEWER_BELOW = 0.25, 8.0
#: Most time for writing, as a share of the training time.
MOST_WRITING = 0.15


def checkpoint_interval(*, write_s: float, step_s: float, total_steps: int, trials: int, depth: int) -> int:
    """Return the steps from one checkpoint to the next, >= 1.

    Times are in seconds, ``step_s`` > 0; ``depth`` counts the interventions before the stage.
    """
    forks = max(0.5, FORKS_OF_FIRST * trials) / FEWER_BELOW**depth
    cost = write_s / step_s
    cheapest = math.sqrt(2 * cost * total_steps / forks)
    return max(1, math.ceil(min(cheapest, total_steps)), math.ceil(cost / MOST_WRITING))


@dataclass(kw_only=True)
class LiveRun:
    """A run in this process, with its recorder and timings."""

    run: TrainingRun
    recorder: SignalRecorder
    flops_at_load: int  # FLOPs executed before the loaded checkpoint
    steps: int = 0  # steps trained in this process
    step_s: float = 0.0  # moving average of the time of a step, by the run's clock
    slowest_s: float = 0.0  # longest that the host took for a step in this process, except the first
    known_s: float = 0.0  # the run's clock before the last step
    evaluation_s: float = 0.0  # time of the last evaluation
    checkpointed: float = field(default_factory=time.monotonic)  # time of the last checkpoint, or of the start

    @property
    def executed_flops(self) -> int:
        """Return the FLOPs executed in this process."""
        return self.run.executed_flops - self.flops_at_load

    def train_step(self) -> None:
        """Train and time one optimizer step."""
        begun, known_s = time.perf_counter(), self.run.clock.known_s
        if self.steps > 1:  # the first step selects kernels and counts FLOPs
            took = known_s - self.known_s
            self.step_s = 0.9 * self.step_s + 0.1 * took if self.step_s else took
        self.known_s = known_s
        self.run.train_step()
        if self.steps > 0:
            self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)
        self.steps += 1


def resume_live(
    config: TrialConfig,
    data: bytes | None,
    metadata: Mapping[str, Any],
    replay_state: Mapping[str, Any],
    watches: Sequence[tuple[str, ...]],
) -> LiveRun:
    """Build a run that records its signals, from its start or from a checkpoint of the tree.

    It begins at its start where ``data`` is None. ``metadata`` are the facts about the model that the tree has noted,
    ``watches`` values of ``CAC_WATCH`` whose layers are recorded, too. RuntimeError, KeyError, EOFError,
    UnpicklingError: the checkpoint cannot be loaded.
    """
    run = TrainingRun(config)
    try:
        found = run.method.model_metadata()
        if json.dumps(found) != json.dumps(metadata):
            raise AssertionError(
                "internal error: the method sees other layers in this model than the stage tree has noted for its "
                f"settings: {found}, not {metadata}; --no-sharing trains without the tree"
            )
        if data is not None:
            state = read_state(io.BytesIO(data))
            training_state = state.pop("training_state")
            run.method.prepare_structure(training_state)
            run.load_state_dict({**state, "row": None, "wall_time_s": 0.0, "search_flops": 0, "method": {}})
            run.method.resume(replay_state, training_state)
        recorder = SignalRecorder(run, watches)
    except BaseException:
        run.close()
        raise
    return LiveRun(run=run, recorder=recorder, flops_at_load=run.executed_flops)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Options of sharing training between the trials of a study."""

    tree: Path | str  # the study's ``tree`` folder on a disk that all processes see, or its URI in object storage
    budget_bytes: int = 20 * 10**9  # most bytes of checkpoints
    trials: int = 24  # trials that may fork from this run; determines how often it is kept
    watches: tuple[tuple[str, ...], ...] = ()  # values of ``CAC_WATCH``, whose layers are recorded from the start
    checkpoint_every_s: float = 60.0  # most seconds of training that a crash may lose; 0 for one epoch


class CheckpointPolicy:
    """Write checkpoints on one trial's path: where forks are likely, where the rule acts, and against a crash."""

    def __init__(
        self, store: StageStore, sharing: Sharing, replay: MethodReplay, *, epoch_steps: int, total_steps: int
    ) -> None:
        self._store, self._sharing, self._replay = store, sharing, replay
        self._epoch_steps, self._total_steps = epoch_steps, total_steps
        self.checkpoints = Checkpoints(sharing.tree, sharing.budget_bytes, self._stage_weight)
        self._write_s = 0.0
        self._kept: dict[str, list[int]] = {}  # steps of checkpoints, by stage
        self._weights: dict[str, StageWeight] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")  # starts when it is used
        self._writing: Future[None] | None = None

    def may(self, live: LiveRun, depth: int) -> bool:
        """Return whether checkpoints are kept at all and a trial could continue from one at this step's start."""
        return self._sharing.budget_bytes > 0 and live.run.step > 0 and not (self._replay.first_stage_only and depth)

    def is_overdue(self, live: LiveRun) -> bool:
        """Return whether a crash would now lose too much training; 0 seconds mean every epoch, not every step."""
        every_s = self._sharing.checkpoint_every_s
        if every_s == 0 and live.run.step % self._epoch_steps != 0:
            return False
        return time.monotonic() - live.checkpointed >= every_s

    def wants(self, live: LiveRun, stage: Stage, depth: int, acts_now: Callable[[], bool]) -> bool:
        """Return whether a checkpoint should be written at this step's start.

        ``depth`` counts the interventions before the stage; ``acts_now`` tells whether the rule acts in the step that
        begins, where other trials are likely to fork.
        """
        step = live.run.step
        if not self.may(live, depth):
            return False
        if stage.id not in self._kept:
            entries = self.checkpoints.entries(stage.id)
            self._kept[stage.id] = [entry.step for entry in entries if entry.kind == self._replay.kind]
        kept = self._kept[stage.id]
        if step in kept:
            live.checkpointed = time.monotonic()  # another trial's checkpoint serves as well
            return False
        if step == stage.start or self.is_overdue(live):
            return True
        if depth == 0 and step == self._total_steps - self._epoch_steps:  # the search examines the trained baseline
            return True
        if not self._write_s:
            return True
        if not live.step_s:
            return acts_now()
        apart = checkpoint_interval(
            write_s=self._write_s, step_s=live.step_s, total_steps=self._total_steps, trials=self._sharing.trials,
            depth=depth,
        )  # fmt: skip
        last = max((there for there in kept if there < step), default=stage.start)
        return step - last >= apart or acts_now()

    def write(self, live: LiveRun, stage: Stage) -> None:
        """Write a checkpoint of the run at a step's start: on a GPU behind the training, one at a time."""
        run = live.run
        run.clock.read_s()  # waits for the device, whose steps are no part of the writing
        begun = time.perf_counter()
        state = run.state_dict()
        state["optimizer"] = {k: v for k, v in state["optimizer"].items() if k != "gradskip"}
        for name in ("config", "row", "wall_time_s", "search_flops", "method"):
            state.pop(name)
        state["training_state"] = run.method.training_state()
        self.finish()
        if run.device.type in WRITTEN_BEHIND:
            state, copied = host_copy(state), None
            if run.device.type == "cuda":
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(run.device))
            self._writing = self._writer.submit(self._put, stage.id, run.step, state, copied)
        else:
            self._put(stage.id, run.step, state, None)
        self._kept.setdefault(stage.id, []).append(run.step)
        took = time.perf_counter() - begun
        self._write_s = took if self._write_s == 0.0 else 0.8 * self._write_s + 0.2 * took
        live.checkpointed = time.monotonic()

    def _put(self, stage: str, step: int, state: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        file = io.BytesIO()
        torch.save(state, file)
        self._weights = None
        self.checkpoints.put(stage, step, file.getvalue(), kind=self._replay.kind)

    def finish(self) -> None:
        """Wait until what is being written is there; raise what went wrong with it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _stage_weight(self, stage: str) -> StageWeight:
        """Return how likely and expensive a fork from a stage is; visits counts the stage and its descendants."""
        if self._weights is None:
            links = self._store.links()
            visits: dict[str, int] = dict.fromkeys(links, 1)
            for link in links.values():
                while link is not None and link[0] in visits:
                    visits[link[0]] += 1
                    link = links[link[0]]
            self._weights = {
                one: StageWeight(
                    start=0 if link is None else link[1].iteration + 1, end=self._total_steps, visits=visits[one]
                )
                for one, link in links.items()
            }
        return self._weights.get(stage, StageWeight(start=0, end=self._total_steps, visits=1))
