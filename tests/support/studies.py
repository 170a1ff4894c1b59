"""Studies and stage trees written by hand, with the parts that a search writes them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from analysis.io.study_files import STUDY_NAME, Layout, StudyInfo
from trainables.config import TrialConfig
from trainables.interventions import Intervention
from trainables.metrics import METHOD_DEFAULTS, MODEL_DEFAULTS, OBJECTIVES, ROW, current_row
from trainables.stage_tree.store import Chunk, Stage, StageStore

#: FLOPs of a dense run in these studies.
DENSE_FLOPS = 1000


def result_row(accuracy: float = 0.97, saved: float = 0.0, **columns: Any) -> dict[str, Any]:
    """A trial's last row."""
    kinds = {"int64": 1, "Int64": 1, "float64": 1.0, "string": ""}
    row = {m.name: kinds[m.dtype] for m in ROW} | MODEL_DEFAULTS | METHOD_DEFAULTS
    executed = round(DENSE_FLOPS * (1 - saved))
    row |= {"quality": accuracy, "test_quality": accuracy, "compute_saved": saved, "train_time_s": 1 - saved}
    row["train_loss"] = 2 - accuracy - saved / 7 - columns.get("inference_saved", 0.0) / 11  # another for another row
    return row | {"dense_flops": DENSE_FLOPS, "executed_flops": executed, "search_flops": executed} | columns


def study_of(folder: Path) -> optuna.Study:
    """A study as any Optuna program reads it."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(Layout(folder).journal)))
    return optuna.load_study(study_name=STUDY_NAME, storage=storage)


def write_study(
    folder: Path, trials: Sequence[Mapping[str, Any]], *, directions: Sequence[str] = ("maximize", "maximize")
) -> Layout:
    """A study's ``study.json`` and journal; of each trial its user attributes. The first is the baseline."""
    layout = Layout(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layout.write_info(
        StudyInfo(
            space="auto_thresholds", workload="digits", epochs=30, seed=0, trials=len(trials), allowed_drop=0.005,
            versions={},
        )
    )  # fmt: skip
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(layout.journal)))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=STUDY_NAME, storage=storage, directions=list(directions))
    for number, attrs in enumerate(trials):
        method = "gradskip" if number else "none"
        given = {"role": "search" if number else "baseline", "config": TrialConfig(method=method).to_dict(), **attrs}
        done = "row" in attrs
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE if done else TrialState.FAIL,
                values=[current_row(attrs["row"])[name] for name in OBJECTIVES] if done else None,
                user_attrs=given,
            )
        )
    return layout


class HandTree:
    """A stage tree to which trials add what they would have trained."""

    def __init__(self, tree: Path, *, root: str = "0" * 24, total_steps: int = 300, layer_names: Sequence[str]) -> None:
        self.total_steps = total_steps
        self.store = StageStore(tree, root)
        self.store.write("root.json", {"total_steps": total_steps, "layer_names": list(layer_names)})

    def train(self, interventions: Sequence[Intervention], result: Mapping[str, Any]) -> str:
        """The stages of one trial that acts so; the id of its last one."""
        stage, link = self.store.first(), None
        for intervention in interventions:
            # The signal that a rule decides by is recorded at the intervention's own iteration.
            self._extend(stage, link, intervention.iteration + 1, {})
            stage, link = self.store.child(stage, intervention), (stage, intervention)
        self._extend(stage, link, self.total_steps, {self.total_steps: dict(result)})
        return stage.id

    def _extend(
        self,
        stage: Stage,
        link: tuple[Stage, Intervention] | None,
        until: int,
        rows: Mapping[int, Mapping[str, Any]],
    ) -> None:
        begin = stage.known_until
        if until > begin or rows:
            values = np.zeros((max(0, until - begin), 1))
            chunk = Chunk(begin=begin, end=max(begin, until), names=("variance:0",), values=values, rows=rows)
            self.store.publish(stage, chunk, link)
