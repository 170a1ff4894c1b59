"""Writing of a trial's stages to the stage tree, except checkpoints. A full disk ends the sharing, not the training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trainables.attachment import metadata_key
from trainables.config import TrialConfig
from trainables.registry import METHODS
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.run_metadata import method_facts, root_files
from trainables.stage_tree.store import StageStore
from trainables.stage_tree.trial_path import TrialPath
from trainables.training.run import TrainingRun

#: Key of a row that marks that training diverged there.
DIVERGED = "diverged"
#: Method metadata that this process has read, by the root's folder and `metadata_key`.
_METADATA: dict[tuple[str, Any], Mapping[str, Any]] = {}
#: Warnings already given in this process, by tree.
_WARNED: set[tuple[str, str]] = set()


class TreeWriter:
    """Write stages and the root's description for one trial.

    Args:
        store: the tree of the trial's root.
        root: the root's facts (`root.root_facts`).
        config: configuration of the trial.
        tree: place of the study's tree; each warning is given once per tree.
    """

    def __init__(self, store: StageStore, root: Mapping[str, Any], config: TrialConfig, tree: Path | str) -> None:
        self._store, self._root, self._config, self._tree = store, root, config, str(tree)
        self._described = False

    def method_metadata(self) -> Mapping[str, Any]:
        """Return the facts about the model that the replay of the trial's method needs; write them if missing."""
        if METHODS[self._config.method].replay_module is None:
            return {}
        key = (f"{self._tree}/{self._store.root}", metadata_key(self._config))
        if key not in _METADATA:
            _METADATA[key] = method_facts(self._store, self._config, self._write)
        return _METADATA[key]

    def publish(self, path: TrialPath, recorder: SignalRecorder, rows: dict[int, dict[str, Any]]) -> None:
        """Write what was recorded on the path's last stage since the last call, unless all of it is known.

        Args:
            path: path of the trial.
            recorder: of the run.
            rows: result rows by step.
        """
        chunk = recorder.cut(rows)
        stage = path.here
        known = (
            chunk.end <= stage.known_until
            and all(step in stage.rows for step in rows)
            and not any(DIVERGED in stage.rows[step] for step in rows)
            and all(stage.covers(name, chunk.begin, chunk.end) for name in chunk.names)
            and all(stage.has(name, i) for name, pairs in chunk.sparse.items() for i, _ in pairs)
        )
        if known:
            return
        try:
            self._store.publish(stage, chunk, path.link)
        except OSError as error:
            self._warn_unwritten(error)

    def describe_root(self, run: TrainingRun | None, *, finished: bool) -> None:
        """Write missing files of the root, once per trial: after its first epoch, or at its end."""
        if self._described or not (finished or (run is not None and run.epoch_shapes is not None)):
            return
        self._described = True
        if self._store.read("root.json") is None or self._store.read("shapes.json") is None:
            with TrainingRun(self._config) if run is None else nullcontext(run) as built:
                for name, values in root_files(self._root, built).items():
                    self._write(name, values)

    def warn_unloadable(self, error: Exception) -> None:
        """Warn that a checkpoint cannot be loaded, once per tree and process."""
        self._warn_once(
            "unloadable",
            f"a checkpoint of the stage tree cannot be loaded ({error}): trials train on from an earlier one. The "
            "state of the workload's optimizer and schedule must be tensors and plain types",
        )

    def _write(self, name: str, values: Any) -> None:
        try:
            self._store.write(name, values)
        except OSError as error:
            self._warn_unwritten(error)

    def _warn_unwritten(self, error: OSError) -> None:
        self._warn_once(
            "unwritten",
            f"the stage tree cannot be written ({error.strerror or error}): trials train on without sharing what they "
            "train now",
        )

    def _warn_once(self, what: str, message: str) -> None:
        if (self._tree, what) not in _WARNED:
            _WARNED.add((self._tree, what))
            warnings.warn(message, stacklevel=4)
