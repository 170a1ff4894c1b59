"""What confirm refuses, trains, chooses and prefers, without Ray."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from searchers import CONTEXT, row, told
from studies import result_row, write_study
from thorough import rest_thorough

import analysis
import search_spaces
from analysis.io.study_files import Layout
from analysis.metrics.confirmation import paired_interval, read_confirmation, shares_of_error
from analysis.metrics.noise import resolution_of
from analysis.presentation.best_env import best_env
from analysis.presentation.markdown_report import control_cells
from analysis.presentation.summary_text import headline
from trainables.config import TrialConfig
from trainables.quality import ACCURACY
from tune_cac.cli.main import main
from tune_cac.study.study_result import answer, best_or_confirmed, write_answer
from tune_cac.tuning import confirmation as confirming
from tune_cac.tuning.confirmation import FixedListSearch, candidates_of, options_of, runs, what_to_expect
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.searcher import FINISHED
from tune_cac.tuning.trials import PredefinedTrial


def saving(saved: float, accuracy: float = 0.97, **config: Any) -> dict[str, Any]:
    given = TrialConfig(CAC_VAR_START_THR=0.9 + saved / 10, **config).to_dict()
    return {"row": result_row(accuracy, saved), "config": given}


def study(folder: Path, *trials: dict[str, Any]) -> Path:
    return write_study(folder / "s", [{"row": result_row()}, *trials]).root


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top", "0"], "--top must be an integer >= 1, got 0"),
        (["--seeds", "2"], "--seeds must be an integer >= 3, got 2"),
        (
            [],
            "nothing to confirm in s: no setting saves compute within the allowed accuracy loss of 0.005: search "
            "more trials",
        ),
    ],
)
def test_refusals(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path, saving(0.3, 0.9), saving(0.0))
    monkeypatch.chdir(tmp_path)
    assert main(["confirm", "s", *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_a_baseline_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "s", [{}, saving(0.3)]).root
    assert main(["confirm", str(folder)]) == 2
    assert "its baseline did not complete; finish the search, or search anew" in capsys.readouterr().err


def test_candidates_are_the_distinct_settings_that_save_most_within_the_drop(tmp_path: Path) -> None:
    folder = study(tmp_path, saving(0.1), saving(0.3), saving(0.3), saving(0.5, 0.9), saving(0.2), saving(0.0))
    trials = analysis.load(folder)
    assert candidates_of(trials, 0.005, 5)["trial"].tolist() == [2, 5, 1]
    assert candidates_of(trials, 0.005, 1)["trial"].tolist() == [2]
    assert candidates_of(trials, 0.5, 2)["trial"].tolist() == [4, 2]
    # What loses too much over further seeds, as 2 does, is not retrained.
    own = {"role": "control", "control": "other seed", "status": "completed", "seed": 1001}
    again = trials.iloc[[0, 2, 5]].assign(**own, trial=[7, 8, 9], candidate=[0, 2, 5], accuracy=[0.97, 0.8, 0.98])
    trials = pd.concat([trials, again.assign(test_accuracy=again["accuracy"]).astype(trials.dtypes)], ignore_index=True)
    assert candidates_of(trials, 0.005, 5)["trial"].tolist() == [5, 1]


def test_runs_are_the_candidates_and_the_baseline_on_every_seed(tmp_path: Path) -> None:
    trials = analysis.load(study(tmp_path, saving(0.1), saving(0.3, CAC_STOP_LAYER_NUM=(1,), CAC_STOP_LAYER_ITR=(5,))))
    base = TrialConfig(method="none")
    wanted = runs(candidates_of(trials, 0.005, 2), base, [7, 8])
    assert [run.attrs for run in wanted[:2]] == [{"role": "baseline"}] * 2
    assert [run.attrs["candidate"] for run in wanted[2:]] == [2, 2, 1, 1]
    configs = [TrialConfig.from_mapping({**base.to_dict(), **run.values}) for run in wanted]
    assert [config.seed for config in configs] == [7, 8] * 3
    assert [config.method for config in configs] == ["none"] * 2 + ["gradskip"] * 4
    assert configs[2].CAC_STOP_LAYER_ITR == (5,)
    assert pytest.approx(0.91) == configs[4].CAC_VAR_START_THR


def test_cost_and_width_of_the_intervals_are_said_before() -> None:
    values = pd.Series([540 / 600, 541 / 600, 547 / 600])  # of 600 samples a tenth is wrong
    trials = pd.DataFrame({"accuracy": values, "compute_saved": [0.0, 0.3, 0.5]})
    wanted = [PredefinedTrial(attrs={"role": role}, values={}) for role in ["baseline"] * 4 + ["candidate"] * 8]
    deviation = math.sqrt(2 * 0.05 / 600)  # of two calibrated trainings
    for looks, share, percent in (([[4]], 1, 95), ([[2, 4]], 1 / 2, 95), ([[2], [4]], 1 / 4, 94)):
        width = stats.t.ppf(1 - 0.05 * share / 2 / 2, df=3) * deviation / 2
        assert what_to_expect(trials, trials[1:], wanted, looks) == (
            f"at most 8.8 full trainings; mean losses will be known to about +-{100 * width:.2f} points ({percent} % "
            "confidence, all together)"
        )


def test_no_baseline_is_trained_of_options_that_no_candidate_has(tmp_path: Path) -> None:
    trials = analysis.load(study(tmp_path, saving(0.1, workload_options=("lr=0.2",))))
    base = TrialConfig(method="none", workload_options=("lr=0.1",))
    wanted = runs(candidates_of(trials, 0.5, 2), base, [7, 8])
    configs = [TrialConfig.from_mapping({**base.to_dict(), **run.values}) for run in wanted]
    assert [run.attrs["role"] for run in wanted] == ["baseline"] * 2 + ["candidate"] * 2
    assert [config.options for config in configs] == [("lr=0.2",)] * 4


def test_controls_are_told_in_whole_epochs() -> None:
    line = pd.DataFrame({"epochs": [30.0, 15.0], "compute_saved": [0.0, 0.5], "accuracy": [0.9, 0.8]})
    line.attrs["quality"] = ACCURACY
    assert control_cells(line)[1:] == [["30 epochs", "0.0 %", "0.9000"], ["15 epochs", "50.0 %", "0.8000"]]


def confirmation(*rows: tuple[int, float, float, float, bool]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=["candidate", "compute_saved", "accuracy_drop", "drop_high", "confirmed"])
    return found.assign(
        seeds=5, failed=0, confidence=0.95, drop_low=-0.01, drop_worst=0.003, refuted=False, compared="test accuracy"
    )


def of_one(lost: float, most: float, **more: Any) -> pd.DataFrame:
    return confirmation((1, 0.29, lost, most, False)).assign(**more)


@pytest.mark.parametrize(
    ("saved", "table", "trial", "said"),
    [
        pytest.param(
            (0.1, 0.3, 0.2),
            confirmation((3, 0.19, 0.001, 0.004, True), (1, 0.1, 0.0, 0.001, True), (2, 0.29, 0.01, 0.02, False)), 3,
            "saves 19.0 % of the training compute (20.0 % of the time); test accuracy -0.10 points", id="confirmed",
        ),
        pytest.param(
            (0.1, 0.3), confirmation((1, 0.1, 0.0, 0.001, True)), 1,
            "Trial 2 saves 30.0 % on one seed and was not retrained.", id="a later trial saves more",
        ),
        pytest.param(  # no "-0.50" as were allowed
            (0.3,), of_one(0.004, 0.00502), 1, "(95 %: -0.502 to +1.00;", id="barely not",
        ),
        pytest.param(
            (0.3, 0.2), confirmation((1, 0.3, 0.03, 0.04, False), (2, 0.2, 0.0, 0.02, False)).assign(
                refuted=[True, False]
            ), 2, "search: take the settings of trial 2: saves 20.0 %", id="the first is refuted",
        ),
        pytest.param(
            (0.3, 0.2), confirmation((1, 0.3, 0.03, 0.04, False), (2, 0.2, 0.0, 0.02, False)).assign(refuted=True), 0,
            "No setting tried saves compute within the allowed accuracy loss of 0.50 points. 2 settings did on one "
            "seed and not on fresh ones.", id="all are refuted",
        ),
        pytest.param(
            (0.3,), of_one(0.0, 0.001, failed=2), 1,
            "is not certain to be within the allowed loss. It failed on 2 fresh seeds.", id="two failed",
        ),
        pytest.param(
            (0.3,), of_one(0.0, 0.001, failed=2, seeds=0), 1,
            "on one seed, 0.50 points allowed. It failed on 2 fresh seeds.", id="all failed",
        ),
    ],
)  # fmt: skip
def test_what_fresh_seeds_say_decides_the_answer_and_is_said(
    saved: tuple[float, ...], table: pd.DataFrame, trial: int, said: str, tmp_path: Path
) -> None:
    ranking = analysis.rank(analysis.load(study(tmp_path, *map(saving, saved))), allowed_drop=0.005)
    best = best_or_confirmed(ranking, table)
    assert best["trial"] == trial
    assert said in headline(ranking, best, 0.005, confirmation=table)


@pytest.mark.slow
@pytest.mark.parametrize(  # the same stage of the tree, the same result to the last bit; of trials 1 and 3
    ("same", "retrained"),
    rest_thorough(
        [({"stage": "a"}, 1), ({"train_loss": 0.25}, 3)], of_several=True
    ),  # 3, where 1 ended only after the confirmation had begun
)
def test_what_fresh_seeds_say_is_said_of_every_trial_of_the_outcome(
    tmp_path: Path, same: dict[str, Any], retrained: int
) -> None:
    first, second = saving(0.4), saving(0.4, CAC_VAR_SAMPLES=7)
    for one in (first, second):
        one["row"] |= {"stage": "", **same}
    folder = study(tmp_path, first, saving(0.2), second, saving(0.1))
    layout = Layout(folder)
    ranking = analysis.rank(analysis.load(folder), allowed_drop=0.005)
    assert ranking["trial"].tolist() == [1, 3, 2, 4, 0]
    assert candidates_of(analysis.load(folder), 0.005, 5)["trial"].tolist() == [1, 2, 4]

    def retrain(drop: float) -> pd.DataFrame:
        accuracies = [0.97 + n / 1000 for n in range(3)]
        rows: list[dict[str, Any]] = []
        for n, accuracy in enumerate(accuracies, start=1):
            dense = TrialConfig(method="none", seed=n).to_dict()
            rows.append({"role": "baseline", "row": result_row(accuracy), "config": dense})
            own = {**dense, "method": "gradskip"}
            row = result_row(accuracy - drop - n / 5990, 0.4)
            rows.append({"role": "candidate", "candidate": retrained, "row": row, "config": own})
        shutil.rmtree(layout.confirmation.root, ignore_errors=True)
        write_study(layout.confirmation.root, rows)
        table = read_confirmation(layout, ranking, allowed_drop=0.005)
        assert table is not None
        return table

    refuted = retrain(0.05)
    assert refuted["refuted"].tolist() == [True]
    best = best_or_confirmed(ranking, refuted)
    assert best["trial"] == 2
    said = headline(ranking, best, 0.005, confirmation=refuted)
    assert "40.0 %" not in said
    confirmed = retrain(0.0)
    assert confirmed["confirmed"].tolist() == [True]
    best = best_or_confirmed(ranking, confirmed)
    assert best["trial"] == 1
    said = headline(ranking, best, 0.005, confirmation=confirmed)
    assert said.endswith("Confirmed on fresh seeds.")
    assert "was not retrained" not in said
    assert "# Confirmed on fresh seeds.\n" in best_env(layout.read_info(), best, 0.005, confirmation=confirmed)


def test_seeds_after_the_greatest_begin_at_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = study(tmp_path, saving(0.3))
    layout = Layout(folder)
    layout.write_info(dataclasses.replace(layout.read_info(), seed=2**32 - 2))
    asked: list[list[int]] = []
    monkeypatch.setattr(confirming, "runs", lambda candidates, base, seeds: asked.append(seeds) or sys.exit())
    with pytest.raises(SystemExit):
        confirming.confirm(str(folder), seeds=3)
    assert asked == [[2**32 - 1, 0, 1]]


#: Of a setting that is neither confirmed nor refuted for long, what it loses on each seed; 0.005 is allowed.
OPEN = [0.001, 0.009, 0.002, 0.008, 0.003, 0.007, 0.001, 0.009] * 2


class Played:
    """Confirmations of three settings, whose runs end at once: 1 loses nothing, 2 what is open, 3 too much."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout = Layout(study(folder, saving(0.3), saving(0.2), saving(0.1)))
        self.asked: list[tuple[int, ...]] = []  # at each look, how many runs of the baseline and of each setting
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}  # by setting and seed
        monkeypatch.setattr(confirming, "_train", self.train)

    def train(self, child: Layout, options: object, base: TrialConfig, wanted: Sequence[PredefinedTrial]) -> bool:
        numbers = [run.attrs.get("candidate", 0) for run in wanted]
        self.asked.append(tuple(numbers.count(number) for number in range(4)))
        for number, run in zip(numbers, wanted, strict=True):
            seed = run.values["seed"]
            lost = (0.0, seed / 10**6, OPEN[seed - 1], 0.05 + seed / 10**6)[number]
            config = TrialConfig.from_mapping({**base.to_dict(), **run.values}).to_dict()
            row = {**run.attrs, "config": config, "row": result_row(0.97 - lost, 0.3 * (number > 0))}
            self.rows.setdefault((number, seed), row)
        info = child.read_info()
        child.journal.unlink(missing_ok=True)
        write_study(child.root, list(self.rows.values())).write_info(info)
        return False

    def confirm(self, seeds: int, **how: Any) -> pd.DataFrame:
        """The table that it ends with, by setting."""
        found = confirming.confirm(self.layout.root, seeds=seeds, **how).confirmation
        assert found is not None
        return found.set_index("candidate").sort_index()


@pytest.mark.slow
def test_until_decided_trains_further_seeds_only_of_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, monkeypatch)
    table = played.confirm(12, until_decided=True)
    assert played.asked == [(3, 3, 3, 3), (6, 0, 6, 0), (12, 0, 12, 0)]
    assert table["seeds"].tolist() == [3, 12, 3]
    assert table["confirmed"].tolist() == [True, False, False]
    assert table["refuted"].tolist() == [False, False, True]
    assert table["confidence"].tolist() == [0.95] * 3  # of all looks together
    most = paired_interval(OPEN[:12], confidence=1 - 0.05 / 3, comparisons=3).high
    assert table.loc[2, "drop_high"] == pytest.approx(most)


@pytest.mark.slow
@pytest.mark.thorough
def test_more_seeds_in_a_later_call_are_further_looks_and_have_less_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, monkeypatch)
    first = played.confirm(5)
    assert played.confirm(5).equals(first)  # the same look is none more
    assert first["confidence"].tolist() == [0.95] * 3
    assert played.confirm(8)["confidence"].tolist() == pytest.approx([1 - 0.05 * 1.25] * 3)
    table = played.confirm(16, until_decided=True)
    assert played.layout.confirmation.read_info().looks == [[5], [8], [3, 6, 12, 16]]
    assert table["seeds"].tolist() == [8, 16, 8]
    assert table["confidence"].tolist() == pytest.approx([1 - 0.05 * spent for spent in (1.25, 1.375, 1.25)])
    width = paired_interval(OPEN, confidence=1 - 0.05 / 8 / 4, comparisons=3)
    assert tuple(table.loc[2, ["drop_low", "drop_high"]]) == pytest.approx((width.low, width.high))


def test_a_confirmation_of_an_earlier_version_keeps_its_looks(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    for looks, share in ((1, 1.0), (4, 0.25)):  # it counted them
        layout.info.write_text(json.dumps({**json.loads(layout.info.read_text()), "looks": looks}))
        assert shares_of_error(5, layout.read_info().looks) == (share, 1.0)


def with_control(folder: Path, shorter: float) -> Path:
    """A study of 1000 validation samples whose best trial saves 0.3 at 0.97, beside a training as much shorter."""
    row = result_row(shorter, dense_flops=700, executed_flops=700)
    config = TrialConfig(method="none", epochs=21).to_dict()
    return study(folder, saving(0.3), {"role": "control", "control": "shorter", "row": row, "config": config})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shorter", "word", "verb", "end"),
    rest_thorough(
        [
            (0.951, "ahead", "is ahead of", ""),
            (0.969, "alike", "cannot be told from", " (another seed alone makes about 0.0055)"),
            (0.991, "behind", "is behind", ""),
        ],
        of_several=True,
    ),
)
def test_what_training_shorter_reaches_is_said_in_headline_and_settings(
    shorter: float, word: str, verb: str, end: str, tmp_path: Path
) -> None:
    said = f" {verb} a dense run cut to the same compute, which reaches {shorter:.4f}, this setting 0.9700{end}."
    found = answer(Layout(with_control(tmp_path, shorter)), allowed_drop=0.005)
    best = found.best
    table = confirmation((1, 0.29, 0.001, 0.004, True))
    confirmed = headline(found.ranking, best, 0.005, confirmation=table, line=found.control_line)
    assert {confirmed[-len(said) :], found.headline[-len(said) :]} == {said}
    write_answer(Layout(found.folder), found)
    assert f"On one seed it{said}" in (found.folder / "best.env").read_text().replace("\n#  ", "")
    assert pd.read_csv(found.folder / "ranking.csv").set_index("trial")["beats_shorter"][1] == word
    assert found.table(120).splitlines()[1].endswith(word)


@pytest.mark.slow
@pytest.mark.parametrize("size", [97, 599])
def test_accuracies_of_float32_never_tell_a_greater_split(size: int) -> None:
    """577/599 in float32 is 63131/65536, exactly: it read as a split of 65,536."""
    single = [float(np.float32(count / size)) for count in range(1, size)]
    found = [resolution_of(pd.Series([value])) for value in single]
    assert all(one is None or one >= 1 / size - 1e-12 for one in found)
    assert resolution_of(pd.Series(single[-64:])) == pytest.approx(1 / size)


def test_the_resolution_of_a_test_split_is_read_off_its_accuracies() -> None:
    assert resolution_of(pd.Series([583 / 599, 580 / 599])) == 1 / 599
    assert resolution_of(pd.Series([0.5, 0.75, 9990 / 10000, None])) == 1 / 1000  # a part of 10,000: wider
    assert resolution_of(pd.Series([9991 / 10000, 0.5])) == 1 / 10000
    coarse = resolution_of(pd.Series([float(np.float32(9991 / 10000))]))  # too many samples for float32
    assert coarse is not None
    assert 1 / 10000 <= coarse < 1 / 500
    for numerators in ((583, 590), (1, 2)):
        values = [float(np.float32(n / 599)) for n in numerators]  # as torch computes a mean
        assert resolution_of(pd.Series(values)) == 1 / 599
    wide = resolution_of(pd.Series([2**0.5 / 2, 3**0.5 / 2]))  # no counts at all: a few thousandths at most
    assert wide is not None
    assert 0 < wide < 0.002
    assert resolution_of(pd.Series([1.0, 1.0, 0.0])) is None
    assert resolution_of(pd.Series([np.inf, -np.inf, 0.5])) == 1 / 2
    assert resolution_of(pd.Series([], dtype=float)) is None


def test_fresh_seeds_are_trained_as_the_study_was(tmp_path: Path) -> None:
    layout = Layout(study(tmp_path, saving(0.1)))
    held = {"CAC_WATCH": ["linear"]}
    info = dataclasses.replace(
        layout.read_info(), hold=held, workers_per_trial=2, workload="text", workload_options=["batch_size=4"]
    )
    base = TrialConfig(method="none", threads=3)
    options = options_of(info, layout.confirmation, base, trials=9, concurrency=1, checkpoint_budget="1GB")
    assert options.hold == held
    assert (options.workload, options.workload_options) == ("text", ("batch_size=4",))
    assert (options.workers_per_trial, options.cpus_per_trial, options.gpus_per_trial) == (2, 3, 0.0)
    assert options.results == layout.root


# --- a search whose runs are given: order, what is passed over, what is tried again -----------------------------------

RUNS = [PredefinedTrial(attrs={"role": "baseline"}, values={"method": "none", "seed": seed}) for seed in (1, 2, 3)]


def given(folder: Path) -> FixedListSearch:
    plan = SearchPlan(
        space=search_spaces.load("auto_thresholds"), context=CONTEXT, base=TrialConfig(method="none"),
        journal=folder / "optuna.journal", allowed_drop=0.01, seed=0, run_folder="ray/run-000", checkpoint_every_s=60,
        tree=folder / "tree", budget_bytes=0, trials=3,
    )  # fmt: skip
    return FixedListSearch(plan, RUNS)


def seeds(*suggested: Any) -> list[int]:
    return [each["config"]["seed"] for each in suggested]


def test_runs_are_trained_in_their_order_and_once(tmp_path: Path) -> None:
    search = given(tmp_path)
    assert seeds(*(search.suggest(name) for name in "abc")) == [1, 2, 3]
    assert search.suggest("d") is None  # one of them may have to be begun again
    for name in "abc":
        search.on_trial_complete(name, row(0.9, 0.0))
    assert search.suggest("d") == FINISHED
    assert [trial.values for trial in told(tmp_path)] == [[0.9, 0.0]] * 3
    assert given(tmp_path).suggest("e") == FINISHED


def test_what_was_interrupted_or_failed_is_trained_again_and_what_diverged_is_not(tmp_path: Path) -> None:
    first = given(tmp_path)
    for name in "abc":
        first.suggest(name)
    first.tell_failure("a", "OutOfMemoryError: no memory")
    first.tell_failure("b", "TrainingDiverged: the accuracy is nan in epoch 1")
    assert first.suggest("d") is None  # not in the same call
    second = given(tmp_path)
    second.adopt_unfinished()
    assert len(second.missing()) == 2
    assert seeds(second.suggest("e"), second.suggest("f")) == [1, 3]
    second.tell_failure("e", "OutOfMemoryError: no memory")
    assert second.suggest("g") is None
    assert len(given(tmp_path).missing()) == 1  # the third is under way in the second


def test_a_run_whose_worker_died_is_begun_again_once(tmp_path: Path) -> None:
    search = given(tmp_path)
    for name in "abc":
        search.suggest(name)
    assert search.tell_failure("b", "its worker died (killed)", died=True)
    assert seeds(search.suggest("d")) == [2]
    assert not search.tell_failure("d", "its worker died (killed)", died=True)
    for name in "ac":
        search.on_trial_complete(name, row(0.9, 0.0))
    assert search.suggest("e") == FINISHED


def test_a_confirmation_is_not_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    child = Layout(layout.root / "confirmation")
    child.root.mkdir()
    child.write_info(dataclasses.replace(layout.read_info(), candidates=[3]))
    assert main(["search", "--resume", str(child.root)]) == 2
    assert f"is a confirmation: go on with python -m tune_cac confirm {layout.root}" in capsys.readouterr().err


def test_a_wrong_number_of_seeds_leaves_the_study_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    before = layout.info.read_text()
    assert main(["search", "--resume", str(layout.root), "--seeds", "17"]) == 2
    assert "--seeds must be" in capsys.readouterr().err
    assert layout.info.read_text() == before


def test_a_damaged_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"row": result_row()}, {"row": result_row(0.97, 0.3), "config": TrialConfig().to_dict()}]
    layout = write_study(tmp_path / "s", rows)
    lines = layout.journal.read_bytes().splitlines(keepends=True)
    damaged = b'{"op_code":8,"x": "\xff\xfe"}\n'  # read without it, but Optuna cannot go on with it
    layout.journal.write_bytes(b"".join([*lines[:2], damaged, *lines[2:]]))
    with pytest.warns(UserWarning, match="optuna.journal"):
        assert main(["search", "--resume", str(layout.root)]) == 2
    assert f"the journal {layout.journal} is damaged (" in capsys.readouterr().err
    layout.journal.write_bytes(b"".join([*lines[:2], b"no JSON\n", *lines[2:]]))
    assert main(["search", "--resume", str(layout.root)]) == 2
    assert f"the journal {layout.journal} is damaged: nothing tells" in capsys.readouterr().err
