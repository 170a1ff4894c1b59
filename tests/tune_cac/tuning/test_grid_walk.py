"""Grids on real journals: each point once, in order, through failures, killed searches and parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import search_spaces
from search_spaces.grid import GridPoints, grid_points
from search_spaces.space import Space
from tests.support.searchers import CONTEXT, row, searcher, told
from tune_cac.study.fixed_params import grid_of
from tune_cac.tuning.study_searcher import FINISHED, StudySearch

GRID = grid_of(
    {"all": {"CAC_VAR_START_THR": [0.9, 0.97], "CAC_BRAKING_DISTANCE": [0, {"value": 20, "then": {"all": {
        "CAC_VAR_MT_COUNT_THR": [0, 2]}}}]}, "exclude": "CAC_BRAKING_DISTANCE"}
)  # fmt: skip
SPACE: Space = search_spaces.load("grid", grid=GRID)
POINTS = [dict(point) for point in GRID["settings"]]  # type: ignore[index]


def walk(folder: Path, points: GridPoints | None = None, **more: Any) -> StudySearch:
    return searcher(
        folder, space=SPACE.name, **{"grid": points or grid_points(SPACE, CONTEXT), "sampler": "grid", **more},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def loads_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.searchers.search_spaces.load", lambda name, grid=None: SPACE)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name.startswith("CAC_")}


def trained(folder: Path) -> list[dict[str, Any]]:
    """Settings of the trials that completed, without the baseline."""
    ended = [trial for trial in told(folder) if trial.state == TrialState.COMPLETE]
    return [settings_of(t.user_attrs["config"]) for t in ended if t.user_attrs["role"] != "baseline"]


def test_the_points_are_trained_in_the_order_of_the_file_and_then_the_search_ends(tmp_path: Path) -> None:
    made = walk(tmp_path)
    for number, point in enumerate(POINTS):
        suggested = made.suggest(str(number))
        assert settings_of(suggested["config"]) == point  # type: ignore[index]
        assert suggested["config"]["unnamed"] == ["CAC_BRAKING_DISTANCE"]  # type: ignore[index]
        if number != 1:
            made.on_trial_complete(str(number), row(0.9, 0.1 * number))
        else:
            made.tell_failure(str(number), "ValueError: of the user's")
    assert made.nothing_left
    assert made.suggest("more") == FINISHED
    assert trained(tmp_path) == [POINTS[0], *POINTS[2:]]
    again = walk(tmp_path, begin=False)
    again.adopt_unfinished()
    assert again.nothing_left  # what failed by itself would fail again


def test_a_search_that_is_killed_at_any_time_goes_on_and_trains_no_point_twice(tmp_path: Path) -> None:
    made = walk(tmp_path)
    for kill in range(20):
        for number in range(2):  # two begin, one ends, and the process is gone
            name = f"{kill}.{number}"
            if made.suggest(name) == FINISHED:
                break
            if number == 0:
                made.on_trial_complete(name, row(0.9, 0.1))
        else:
            made = walk(tmp_path, begin=False)
            made.adopt_unfinished()
            if kill == 1:  # killed again between queueing the point and reporting the interrupted trial
                interrupted = next(t for t in told(tmp_path) if t.state == TrialState.WAITING)
                made.study.enqueue_trial(interrupted.system_attrs["fixed_params"], user_attrs={"role": "search"})
            continue
        break
    assert made.nothing_left
    assert sorted(map(str, trained(tmp_path))) == sorted(map(str, POINTS))


def test_a_grid_over_a_built_in_space_begins_with_its_published_start(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    space = search_spaces.load("braking_distance")
    made = searcher(tmp_path, space=space.name, sampler="grid", grid=grid_points(space, CONTEXT))
    roles = []
    for number in range(3):
        config: Any = made.suggest(str(number))
        roles.append((config["role"], config["config"]["CAC_BRAKING_DISTANCE"]))
    assert roles == [("published", 0), ("search", 1), ("search", 2)]
