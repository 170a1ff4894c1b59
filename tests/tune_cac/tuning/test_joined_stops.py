"""Other stops beside a trained setting of another method, on runs that are really trained, without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from searchers import learning, told
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis.trace_replay.traces import read_trace
from trainables.config import TrialConfig
from trainables.gradskip.variables import BY_NAME
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun
from tune_cac.tuning.outcomes.path_trace import along
from tune_cac.tuning.outcomes.trial_attributes import OUTCOME, STOPS_FOR
from tune_cac.tuning.study_searcher import StudySearch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny")]

PRUNED: dict[str, Any] = {
    "agp_weights": ("0.weight", "3.weight"), "agp_initial_sparsity": 0.0, "agp_final_sparsity": 0.8,
    "pruning_start_epoch": 1, "pruning_end_epoch": 3, "pruning_frequency": 1,
}  # fmt: skip


def train(folder: Path, config: TrialConfig) -> dict[str, Any]:
    with SharedRun(config, Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        while not run.finished:
            last = run.train_epoch()
    return last


def variances(config: TrialConfig) -> np.ndarray:
    """(T, layers) variances of the convolutions' weights before each step, trained alone."""
    found = []
    with TrainingRun(config) as run:
        weights = [module.weight for module in run.model.modules() if isinstance(module, torch.nn.Conv2d)]
        while not run.finished:
            run.begin_epoch()
            while not run.epoch_is_trained:
                found.append([weight.detach().double().var().item() for weight in weights])
                run.train_step()
            run.end_epoch()
    return np.array(found)


def test_a_path_has_the_variances_of_its_run_until_it_stops_layers(tmp_path: Path) -> None:
    learning(tmp_path)  # the dense run
    stopping = TrialConfig(
        workload="tiny", epochs=4, method="gradskip+compression", CAC_STOP_LAYER_NUM=(0,), CAC_STOP_LAYER_ITR=(20,),
        **PRUNED,
    )  # fmt: skip
    row = train(tmp_path, stopping)
    (root,) = (tmp_path / "tree").glob("*/root.json")
    trace = read_trace(StageStore(tmp_path / "tree", root.parent.name))
    path = along(trace, row["stage"])
    assert path is not None
    assert [stage.start for stage in path.stages] == [0]
    alone = variances(stopping)
    names = [f"variance:{number}" for number in (0, 3, 6, 9)]
    recorded = np.column_stack([path.dense.signal(name)[0] for name in names])
    assert np.isfinite(recorded).all()
    assert recorded[:21] == pytest.approx(alone[:21], rel=1e-5)
    assert recorded[:, 1:] == pytest.approx(alone[:, 1:], rel=1e-5)  # of layers that it did not stop
    assert np.abs(recorded[9:, 0] / trace.dense.signal(names[0])[0][9:] - 1).max() > 0.01  # it was pruned
    assert along(trace, "no such stage") is None


def searched(folder: Path, trials: int) -> tuple[StudySearch, list[dict[str, Any]]]:
    """A search of the joined space whose trials are trained one after the other; their attributes."""
    made = learning(folder, space="auto_thresholds+agp", allowed_drop=0.05)
    for number in range(trials):
        suggested = made.suggest(str(number))
        assert isinstance(suggested, dict)
        made.on_trial_complete(str(number), train(folder, TrialConfig.from_mapping(suggested["config"])))
    return made, [dict(trial.user_attrs) for trial in told(folder)]


def rest(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in BY_NAME}


def test_every_second_suggestion_has_a_trained_setting_with_stops_between_what_is_known(tmp_path: Path) -> None:
    _, trials = searched(tmp_path, 12)
    baseline = trials[0]["row"]
    restopped = [number for number, attrs in enumerate(trials) if STOPS_FOR in attrs]
    assert len(restopped) >= 4
    exact = 0
    for number in restopped:
        attrs = trials[number]
        assert rest(attrs["config"]) == rest(trials[attrs[STOPS_FOR]]["config"])
        group = [one for one in trials[1:number] if rest(one["config"]) == rest(attrs["config"])]
        stops = [[event["iteration"], event["layer"]] for event in json.loads(attrs["row"]["stop_events"])]
        expected = json.loads(attrs[OUTCOME])[0]
        assert stops not in [
            [[event["iteration"], event["layer"]] for event in json.loads(one["row"]["stop_events"])] for one in group
        ]
        # The first stop is exact where the trial that it comes from had not stopped a layer before.
        firsts = [event["iteration"] for one in group for event in json.loads(one["row"]["stop_events"])[:1]]
        if expected[0][0] < min(firsts, default=10**9):
            assert stops[0] == expected[0]
            exact += 1
        within = [
            one["row"]["compute_saved"] for one in group if baseline["accuracy"] - one["row"]["accuracy"] <= 0.05 + 1e-9
        ]
        beyond = [one["row"]["compute_saved"] for one in group if one["row"]["compute_saved"] not in within]
        assert attrs["row"]["compute_saved"] > max(within, default=0.0) - 0.1
        above = [saved for saved in beyond if saved > max(within, default=0.0)]
        assert attrs["row"]["compute_saved"] < min(above, default=1.0) + 0.1
    assert exact


def test_a_resumed_search_goes_on_with_the_same_stops(tmp_path: Path) -> None:
    made, _ = searched(tmp_path, 5)
    first = made.suggest("more")
    assert isinstance(first, dict)
    again = learning(tmp_path, begin=False, space="auto_thresholds+agp", allowed_drop=0.05)
    again.adopt_unfinished()
    second = again.suggest("more")
    assert isinstance(second, dict)
    assert second["config"] == first["config"]
