"""Other stops beside a trained setting of another method, on runs that are really trained, without Ray."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import finish
from searchers import learning, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import search_spaces
from analysis.trace_replay.traces import read_trace
from search_spaces import Space, SpaceContext
from search_spaces.joined import joined
from trainables.config import TrialConfig
from trainables.gradskip.variables import BY_NAME
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun
from tune_cac.tuning.draft_study import draft_of
from tune_cac.tuning.outcomes.path_trace import along
from tune_cac.tuning.outcomes.trial_attributes import OUTCOME, PREDICTED, STOPS_FOR
from tune_cac.tuning.samplers import make_sampler
from tune_cac.tuning.study_searcher import StudySearch

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.usefixtures("tiny")]

PRUNED: dict[str, Any] = {
    "agp_weights": ("0.weight", "3.weight"), "agp_initial_sparsity": 0.0, "agp_final_sparsity": 0.8,
    "pruning_start_epoch": 1, "pruning_end_epoch": 3, "pruning_frequency": 1,
}  # fmt: skip


def train(folder: Path, config: TrialConfig) -> dict[str, Any]:
    with SharedRun(config, Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        return finish(run)[-1]


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
    store = StageStore(tmp_path / "tree", root.parent.name)
    trace = read_trace(store)
    path = along(trace, store, row["stage"])
    assert path is not None
    assert [stage.start for stage in path.stages] == [0]
    alone = variances(stopping)
    names = [f"variance:{number}" for number in (0, 3, 6, 9)]
    recorded = np.column_stack([path.dense.signal(name)[0] for name in names])
    assert np.isfinite(recorded).all()
    assert recorded[:21] == pytest.approx(alone[:21], rel=1e-5)
    assert recorded[:, 1:] == pytest.approx(alone[:, 1:], rel=1e-5)  # of layers that it did not stop
    assert np.abs(recorded[9:, 0] / trace.dense.signal(names[0])[0][9:] - 1).max() > 0.01  # it was pruned
    assert along(trace, store, "no such stage") is None


def searched(
    folder: Path, trials: int, *, fails: Callable[[dict[str, Any]], bool] = lambda attrs: False, **more: Any
) -> tuple[StudySearch, list[dict[str, Any]]]:
    """A search of a joined space whose trials are trained one after the other; their attributes."""
    made = learning(folder, **{"space": "auto_thresholds+agp", "allowed_drop": 0.05, **more})
    for number in range(trials):
        suggested = made.suggest(str(number))
        assert isinstance(suggested, dict)
        if fails(told(folder)[suggested["trial"]].user_attrs):
            made.tell_failure(str(number), "TrainingDiverged: of the user's")
        else:
            made.on_trial_complete(str(number), train(folder, TrialConfig.from_mapping(suggested["config"])))
    return made, [dict(trial.user_attrs) for trial in told(folder)]


def rest(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in BY_NAME}


def stops_of(attrs: dict[str, Any]) -> list[list[int]]:
    return [[event["iteration"], event["layer"]] for event in json.loads(attrs["row"]["stop_events"])]


def test_every_second_suggestion_has_a_trained_setting_with_stops_between_what_is_known(tmp_path: Path) -> None:
    made, trials = searched(tmp_path, 12)
    baseline = trials[0]["row"]
    restopped = [number for number, attrs in enumerate(trials) if STOPS_FOR in attrs]
    assert len(restopped) >= 4
    assert not any(a + 1 == b for a, b in pairwise(restopped))
    exact = 0
    for number in restopped:
        attrs = trials[number]
        assert rest(attrs["config"]) == rest(trials[attrs[STOPS_FOR]]["config"])
        group = [one for one in trials[1:number] if rest(one["config"]) == rest(attrs["config"])]
        stops, expected = stops_of(attrs), json.loads(attrs[OUTCOME])[0]
        assert stops not in [stops_of(one) for one in group]
        # The first stop is exact where the trial that it comes from had not stopped a layer before.
        firsts = [stop[0] for one in group for stop in stops_of(one)[:1]]
        if expected[0][0] < min(firsts, default=10**9):
            assert stops[0] == expected[0]
            exact += 1
        within = [
            one["row"]["compute_saved"] for one in group if baseline["accuracy"] - one["row"]["accuracy"] <= 0.05 + 1e-9
        ]
        beyond = [one["row"]["compute_saved"] for one in group if one["row"]["compute_saved"] not in within]
        above = [saved for saved in beyond if saved > max(within, default=0.0)]
        assert max(within, default=0.0) < attrs[PREDICTED] < min(above, default=1.0)
    assert exact
    # The sampler learns from all of them, also from thresholds between two steps of their range.
    assert len(draft_of(made.trials, make_sampler(0)).trials) == len(made.trials.all())


def test_a_resumed_search_goes_on_with_the_same_stops(tmp_path: Path) -> None:
    made, _ = searched(tmp_path, 5)
    first = made.suggest("more")
    assert isinstance(first, dict)
    again = learning(tmp_path, begin=False, space="auto_thresholds+agp", allowed_drop=0.05)
    again.adopt_unfinished()
    second = again.suggest("more")
    assert isinstance(second, dict)
    assert second["config"] == first["config"]


def of_branches(trial: Any, context: SpaceContext) -> dict[str, Any]:
    """Pruning with a parameter of each of two branches."""
    strong = trial.suggest_categorical("strong", (False, True))
    share = trial.suggest_float("strength", 0.5, 0.9) if strong else trial.suggest_float("weakness", 0.05, 0.3)
    return {**PRUNED, "pruning_start_epoch": 0, "agp_final_sparsity": share}


def by_gap(trial: Any, context: SpaceContext) -> dict[str, Any]:
    """Thresholds by a parameter that has no variable's name."""
    names = ("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR")
    gap = trial.suggest_float("gap", 0.001, 0.1, log=True)
    return {**dict.fromkeys(names, 1 - gap), "CAC_VAR_START_ITR": 0, "CAC_VAR_SAMPLES": 1, "CAC_VAR_MT_COUNT_THR": 0}


BRANCHES = Space(
    name="branches", method="compression", suggest=of_branches, start=lambda context: {"strong": True, "strength": 0.6}
)
GAP = Space(name="gap", method="gradskip", suggest=by_gap, start=lambda context: {"gap": 0.05})
TEACHER = "a teacher, which costs"
JOINED = {
    "stops with depths of their own": lambda: search_spaces.load("manual_layers+agp"),
    "branches of the other method": lambda: joined([search_spaces.load("auto_thresholds"), BRANCHES]),
    "parameters of other names": lambda: joined([GAP, search_spaces.load("agp")]),
    "a method without a schedule": lambda: search_spaces.load("auto_thresholds+zero_gradients"),
    TEACHER: lambda: search_spaces.load("auto_thresholds+distillation"),
}


@pytest.mark.parametrize("name", JOINED)
def test_spaces_of_all_kinds_have_other_stops_each_once(tmp_path: Path, name: str) -> None:
    hold = None
    if name == TEACHER:
        with TrainingRun(TrialConfig(workload="tiny", epochs=1, method="none")) as teacher:
            torch.save(teacher.model.state_dict(), tmp_path / "teacher.pt")
        hold = {"distill_checkpoint": str(tmp_path / "teacher.pt")}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no other stops")
        warnings.filterwarnings("error", message=".* out of the range")
        _, trials = searched(tmp_path, 10, own=JOINED[name](), hold=hold)
    restopped = [attrs for attrs in trials if STOPS_FOR in attrs]
    assert len(restopped) >= 2
    configs = [json.dumps(attrs["config"], sort_keys=True) for attrs in trials]
    assert len(set(configs)) == len(configs)
    for attrs in restopped:
        assert rest(attrs["config"]) == rest(trials[attrs[STOPS_FOR]]["config"])


def test_stops_that_fail_are_not_suggested_again(tmp_path: Path) -> None:
    _, trials = searched(tmp_path, 12, fails=lambda attrs: STOPS_FOR in attrs)
    failed = [json.dumps(attrs["config"], sort_keys=True) for attrs in trials if STOPS_FOR in attrs]
    assert len(failed) >= 3
    assert len(set(failed)) == len(failed)
    by_setting: dict[int, list[float]] = {}
    for attrs in trials:
        if STOPS_FOR in attrs:
            by_setting.setdefault(attrs[STOPS_FOR], []).append(attrs[PREDICTED])
    assert all(found == sorted(found, reverse=True) for found in by_setting.values())  # each failure is too much


def test_a_lost_tree_leaves_the_sampler(tmp_path: Path) -> None:
    made, _ = searched(tmp_path, 3)
    shutil.rmtree(tmp_path / "tree")
    suggested = made.suggest("more")
    assert isinstance(suggested, dict)
    assert STOPS_FOR not in told(tmp_path)[suggested["trial"]].user_attrs
