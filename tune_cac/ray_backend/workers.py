"""A trial that several processes train, and why a trial failed: an exception of its code, or a dead process."""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.result import DONE
from ray.util.queue import Empty, Queue

from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, WorkerDied
from trainables.runtime.checkpoint_folder import CHECKPOINT, checkpoint_name, has_room
from trainables.runtime.watchdog import Watchdog, was_ended
from tune_cac.ray_backend.session import DEATHS

# --- The cause of a failed trial: an exception of its code, or the death of its process -------------------------------

#: Advice for when a node's memory, or a GPU's, is used up.
_LESS_MEMORY = "with --concurrency fewer trials share the memory; or take a smaller batch or model"
_LESS_GPU_MEMORY = "with a larger --gpus-per-trial fewer trials share a GPU; or take a smaller batch or model"
#: Parts of the messages with which torch says that the host's memory does not suffice.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of a trial."""

    message: str  # one line
    died: bool = False  # True if a process or node of it died without raising, and may not do so again
    out_of_memory: bool = False  # True if its node's memory was used up, which fewer trials at a time may avoid


def failure_of(trial: Any, *, silent_s: float = 0.0, timeout_s: float | None = None) -> Failure:
    """Return how a trial of Ray's failed, ``silent_s`` seconds after it began or reported its last row.

    After ``timeout_s`` seconds its process is ended (`trainables.runtime.watchdog`); None for no limit.
    """
    error = _error_of(trial)
    if isinstance(error, OutOfMemoryError):
        message = f"out of memory: its node's memory was used up, so Ray ended it: {_LESS_MEMORY}"
        return Failure(message=message, out_of_memory=True)
    cause, died = getattr(error, "cause", None), worker_died(error)
    # The file may be on another node, and a trial that hangs while its model is built was never silent.
    if died and timeout_s is not None and (silent_s >= timeout_s or was_ended(Path(trial.config["folder"]))):
        silent = f"it reported nothing for {timeout_s:g} s (--trial-timeout), so its process was ended"
        return Failure(message=f"{silent}: it hangs, or an epoch takes longer")
    lines = [line.strip() for line in str(error or "unknown error").splitlines() if line.strip()]
    if not isinstance(cause, BaseException):
        return Failure(message=f"its worker died ({lines[-1]})" if died else lines[-1], died=died)
    message = f"{type(cause).__name__}: {cause}".splitlines()[0]
    if type(cause).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return Failure(message=f"{message.rstrip('.')}: {_LESS_GPU_MEMORY}")
    if isinstance(cause, MemoryError) or any(part in str(cause) for part in _NO_MEMORY):
        return Failure(message=f"{message.rstrip('.')}: {_LESS_MEMORY}", out_of_memory=True)
    return Failure(message=message, died=died)


def _error_of(trial: Any) -> BaseException | None:
    """Return the exception that Ray stored for a failed trial on this machine, if there is one."""
    try:
        found = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except (OSError, TypeError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
        return None
    return found if isinstance(found, BaseException) else None


def worker_died(error: BaseException | None) -> bool:
    """Return whether a trial's process, its node or one of its workers died without raising, by its error in Ray."""
    if isinstance(error, RayActorError):  # Ray also raises it for an error in the actor's constructor
        return not error.actor_init_failed
    return isinstance(error, DEATHS) or isinstance(getattr(error, "cause", None), WorkerDied)


class ActorOutOfMemoryError(OutOfMemoryError, RayActorError):
    """Ray's error for an actor that it ended because its node's memory was used up, as an error that ends one trial.

    At `OutOfMemoryError`, which is no `RayActorError`, Ray Tune 2.56 to 2.60 end the whole search: "Caught unexpected
    exception".
    """

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message)
        OutOfMemoryError.__init__(self, message)

    def __reduce__(self) -> tuple[type[ActorOutOfMemoryError], tuple[str]]:
        return ActorOutOfMemoryError, (self.message,)


@contextmanager
def memory_ends_trials() -> Iterator[None]:
    """Make Ray's memory errors `ActorOutOfMemoryError` in this process during the block."""

    def make(kind: type[OutOfMemoryError], *_: Any, **__: Any) -> OutOfMemoryError:
        found: OutOfMemoryError = Exception.__new__(ActorOutOfMemoryError if kind is OutOfMemoryError else kind)
        return found

    OutOfMemoryError.__new__ = make
    try:
        yield
    finally:
        del OutOfMemoryError.__new__


# --- A trial that several processes train: Ray Train inside a Ray Tune trial, which only receives rows ----------------

#: Seconds between checks of the workers while no row arrives.
_LOOK_S = 0.5
#: Most seconds to wait for the workers when a trial ends.
_END_S = 30.0
#: Most characters of a failure's message.
_LONGEST_MESSAGE = 2000


class ParallelTrial(tune.Trainable):
    """One configuration trained by `TrialConfig.workers` processes, each with the ``worker_resources`` of Ray's config.

    The other keys are those of `trainables.trial.Trial`; the folder is on storage that all nodes see.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Start the workers."""
        trial = TrialConfig.from_mapping(config["config"])  # a wrong one fails here, before any worker starts
        self._rows = Queue(actor_options={"num_cpus": 0})
        self._failure: BaseException | None = None
        self._watchdog = Watchdog(config.get("trial_timeout_s"), Path(config["folder"]))
        self._thread = threading.Thread(target=self._train, args=(trial, {**config, "rows": self._rows}), daemon=True)
        self._thread.start()

    def _train(self, trial: TrialConfig, config: dict[str, Any]) -> None:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        on_gpu = trial.device == "cuda"
        try:
            TorchTrainer(
                train_worker,
                train_loop_config=config,
                torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=trial.workers, use_gpu=on_gpu, resources_per_worker=dict(config["worker_resources"])
                ),
                run_config=RunConfig(name="train", storage_path=str(Path(config["folder"]) / "workers")),
            ).fit()
        except BaseException as error:  # noqa: BLE001  # told by the trial, in its own thread
            self._failure = error

    def step(self) -> dict[str, Any]:
        """Return the next epoch's row, from the first worker."""
        with self._watchdog.watch():
            row = self._next_row()
        if row[DONE]:
            self._thread.join(timeout=_END_S)  # the workers end by themselves
            self._watchdog.close()  # Ray may end this process before it is asked to clean up
        if "diverged" in row:
            raise TrainingDiverged(row["diverged"])
        return row

    def _next_row(self) -> dict[str, Any]:
        while True:
            running = self._thread.is_alive()
            try:
                found: dict[str, Any] = self._rows.get(timeout=_LOOK_S)
                return found
            except Empty:
                if not running:
                    raise self._how_it_failed() from self._failure

    def _how_it_failed(self) -> Exception:
        if self._failure is None:
            return RuntimeError("the trial's workers ended without a result")
        failures = getattr(self._failure, "worker_failures", {})
        if not failures:
            return RuntimeError(f"a worker failed: {self._failure}"[:_LONGEST_MESSAGE])
        rank, error = min(failures.items())
        cause = getattr(error, "cause", None) or error  # Ray wraps what a worker raised
        said = f"{type(cause).__name__}: {cause}"[:_LONGEST_MESSAGE]
        if all(isinstance(error, (RayActorError, *DEATHS)) for error in failures.values()):
            return WorkerDied(f"worker {rank}: {said}")
        return RuntimeError(f"worker {rank} failed: {said}")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write only a marker file; the workers keep their checkpoints in the trial's folder."""
        (Path(checkpoint_dir) / "kept_elsewhere").touch()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start the next trial from this process."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End the workers; those that still train fail without their queue."""
        self._rows.shutdown(force=True)
        self._thread.join(timeout=_END_S)  # the next trial needs their resources
        self._watchdog.close()


def train_worker(config: dict[str, Any]) -> None:
    """Train the trial in one worker of Ray Train's process group."""
    from ray import train

    from trainables.training.parallel import ParallelRun
    from trainables.trial import continued, keep_decoded_data

    is_first = train.get_context().get_world_rank() == 0
    folder, checkpointed = Path(config["folder"]), time.monotonic()

    def put(row: dict[str, Any], *, done: bool) -> None:
        if is_first:
            config["rows"].put({**row, DONE: done})

    keep_decoded_data(config)
    run: Any = continued(ParallelRun, TrialConfig.from_mapping(config["config"]), config.get("resume_from"))
    with run:
        if run.finished and run.row is not None:
            put(run.row, done=True)
        while not run.finished:
            try:
                put(run.train_epoch(), done=run.finished)
            except TrainingDiverged as error:
                put({"diverged": str(error)}, done=True)
                return
            if not run.finished and all_agree(time.monotonic() - checkpointed >= config["checkpoint_every_s"]):
                if all_agree(has_room(run.model, folder)):
                    save_checkpoint(run, folder)
                checkpointed = time.monotonic()


def all_agree(wanted: bool) -> bool:
    """Return the first worker's decision on every worker, because their clocks differ."""
    import torch
    import torch.distributed as dist

    told = torch.tensor([int(wanted)])
    if dist.get_backend() == "nccl":
        told = told.cuda()
    dist.broadcast(told, 0)
    return bool(told.item())


def save_checkpoint(run: Any, folder: Path) -> None:
    """Write a checkpoint where a resumed search looks for it, and delete earlier ones."""
    target = folder / checkpoint_name(run.epoch)
    run.save(target)
    if run.rank == 0:
        for old in folder.glob(f"{CHECKPOINT}*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
