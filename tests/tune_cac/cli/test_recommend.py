"""The command recommend: messages before anything is trained; what it prints is tested with tests of priors."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import result_row, write_study

from trainables.quality import ACCURACY, Quality
from tune_cac.cli.main import main
from tune_cac.cli.recommend import comments
from tune_cac.tuning.recommendation import Errors


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["recommend", *arguments]) == 2
    return capsys.readouterr().err


def test_without_an_earlier_study_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys)
    assert "recommend needs an earlier study, and results has none that can be used: run python -m tune_cac" in told
    write_study(Path("results/d0"), [{"row": result_row()}])
    told = refused(capsys)
    assert "left out d0: results/d0 has no recorded training" in told
    assert "recommend needs an earlier study" in told


def test_a_study_that_is_given_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no study 'd1' in results: there is no study there yet" in refused(capsys, "--prior", "d1")


def test_a_name_alone_names_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--name", "mine")
    assert "--name must come with --seeds, whose studies it names, got --name mine alone: add --seeds 5, or" in told
    assert "by --prior mine" in told


def test_a_space_of_another_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--space must be one of Gradient-Skip alone" in refused(capsys, "--space", "agp")


def test_expectation_and_error_in_words() -> None:
    errors = Errors(studies=3, saved=0.0123, loss=0.5, loss_of_stops=0.8)
    said = comments(0.435, 0.1, 1.0, errors, ACCURACY, 0.005, 0.005, trusted=True)
    assert said[0].startswith("# Expected: compute saved 43.5 %, accuracy loss 0.05 points, give or take 0.50 points")
    assert "(allowed 0.50 points). Not trained" in said[0]
    assert "3 of these studies had the saving of thresholds predicted with a mean error of 1.2 points" in said[1]
    assert said[1].endswith("the accuracy loss of thresholds with one of 0.25 points.")
    quality = Quality(name="val_loss", direction="min", unit="")
    said = comments(0.435, 0.1, 1.0, errors, quality, "2%", 2.0, trusted=False)
    assert "rise in val_loss 0.2 % of the baseline's, give or take 2 % of the baseline's" in said[0]
    assert said[1].endswith("with one of 1.6 % of the baseline's.")
    said = comments(0.4, 0, 1, None, ACCURACY, 0.005, 0.005, trusted=False)
    assert "No error can be given with fewer than two" in said[1]
    # Losses have a unit of their own where none is allowed.
    said = comments(0.4, 2.0, 1.0, None, ACCURACY, 0.0, 0.0023, trusted=False)
    assert "accuracy loss 0.46 points, give or take 0.23 points (allowed 0.00 points)" in said[0]


def test_thresholds_are_handed_out_where_no_list_can_say_the_stops() -> None:
    said = comments(0.4, 0, 1, None, ACCURACY, 0.005, 0.005, trusted=True, listed=False)
    assert "this model registers its layers in another order than it runs them in, so CAC_STOP_LAYER_NUM" in said[1]
