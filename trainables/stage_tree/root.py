"""Facts that runs must have in common to share training: everything but the interventions of their methods."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainables.attachment import metadata_key
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients.fields import OF_ANY_METHOD
from trainables.gradskip.nothing_stops import weight_decays
from trainables.gradskip.replay import acts_from_start
from trainables.interventions import Intervention
from trainables.registry import METHODS
from trainables.stage_tree.store import Chunk, Stage, StageStore
from trainables.training.flops import CostTable
from trainables.training.recipe.fields import FLOAT32, changes_results
from trainables.training.run import TrainingRun
from trainables.workload_options import what_is_trained
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import run_lengths

#: Code that determines what a run computes, besides the workload's own.
_CODE = (
    "flops.py", "training/*.py", "training/*/*.py", "gradskip/*.py", "workloads/*.py", "stage_tree/*.py",
    "gradients/*.py", "compression/*.py", "compression/*/*.py",
)  # fmt: skip


def root_facts(config: TrialConfig, workload: Workload) -> dict[str, Any]:
    """Return the facts that all runs of one root share, in plain types.

    Runs with equal facts are equal until a method acts. Fields of the configuration that matter only once a method acts
    are part of its actions, not of these facts.
    """
    # Rows of runs that are measured have more columns.
    measured = {name: value for name in OF_ANY_METHOD if (value := getattr(config, name)) is not None}
    return {
        "workload": config.workload,
        "workload_options": list(what_is_trained(config.workload, config.options)),
        "fingerprint": workload.fingerprint(),
        "code": code_fingerprint(),
        "epochs": config.epochs,
        "steps_per_epoch": workload.steps_per_epoch,
        "total_steps": workload.steps_per_epoch * config.epochs,
        "seed": config.seed,
        "threads": config.threads,
        "device": config.device,
        "device_kind": device_kind(config.device),
        **measured,
        "precision": FLOAT32,
        **changes_results(config),
        **acts_from_start(config),
        **config.quality.fields(),  # rows of another metric have other keys
        "torch": torch.__version__,
    }


def root_id(facts: dict[str, Any]) -> str:
    """Return a digest of the facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@cache
def device_kind(device: str) -> str:
    """Return the name of the device's kind; kinds that may round differently have different names."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    """Return the processor's model: libraries select kernels by it, and different kernels round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return models[0] if models else platform.machine()


@cache
def code_fingerprint() -> str:
    """Return a digest of the training code of this package."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# --- Facts about a run that replay needs besides its signals: layers, batch shapes of an epoch, FLOPs of its steps ----


def facts_file(key: Hashable) -> str:
    """Return the name of the file with a method's facts, by `attachment.metadata_key`."""
    return f"facts-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}.json"


def method_facts(
    store: StageStore, config: TrialConfig, write: Callable[[str, Any], None] | None = None
) -> Mapping[str, Any]:
    """Return the facts about the model that a method needs, from the store or from a run built for this.

    The latter are written, without ``write`` by the store's own, which raises OSError.
    """
    key = metadata_key(config)
    name = facts_file(key)
    stored = store.read(name)
    if stored is None:
        with TrainingRun(config) as run:
            stored = {"key": key, "facts": run.method.model_metadata()}
        (write or store.write)(name, stored)
    facts: Mapping[str, Any] = stored["facts"]
    return facts


def costs_file(trains: str) -> str:
    """Return the name of the file with the cost of steps in which these parameters train (one digit per parameter)."""
    return f"costs-{hashlib.sha256(trains.encode()).hexdigest()[:12]}.json"


def plain_shapes(epoch_shapes: Iterable[tuple[int, Batch]]) -> list[Any]:
    """Return run lengths of batch shapes in plain types."""
    return [
        [count, [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in batch]] for count, batch in epoch_shapes
    ]


def ensure_costs(store: StageStore, config: TrialConfig, masks: Iterable[str]) -> None:
    """Count and write the costs of steps in which these parameters train, where they are not known.

    The root was trained for at least one epoch. A mask has one digit per parameter, by number: 1 where it trains.
    OSError: they cannot be written. UserError: the workload's loss raised on a partly stopped model.
    """
    missing = [mask for mask in dict.fromkeys(masks) if store.read(costs_file(mask)) is None]
    shapes = store.read("shapes.json")
    if not missing or shapes is None:
        return
    with TrainingRun(config) as run:
        table = CostTable(run.workload, run.model)
        for mask in missing:
            for parameter, digit in zip(run.model.parameters(), mask, strict=True):
                parameter.requires_grad_(digit == "1")
            steps = []
            for count, plain in shapes:
                try:
                    batch = (torch.empty(size, dtype=getattr(torch, dtype), device="meta") for size, dtype in plain)
                    cost = table.step(mask, tuple(batch))
                except Exception as error:
                    raise UserError(
                        f"the cost of steps with stopped layers cannot be counted: the loss of workload "
                        f"{config.workload} raised {type(error).__name__}: {error}".splitlines()[0]
                    ) from error
                steps.append([count, cost.forward_flops, cost.backward_flops])
            store.write(costs_file(mask), {"trains": mask, "steps": steps})


# --- Writing of a trial's stages to the stage tree, except checkpoints. A full disk ends the sharing, not the training

#: Key of a row that marks that training diverged there.
DIVERGED = "diverged"
#: Method metadata that this process has read, by the root's folder and `metadata_key`.
_METADATA: dict[tuple[str, Any], Mapping[str, Any]] = {}
#: Warnings already given in this process, by tree.
_WARNED: set[tuple[str, str]] = set()


class TreeWriter:
    """Write stages and the root's description (`root_facts`) for one trial."""

    def __init__(self, store: StageStore, root: Mapping[str, Any], config: TrialConfig) -> None:
        self._store, self._root, self._config, self._tree = store, root, config, str(store.tree)
        self._described = False

    def method_metadata(self) -> Mapping[str, Any]:
        """Return the facts about the model that the replay of the trial's method needs; write them if missing."""
        if METHODS[self._config.method].replay_module is None:
            return {}
        key = (f"{self._tree}/{self._store.root}", metadata_key(self._config))
        if key not in _METADATA:
            _METADATA[key] = method_facts(self._store, self._config, self._write)
        return _METADATA[key]

    def publish(self, stage: Stage, link: tuple[Stage, Intervention] | None, chunk: Chunk) -> None:
        """Write recorded steps of a stage, unless all of it is known; ``link`` as in `StageStore.publish`."""
        if stage.knows(chunk) and not any(DIVERGED in stage.rows[step] for step in chunk.rows):
            return
        with self._unless_unwritable():
            self._store.publish(stage, chunk, link)

    def describe_root(self, run: TrainingRun | None, *, finished: bool) -> None:
        """Write missing files of the root, once per trial: after its first epoch, or at its end."""
        if self._described or not (finished or (run is not None and run.epoch_shapes is not None)):
            return
        self._described = True
        if self._store.read("root.json") is None or self._store.read("shapes.json") is None:
            with TrainingRun(self._config) if run is None else nullcontext(run) as built:
                # The data is read again only if the run has not trained an epoch.
                shapes = built.epoch_shapes or run_lengths(built.workload.train_batches(0, self._config.seed))
                described = {
                    **self._root,
                    "layer_names": [name for name, _ in built.model.named_parameters()],
                    "trains": "".join("1" if trains else "0" for trains in built.trains_at_first),
                    "weight_decays": weight_decays(built.optimizer),
                }
                self._write("shapes.json", plain_shapes(shapes))
                self._write("root.json", described)

    def warn_unloadable(self, error: Exception) -> None:
        """Warn that a checkpoint cannot be loaded, once per tree and process."""
        self._warn_once(
            "unloadable",
            f"a checkpoint of the stage tree cannot be loaded ({error}): trials train on from an earlier one. The "
            "state of the workload's optimizer and schedule must be tensors and plain types",
        )

    def _write(self, name: str, values: Any) -> None:
        with self._unless_unwritable():
            self._store.write(name, values)

    @contextmanager
    def _unless_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn_once(
                "unwritten",
                f"the stage tree cannot be written ({error.strerror or error}): trials train on without sharing what "
                "they train now",
            )

    def _warn_once(self, what: str, message: str) -> None:
        if (self._tree, what) not in _WARNED:
            _WARNED.add((self._tree, what))
            warnings.warn(message, stacklevel=4)
