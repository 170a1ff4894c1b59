"""Cut dense runs, and stops that are searched on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from runs import facts, finish, rows_alone
from searchers import learning, row, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from analysis.io.studies import read_journal
from analysis.metrics.ranking import CUT, SHORTER
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.study.search_options import SearchOptions, read_lengths
from tune_cac.tuning.controls import in_epochs, shorter_trainings
from tune_cac.tuning.searcher import FINISHED, StudySearch
from tune_cac.tuning.trials import BestSetting

# --- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(100, [90, 80, 70, 60, 50]), (30, [27, 24, 21, 18, 15]), (15, [13, 12, 10, 9, 7]), (4, [3, 2]), (2, [1]), (1, [])],
)
def test_shorter_runs_are_dense_and_of_other_lengths_than_the_full_one(epochs: int, expected: list[int]) -> None:
    controls = shorter_trainings(TrialConfig(method="none", epochs=epochs))
    assert [control.values for control in controls] == [{"method": "none", "epochs": n} for n in expected]
    assert {control.attrs["control"] for control in controls} <= {SHORTER}


def asked(search: Any, *names: str) -> list[dict[str, Any]]:
    return [search.suggest(name) for name in names]


def complete(search: Any, name: str, **columns: Any) -> None:
    search.on_trial_complete(name, {**row(0.9, 0.0), "dense_flops": 1000, "executed_flops": 1000, **columns})


def test_a_control_is_told_against_the_baselines_budget_and_not_counted(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(1, controls=True)
    search.suggest("a")
    complete(search, "a")
    control = search.suggest("b")
    assert control["config"]["epochs"] == 27
    complete(search, "b", dense_flops=900, executed_flops=900)
    assert told(tmp_path)[control["trial"]].values == pytest.approx([0.9, 0.1])
    assert search.trials.finished_count() == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupted_control_is_begun_again_where_it_was(tmp_path: Path) -> None:
    first = searcher(tmp_path, baseline=False)
    first.ask_for(1, controls=True)
    first.suggest("a")
    complete(first, "a")
    number = first.suggest("b")["trial"]
    checkpoint = tmp_path / f"ray/run-000/trial-{number:05d}/checkpoint_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.pt").touch()
    assert first.trials.has_unfinished()
    # The process dies here; another one opens the journal, and adds two trials before it comes to the controls.
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    assert not second.trials.has_unfinished()
    second.ask_for(2, controls=True)
    for name in "cd":
        assert second.suggest(name)["role"] != "control"
        complete(second, name)
    again = [second.suggest(str(n)) for n in range(6)]
    assert [a["config"]["epochs"] for a in again[:5]] == [27, 24, 21, 18, 15]
    assert [a["resume_from"] for a in again[:5]] == [str(checkpoint), *[None] * 4]
    assert again[5] is None
    for place in range(5):
        complete(second, str(place))
    assert second.suggest("5") == FINISHED
    assert told(tmp_path)[number].state.name == "FAIL"
    assert read_journal(tmp_path / "optuna.journal")[number]["status"] == "interrupted"


def test_shorter_runs_fill_the_time_in_which_others_wait_for_the_baseline(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(2, controls=True)
    roles = [search.suggest(name)["role"] for name in "abc"]
    assert roles == ["baseline", "control", "control"]
    complete(search, "a")
    assert search.suggest("d")["role"] == "published"
    complete(search, "d")
    assert [search.suggest(name)["config"]["epochs"] for name in "efg"] == [21, 18, 15]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sampler_learns_from_settings_as_if_there_were_no_controls(tmp_path: Path) -> None:
    """Settings with START_THR near 1 are the better ones; good controls must not stand in their place."""
    found = {}
    for controls in (False, True):
        folder = tmp_path / str(controls)
        folder.mkdir()
        search = searcher(folder, baseline=False)
        search.ask_for(1, controls=controls)
        search.suggest("baseline")
        complete(search, "baseline")
        for number in range(5 if controls else 0):
            assert search.suggest(f"c{number}")["role"] == "control"
            # Better than every setting in both.
            complete(search, f"c{number}", accuracy=0.99, dense_flops=500, executed_flops=100)
        search.ask_for(60)
        for number in range(60):
            suggested = search.suggest(str(number))["config"]["CAC_VAR_START_THR"]
            complete(search, str(number), compute_saved=1 - 9 * (1 - suggested))
            found.setdefault(controls, []).append(suggested)
    late = {controls: sum(values[20:]) / 40 for controls, values in found.items()}
    assert late[True] > 0.975  # half of the range is above 0.95
    assert abs(late[True] - late[False]) < 0.01


@pytest.mark.slow
@pytest.mark.thorough
def test_controls_are_trained_once_a_study(tmp_path: Path) -> None:
    first = searcher(tmp_path, baseline=False)
    first.ask_for(1, controls=True)
    for name in "abcdef":
        first.suggest(name)
        complete(first, name)
    assert first.suggest("g") == FINISHED
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    second.ask_for(1, controls=True)
    second.suggest("h")
    complete(second, "h")
    assert second.suggest("i") == FINISHED


# --- lengths of the run, on which stops are searched as on the full one -----------------------------------------------


def train_cut(search: StudySearch, folder: Path) -> dict[str, Any]:
    """Train the cut dense run that the search asks for; its last row."""
    cut = search.suggest("cut")
    with SharedRun(TrialConfig(**cut["config"]), Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        last = finish(run)[-1]
    search.on_trial_complete("cut", last)
    return last


def best(saved: float) -> BestSetting:
    return BestSetting(trial=1, saved=saved, lost=0.0, is_within=True, config={})


@pytest.mark.parametrize(
    ("epochs", "lost", "wanted"),
    [(30, [0.0], [15]), (30, [0.01], [15]), (30, [0.0101, 0.01], [15, 18]), (30, [0.1] * 3, [15, 18, 24]),
     (5, [0.1] * 3, [2, 3, 4]), (3, [0.1] * 2, [1, 2]), (2, [0.1], [1]), (1, [], []), (30, [math.nan, 0.0], [15, 18])],
)  # fmt: skip
def test_half_a_run_is_trained_beside_the_baseline_and_longer_ones_while_they_lose_too_much(
    tmp_path: Path, epochs: int, lost: list[float], wanted: list[int]
) -> None:
    """More than the allowed loss of 0.01; one that failed, too."""
    made = searcher(tmp_path, baseline=False, lengths="auto", base=TrialConfig(method="none", epochs=epochs))
    made.suggest("baseline")
    found: list[int] = []
    while isinstance(one := made.suggest(str(len(found))), dict) and one["role"] == CUT:
        if not found:
            assert not isinstance(made.suggest("meanwhile"), dict)  # another length waits for both
            made.on_trial_complete("baseline", row(0.9, 0.0))
        found.append(one["config"]["epochs"])
        made.on_trial_complete(str(len(found) - 1), row(0.9 - lost[len(found) - 1], 0.0))
    assert found == wanted


@pytest.mark.parametrize(("loses", "wanted"), [(True, None), (False, 18)])
def test_no_run_is_tried_that_is_shorter_than_one_that_loses_too_much(
    tmp_path: Path, loses: bool, wanted: int | None
) -> None:
    """As in a study of before 2026-11-30, which tried 80 % behind half of the run."""
    made = searcher(tmp_path, lengths="0.5,0.8")
    for number, epochs in enumerate((24, 15)):
        assert made.suggest(str(number))["config"]["epochs"] == epochs
        made.on_trial_complete(str(number), row(0.8 if loses or epochs == 15 else 0.9, 0.0))
    follows = searcher(tmp_path, begin=False, lengths="auto").lengths.next()
    assert (None if follows is None else follows.values["epochs"]) == wanted


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("most", "follows"), [(15.0, True), (1.0, False)])
def test_a_longer_one_follows_where_half_a_run_is_refused_over_seeds(
    tmp_path: Path, most: float, follows: bool
) -> None:
    """On its own seed half of the run loses nothing; not where so much is executed that no other setting begins."""
    base = TrialConfig(method="none", epochs=30)
    made = searcher(tmp_path, baseline=False, lengths="auto", base=base, seeds=4, most_trainings=most)
    made.ask_for(2, controls=False, seeds=True)
    found: list[tuple[str, int]] = []
    while isinstance(one := made.suggest("a"), dict) and len(found) < 9:
        epochs = one["config"]["epochs"]
        found.append((one["role"], epochs))
        flops = {"dense_flops": 30, "executed_flops": epochs, "search_flops": epochs, "test_quality": None}
        loses = epochs < 30 and one["config"]["seed"] != 0
        quality = 0.9 + one["config"]["seed"] % 7 / 1000 - 0.1 * loses
        made.on_trial_complete("a", row(quality, 1 - epochs / 30) | flops)
    assert found[:2] == [("baseline", 30), (CUT, 15)]
    assert ("control", 15) in found
    assert ((CUT, 18) in found) == follows


@pytest.mark.parametrize(("lengths", "saved", "epochs", "role"), [
    ("auto", 0.35, 19, CUT), ("auto", 0.5, 15, CUT), ("auto", 0.55, 13, "control"), ("1.0,0.9", 0.55, 13, CUT),
])  # fmt: skip
def test_a_run_as_cheap_as_the_answer_is_none_itself_below_the_chosen_lengths(
    tmp_path: Path, lengths: str, saved: float, epochs: int, role: str
) -> None:
    chosen = searcher(tmp_path, lengths=lengths).lengths
    run = chosen.beside(best(saved))
    assert (run.values["epochs"], run.attrs["role"], run.attrs["control"]) == (epochs, role, SHORTER)


def test_a_cut_run_that_failed_is_no_run_of_equal_compute(tmp_path: Path) -> None:
    made = searcher(tmp_path, lengths="auto")
    for number, epochs in enumerate((15, 18)):
        cut = made.suggest(str(number))
        assert cut["config"]["epochs"] == epochs
        made.on_trial_complete(str(number), row(math.nan if epochs == 15 else 0.9, 0.0))
    run = made.lengths.beside(best(0.45))  # 18 epochs save 40 %
    assert run.values["epochs"] == 16


def test_shares_are_given_as_text() -> None:
    assert in_epochs(read_lengths("1.0, 0.8,0.6"), 30) == [24, 18]
    assert SearchOptions().searched_lengths == "auto"
    assert SearchOptions(controls=False).searched_lengths == ""
    assert SearchOptions(controls=False, lengths="0.5").searched_lengths == "0.5"
    assert SearchOptions(lengths="1.0").searched_lengths == ""
    for text in ("short", "0.5,", "1.5", "0", "-0.5", ""):
        with pytest.raises(UserError, match=r"--lengths must be auto or shares of the full run in \(0, 1\], such as"):
            SearchOptions(lengths=text)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_stops_are_searched_on_cut_runs_and_are_those_of_runs_trained_alone(tmp_path: Path) -> None:
    search = learning(tmp_path, lengths="1.0,0.5", allowed_drop=0.9)
    search.ask_for(14)
    suggested_once = []
    for number in range(40):
        suggested = search.suggest(str(number)) or search.suggest(str(number))
        if suggested == FINISHED:
            break
        with SharedRun(TrialConfig(**suggested["config"]), Sharing(tree=tmp_path / "tree", budget_bytes=10**9)) as run:
            last = finish(run)[-1]
        suggested_once.append((suggested, last))
        search.on_trial_complete(str(number), last)
    trials = [t for t in told(tmp_path) if "row" in t.user_attrs]
    (cut,) = [t for t in trials if t.user_attrs["role"] == CUT]
    assert (cut.user_attrs["control"], cut.user_attrs["of_epochs"]) == (SHORTER, 4)
    assert cut.user_attrs["config"]["epochs"] == 2
    assert cut.values[1] == 0.5  # of the full run's budget
    assert search.trials.finished_count() == len(trials) - 1  # it is none of those that were asked for
    shorter = [t for t in trials if t.user_attrs.get("of_epochs") and t.user_attrs["role"] != CUT]
    assert shorter
    for trial in shorter:
        config = TrialConfig.from_mapping(trial.user_attrs["config"])
        assert (config.epochs, trial.params["epochs"]) == (2, 2)
        assert config.CAC_VAR_START_ITR <= 16
        assert facts([trial.user_attrs["row"]]) == rows_alone(config)[-1:]
        assert trial.values[1] > 0.5
    # Each of them began with the cut run's training.
    spent = {suggested["trial"]: row["search_flops"] for suggested, row in suggested_once}
    assert sum(spent[t.number] for t in shorter) < sum(t.user_attrs["row"]["executed_flops"] for t in shorter)
    frame = analysis.load(tmp_path)
    assert sorted(frame["of_epochs"].dropna().unique()) == [4]
    assert (frame.loc[frame["of_epochs"].notna(), "compute_saved"] >= 0.5).all()
    found = analysis.search_cost(frame).dense_equivalents
    assert found == pytest.approx(frame["search_flops"].sum() / frame["dense_flops"].max())


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.thorough
def test_a_dense_run_is_cut_to_the_compute_of_the_best_setting(tmp_path: Path) -> None:
    search = learning(tmp_path, lengths="0.5")
    search.ask_for(2, controls=True)
    last = train_cut(search, tmp_path)
    first, second = search.suggest("first"), search.suggest("second")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    baseline = told(tmp_path)[0].user_attrs["row"]
    search.on_trial_complete("first", {**baseline, "compute_saved": 0.1, "quality": 0.0})
    half = {**last, "quality": baseline["quality"], "compute_saved": 0.2, "executed_flops": 400, "dense_flops": 500}
    trial = search._running["second"]
    trial.set_user_attr("config", {**trial.user_attrs["config"], "epochs": 2})
    search.on_trial_complete("second", {**half, "executed_flops": int(0.4 * baseline["dense_flops"])})
    beside = search.suggest("control")
    assert isinstance(beside, dict)
    assert (beside["config"]["method"], beside["config"]["epochs"]) == ("none", 1)  # saves 60 % or more
    search.on_trial_complete("control", {**last, "quality": 0.0})
    assert search.suggest("control") == FINISHED


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_setting_of_a_cut_run_goes_on_where_lengths_are_searched_no_more(tmp_path: Path) -> None:
    """It was killed, and the next search is one with ``--no-controls``, or in processes of their own."""
    search = learning(tmp_path, lengths="0.5")
    train_cut(search, tmp_path)
    search.suggest("published")
    search.study.enqueue_trial({"epochs": 2}, user_attrs={"role": "search", "epochs": 2, "of_epochs": 4})
    suggested = search.suggest("killed")
    assert suggested["config"]["epochs"] == 2
    for more in ({"lengths": ""}, {"lengths": "", "repeats": False}):
        again = learning(tmp_path, begin=False, **more)
        again.adopt_unfinished()
        configs = [again.suggest(f"again{number}")["config"] for number in range(5)]
        assert suggested["config"] in configs


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_choices_that_depend_on_the_length_leave_cut_runs_without_stops(tmp_path: Path) -> None:
    """Optuna allows no other choices of one parameter in one study."""

    def by_length(trial: Any, context: SpaceContext) -> dict[str, Any]:
        start = trial.suggest_categorical("start", (0, context.total_steps // 4))
        return {"CAC_VAR_START_ITR": start, "CAC_VAR_START_THR": trial.suggest_float("thr", 0.9, 1, step=0.01),
                "CAC_VAR_SAMPLES": 2}  # fmt: skip

    own = Space(name="own", method="gradskip", suggest=by_length, start=lambda context: {"start": 0, "thr": 0.95})
    search = learning(tmp_path, lengths="0.5", own=own)
    train_cut(search, tmp_path)
    with pytest.warns(UserWarning, match="no stops on cut runs: choices of the space depend on the run's length"):
        configs = [search.suggest(str(number)) for number in range(6)]
    assert {found["config"]["epochs"] for found in configs if isinstance(found, dict)} == {4}
