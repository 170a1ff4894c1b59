"""Runs of fewer epochs than the full one are counted, ranked and told, on a study written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import result_row, write_study

import analysis
from analysis.io.layout import Layout
from analysis.metrics.ranking import CUT, SHORTER, control_line
from analysis.presentation.summary_text import best_env, headline, is_answer, settings_text
from trainables.config import TrialConfig


def half(accuracy: float, executed: int, **more: object) -> dict[str, object]:
    """A row of 15 of 30 epochs, whose own full budget is 500 of 1000."""
    own = 1 - executed / 500
    return {
        **result_row(accuracy, dense_flops=500, executed_flops=executed, search_flops=executed, epoch=15), **more,
        "compute_saved": own,
    }  # fmt: skip


CUT_RUN = {
    "role": CUT, "control": SHORTER, "of_epochs": 30, "row": half(0.966, 500),
    "config": TrialConfig(method="none", epochs=15).to_dict(),
}  # fmt: skip
STOPS = {
    "of_epochs": 30, "row": half(0.968, 400),
    "config": TrialConfig(method="gradskip", epochs=15, CAC_VAR_START_THR=0.97).to_dict(),
}  # fmt: skip
FULL = {"row": result_row(0.969, 0.2)}


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    return write_study(tmp_path / "s", [{"row": result_row(0.97)}, FULL, CUT_RUN, STOPS])


def test_savings_and_costs_are_those_of_the_full_run(study: Layout) -> None:
    trials = analysis.load(study.root)
    assert trials["compute_saved"].tolist() == pytest.approx([0.0, 0.2, 0.5, 0.6])
    assert trials["of_epochs"].tolist()[2:] == [30, 30]
    assert trials["of_epochs"].isna().tolist()[:2] == [True, True]
    cost = analysis.search_cost(trials)
    assert cost.dense_equivalents == pytest.approx(1 + 0.8 + 0.5 + 0.4)
    assert cost.own_equivalents == pytest.approx(2.7)
    assert control_line(trials)["compute_saved"].tolist() == pytest.approx([0.0, 0.5])


def test_a_cut_run_is_ranked_and_told_with_and_without_stops(study: Layout) -> None:
    trials = analysis.load(study.root)
    ranking = analysis.rank(trials, allowed_drop=0.005)
    assert ranking["trial"].tolist() == [3, 2, 1, 0]
    best, dense = ranking.iloc[0], ranking.iloc[1]
    line = control_line(trials)
    assert headline(ranking, best, 0.005, line=line).startswith(
        "You can skip 60.0 % of the training compute (train 15 of 30 epochs, with these stops) at a loss of 0.20 points"
    )
    assert headline(ranking, dense, 0.005, line=line).startswith(
        "You can skip 50.0 % of the training compute (train 15 of 30 epochs) at a loss of 0.40 points"
    )
    assert is_answer(dense)
    assert settings_text(best).startswith("EPOCHS=15 START_THR=0.97")
    assert settings_text(dense) == "EPOCHS=15"
    assert settings_text(ranking.iloc[3]) == "-"
    info = study.read_info()
    for row in (best, dense):
        text = best_env(info, row, 0.005, line=line, same_run="trial 3 is the same run with a threshold")
        assert (
            "\n# Train 15 of 30 epochs, with a learning-rate schedule of that length:\nexport TUNE_CAC_EPOCHS=15\n"
            in text
        )
        assert "# trial 3 is the same run with a threshold.\n" in text
    assert "export CAC_VAR_START_THR=0.97\n" in best_env(info, best, 0.005)
    assert "export CAC_VAR_START_THR=-1" in best_env(info, dense, 0.005)  # no layer stops
    assert "export TUNE_CAC_EPOCHS" not in best_env(info, ranking.iloc[2], 0.005)
