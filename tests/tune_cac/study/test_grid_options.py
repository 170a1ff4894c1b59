"""Options about sampler and grid: what they take, and what they say to what they do not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from analysis.io.study_files import Layout
from search_spaces import SpaceContext
from search_spaces.grid import grid_points
from trainables.errors import UserError
from tune_cac.cli.main import main
from tune_cac.study.fixed_params import points_of, trials_in_all
from tune_cac.study.folder import open_study
from tune_cac.study.search_options import SearchOptions

CONTEXT = SpaceContext(total_steps=300)
TEXT = "all:\n  CAC_VAR_START_THR: [0.9, 1]\n  CAC_STOP_LAYER_NUM: [null, [3, 9]]\n"
MAP = {"all": {"CAC_VAR_START_THR": [0.9, 1], "CAC_STOP_LAYER_NUM": [None, "3,9"]}}


def refusal(**given: Any) -> str:
    with pytest.raises(UserError) as caught:
        SearchOptions(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_and_a_map_are_the_same_grid_and_a_study_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(TEXT)
    given = SearchOptions(grid=file)
    assert (given.space, given.sampler, given.trials) == ("grid", "grid", None)
    assert given.points == {
        "settings": [
            {"CAC_VAR_START_THR": 0.9},
            {"CAC_VAR_START_THR": 0.9, "CAC_STOP_LAYER_NUM": [3, 9]},
            {"CAC_VAR_START_THR": 1.0},
            {"CAC_VAR_START_THR": 1.0, "CAC_STOP_LAYER_NUM": [3, 9]},
        ],
        "unnamed": [],
    }
    for again in (str(file), MAP, given.grid):
        assert SearchOptions(grid=again).points == given.points
    layout = open_study(SearchOptions(grid=file, name="it", results=tmp_path))
    assert layout.root.name == "it"
    info = Layout(layout.root).read_info()
    assert (info.sampler, info.space, info.method, info.trials) == ("grid", "grid", "gradskip", 0)
    assert asdict(SearchOptions.of_study(info, trials=4, name="it", results=tmp_path)) == asdict(
        SearchOptions(grid=file, trials=4, name="it", results=tmp_path, epochs=30, saving="training")
    )
    file.write_text(TEXT.replace("0.9", "0.8"))
    with pytest.raises(UserError, match="holds a study of another grid: choose another --name, or the same settings"):
        open_study(SearchOptions(grid=file, name="it", results=tmp_path))
    with pytest.raises(UserError, match="holds a study with sampler 'grid', not 'random'"):
        open_study(SearchOptions(grid=given.grid, sampler="random", name="it", results=tmp_path))


def test_the_default_is_what_it_was() -> None:
    assert (SearchOptions().sampler, SearchOptions().trials, SearchOptions().grid) == ("auto", 24, None)
    assert SearchOptions(sampler="grid").trials is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"sampler": "gird"},
            "unknown --sampler 'gird': did you mean 'grid'? Valid: auto, gp, grid, nsga2, random, tpe",
        ),
        ({"grid": "none.yaml"}, "--grid must be a file in YAML, none.yaml cannot be read: No such file or directory"),
        ({"grid": MAP, "space": "agp"}, "--grid is searched in place of a space, so it takes no --space, got agp"),
        ({"grid": {"all": {"CAC_VAR_STRAT_THR": 1}}}, "unknown variable 'CAC_VAR_STRAT_THR': did you mean"),
        ({"grid": {"all": {"CAC_VAR_START_THR": [0.9, True]}}}, "all.CAC_VAR_START_THR.1: CAC_VAR_START_THR must be"),
        ({"grid": {"all": {"seed": [0, 1]}}}, "seed has an option of its own, so it can't be set by name: use --seed"),
        ({"grid": {"all": {"CAC_RULE": ["variance", "linear"]}}}, "point 2 of the grid (CAC_RULE=linear) can't be: "),
        ({"grid": {"settings": [{"CAC_NO": 1}]}}, "point 1 of the grid (CAC_NO=1) can't be: unknown variable 'CAC_NO'"),
        ({"grid": MAP, "hold": {"CAC_VAR_START_THR": 0.9}}, "CAC_VAR_START_THR is searched by space grid, so it"),
    ],
)  # fmt: skip
def test_what_cannot_be_says_so(given: dict[str, Any], said: str) -> None:
    assert said in refusal(**given)


def test_the_trials_of_a_grid_are_its_points_and_the_baseline() -> None:
    grid = points_of(SearchOptions(grid=MAP).loaded_space, CONTEXT)
    assert trials_in_all(0, None, grid) == 1 + 4
    assert trials_in_all(5, None, grid) == 5  # the same command again adds nothing
    assert trials_in_all(0, 2, grid) == 2
    assert trials_in_all(4, 2, grid) == 5
    assert trials_in_all(24, 24, None) == 48


def test_a_script_has_the_grid_of_a_file() -> None:
    found = points_of(SearchOptions(grid=MAP).loaded_space, None)
    assert found == grid_points(SearchOptions(grid=MAP).loaded_space, CONTEXT)
    with pytest.raises(UserError, match="a grid over space braking_distance may depend on the run, which a"):
        points_of(SearchOptions(space="braking_distance").loaded_space, None)


@pytest.mark.slow
def test_the_command_line_refuses_in_one_line_before_there_is_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path / "results")]
    assert main(["search", "--space", "auto_thresholds", "--sampler", "grid", "--epochs", "2", *results]) == 2
    said = capsys.readouterr().err
    assert "a grid must have at most 10000 points, space auto_thresholds has more" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "results").exists()
