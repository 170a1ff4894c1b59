"""Search over outcomes on a recorded run that is really trained, and with Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import finish
from searchers import learning, told
from thorough import rest_thorough
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from analysis.io.study_files import Layout
from analysis.trace_replay.replay_frame import replay_one
from analysis.trace_replay.traces import RunTrace, read_trace
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.gradskip.variables import MEASURED_RULES
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun
from tune_cac import search
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning import outcomes as module
from tune_cac.tuning import quality_model
from tune_cac.tuning.outcomes import BegunOutcome, Outcome, OutcomeQueue, distinct_outcomes, predicted_again
from tune_cac.tuning.quality_model import are_new
from tune_cac.tuning.searcher import FINISHED, StudySearch
from tune_cac.tuning.trials import OUTCOME, PREDICTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny")]


def queue_of(made: StudySearch) -> OutcomeQueue:
    return made.outcomes


def train(folder: Path, suggested: dict[str, Any]) -> dict[str, Any]:
    with SharedRun(TrialConfig(**suggested["config"]), Sharing(tree=folder / "tree", budget_bytes=0)) as run:
        while not run.finished:
            last = run.train_epoch()
    return last


def trained_by(made: StudySearch, folder: Path, *, most: int = 40) -> list[dict[str, Any]]:
    """Rows of all settings until the search ends by itself."""
    rows = []
    for number in range(most):
        suggested = made.suggest(f"t{number}")
        if suggested is None:
            suggested = made.suggest(f"t{number}")
        if suggested == FINISHED:
            return rows
        rows.append(train(folder, suggested))
        made.on_trial_complete(f"t{number}", rows[-1])
    raise AssertionError(f"not ended after {most} trials")


@pytest.mark.thorough
def test_no_outcome_is_trained_twice_and_the_search_ends_by_itself(tmp_path: Path) -> None:
    made = learning(tmp_path)
    rows = trained_by(made, tmp_path)
    assert queue_of(made).ended
    stops = [row["stop_events"] for row in rows]
    assert len(rows) >= 2
    assert len(set(stops)) == len(stops)
    assert all(json.loads(events) for events in stops[1:])  # the first is the starting point, whatever it does
    # A resumed search knows that nothing is left.
    again = learning(tmp_path, begin=False)
    again.adopt_unfinished()
    assert again.suggest("more") is None
    assert again.suggest("more") == FINISHED


@pytest.mark.thorough
def test_once_what_saves_most_has_lost_nothing_nothing_else_is_trained(tmp_path: Path) -> None:
    """However few outcomes were tried: what is left would be trained for nothing."""
    made = learning(tmp_path)
    assert queue_of(made).predicts
    assert all(one.saved > 0 for one in queue_of(made)._drawn(4, made.learn()))
    for number in range(2):  # the starting point, and an outcome
        suggested = made.suggest(f"t{number}")
        row = train(tmp_path, suggested)
        if number:
            row |= {"quality": 1.0, "executed_flops": row["dense_flops"] // 20, "compute_saved": 0.95}
        made.on_trial_complete(f"t{number}", row)
    assert made.suggest("more") is None
    assert made.suggest("more") == FINISHED


@pytest.mark.thorough
def test_without_a_tree_no_setting_is_trained_twice_though_it_stops_otherwise_than_predicted(tmp_path: Path) -> None:
    made = learning(tmp_path, sharing=False, allowed_drop=0.1)
    configs, otherwise = [], 0
    for number in range(16):
        suggested = made.suggest(f"t{number}") or made.suggest(f"t{number}")
        if suggested == FINISHED:
            break
        with TrainingRun(TrialConfig(**suggested["config"])) as run:
            last = finish(run)[-1]
        made.on_trial_complete(f"t{number}", last)
        configs.append(suggested["config"])
        stops = [[event["iteration"], event["layer"]] for event in json.loads(last["stop_events"])]
        expected = told(tmp_path)[suggested["trial"]].user_attrs.get(OUTCOME)
        otherwise += expected is not None and json.loads(expected)[0] != stops
    else:
        raise AssertionError("it did not end by itself")
    assert otherwise
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == len(configs)


@pytest.mark.thorough
def test_the_cost_of_a_training_is_what_follows_the_steps_that_others_trained(tmp_path: Path) -> None:
    made = learning(tmp_path)
    outcomes, _ = distinct_outcomes(made.learn(), made.learn().drawn(0, 300))
    assert queue_of(made).predicts
    chosen = outcomes[:: len(outcomes) // 8]
    found = queue_of(made)._costs(chosen, [])  # nothing but the dense run was trained
    dense = outcomes[0].config | {"method": "none"}
    full = flops_by_step(TrialConfig.from_mapping(dense))
    exact = 0
    for one, cost in zip(chosen, found, strict=True):
        alone = flops_by_step(TrialConfig.from_mapping(one.config))
        stops = first_stop_of(one.config)
        if stops != one.stops[0]:
            continue
        executed = (alone[-1] - alone[stops[0]]) / full[-1]
        if 1 - alone[-1] / full[-1] == pytest.approx(one.saved):  # what follows the first stop was as predicted
            assert cost == pytest.approx(max(0.05, executed), abs=1 / len(full))  # a step, for one has fewer samples
            exact += 1
    assert exact > 2


def flops_by_step(config: TrialConfig) -> list[int]:
    """FLOPs executed before step 0, 1, ... of the run alone, and at its end."""
    found = [0]
    with TrainingRun(config) as run:
        while not run.finished:
            run.begin_epoch()
            while not run.epoch_is_trained:
                run.train_step()
                found.append(run.executed_flops)
            run.end_epoch()
    return found


def first_stop_of(config: Mapping[str, Any]) -> tuple[int, int]:
    with TrainingRun(TrialConfig.from_mapping(config)) as run:
        event = json.loads(finish(run)[-1]["stop_events"])[0]
    return event["iteration"], event["layer"]


@pytest.mark.thorough
def test_what_is_expected_is_read_from_the_tree_once_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = learning(tmp_path, seeds=4)
    for number in range(4):
        suggested = made.suggest(str(number))
        if number == 2:
            made.tell_failure("2", "ValueError: of the user's")
        else:
            made.on_trial_complete(str(number), train(tmp_path, suggested))
    beyond = queue_of(made).beyond()
    assert beyond
    monkeypatch.setattr(module, "read_trace", lambda store: pytest.fail("read again"))
    assert queue_of(made).beyond() == beyond
    made.best()


def identity_of(trace: RunTrace, config: Mapping[str, Any]) -> str:
    """What a setting does, replayed step by step."""
    events = json.loads(f"[{replay_one(trace, TrialConfig.from_mapping(config)).events[0]}]")
    braking = config.get("CAC_BRAKING_DISTANCE") or 0
    return json.dumps([[[event["iteration"], event["layer"]] for event in events], [braking if events else 0]])


@pytest.mark.thorough
def test_recorded_branches_part_settings_that_the_dense_run_takes_for_one_outcome(tmp_path: Path) -> None:
    fixed = {"CAC_VAR_START_THR": 0.99, "CAC_VAR_START_ITR": 2, "CAC_VAR_SAMPLES": 1}
    start = {"CAC_VAR_MT_THR": 0.96, "CAC_VAR_SLOPE_THR": 0.98, "CAC_VAR_MT_COUNT_THR": 5}

    def suggest(trial: Any, context: SpaceContext) -> dict[str, Any]:
        later = {name: trial.suggest_float(name, 0.9, 1.0) for name in ("CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR")}
        return {**fixed, **later, "CAC_VAR_MT_COUNT_THR": trial.suggest_int("CAC_VAR_MT_COUNT_THR", 0, 10)}

    made = learning(
        tmp_path, own=Space(name="own", method="gradskip", suggest=suggest, start=lambda context: start)
    )  # the first layer stops at the same step under all of them
    trained_by(made, tmp_path)
    known = made.learn()
    grown = read_trace(StageStore(tmp_path / "tree", known.trace.root))
    drawn = known.drawn(0, 300)
    groups, _ = distinct_outcomes(known, drawn)
    found = predicted_again(groups, grown)
    alone = [identity_of(grown, group.config) for group in groups]
    assert len({identity_of(grown, config) for group in groups for _, config in group.group}) > len(set(alone))

    identities = [one.identity for one in found]
    assert len(set(identities)) == len(identities)
    assert set(identities) == {identity_of(grown, config) for group in groups for _, config in group.group}
    for one in found:
        assert one.identity == identity_of(grown, one.config)
        assert (one.parameters, one.config) in one.group
        (row,) = analysis.replay(grown, TrialConfig.from_mapping(one.config)).to_dict("records")
        assert (one.saved, one.known) == (pytest.approx(row["compute_saved"]), row["exact"])


@pytest.mark.thorough
def test_the_answer_is_expected_to_lose_no_more_than_allowed_over_seeds_in_a_resumed_search_too(tmp_path: Path) -> None:
    """On a further seed all runs are 10 points worse, which says nothing, and the answer 5 more."""
    made = learning(tmp_path, allowed_drop=0.016, seeds=3)
    trained_by(made, tmp_path)
    rows = {t.number: t.user_attrs["row"] for t in told(tmp_path) if "row" in t.user_attrs}
    saved, before = {number: row["compute_saved"] for number, row in rows.items()}, queue_of(made).beyond()
    first = max(saved.keys() - set(before), key=lambda number: saved[number])
    assert made.best().trial == first
    on_one = learning(tmp_path, begin=False, allowed_drop=0.016).best()
    assert on_one.is_within
    assert on_one.saved > saved[first]
    made.ask_for(0, seeds=True)
    for number, lost in ((0, 0.0), (first, 0.05)):
        assert queue_of(made).beyond() == before
        trial = made.suggest("a")["trial"]
        assert told(tmp_path)[trial].user_attrs["candidate"] == number
        made.on_trial_complete("a", rows[number] | {"quality": rows[number]["quality"] - 0.1 - lost})
    again = learning(tmp_path, begin=False, allowed_drop=0.016, seeds=3)
    beyond = queue_of(again).beyond()
    assert first in beyond
    assert again.best().saved == max(saved[number] for number in saved.keys() - set(beyond))


@pytest.mark.thorough
def test_what_saves_hardly_less_than_a_refused_setting_is_no_answer_to_beat(tmp_path: Path) -> None:
    """Else nothing that saves less were worth its training once all that save so much are refused."""
    made = learning(tmp_path, seeds=4)
    made.learn()
    queue = queue_of(made)

    def outcome(share: float, saved: float, *, frozen: float) -> Any:
        own = {"share": share, "saved": saved, "frozen": frozen, "stops": ((24, 2),) if frozen else ()}
        return Outcome(
            parameters={}, config={}, epochs=round(4 * share), identity=f"{saved}", known=False, group=(), **own
        )

    halves = [(2, 0.5, 0.0), (3, 0.6, 0.2), (4, 0.59, 0.18), (5, 0.58, 0.16), (6, 0.57, 0.14), (7, 0.563, 0.13)]
    tried = [
        BegunOutcome(trial=n, loss=0.0, **{k: v for k, v in vars(outcome(0.5, saved, frozen=frozen)).items()
                                           if k in ("epochs", "stops", "saved", "frozen", "identity", "config")})
        for n, saved, frozen in halves
    ]  # fmt: skip
    left, baseline = [outcome(0.75, 0.4, frozen=0.2)], made.trials.baseline_row() or {}
    queue._refused = lambda: [3]
    assert queue._chosen(left, tried, baseline) is None  # .57 may still be the answer
    queue._refused = lambda: [2, 3, 4, 5, 6]
    assert queue._chosen(left, tried, baseline) == left[0]  # .563 is not tried behind .57
    assert queue._chosen([outcome(0.75, 0.495, frozen=0.4)], tried, baseline) is None  # nor .495 behind .5


@pytest.mark.thorough
def test_what_runs_or_failed_is_not_suggested_again(tmp_path: Path) -> None:
    made = learning(tmp_path)
    for number in range(4):
        assert isinstance(made.suggest(str(number)), dict)
    made.tell_failure("1", "ValueError: of the user's")
    made.tell_failure("2", "ValueError: of the user's")
    assert isinstance(made.suggest("more"), dict)
    begun = [json.dumps(t.user_attrs[OUTCOME]) for t in told(tmp_path) if OUTCOME in t.user_attrs]
    assert len(begun) >= 3
    assert len(set(begun)) == len(begun)
    again = learning(tmp_path, begin=False)  # a failed trial ends no search
    again.adopt_unfinished()
    assert isinstance(again.suggest("after"), dict)


@pytest.mark.thorough
def test_an_interrupted_outcome_is_begun_again_as_the_same_one(tmp_path: Path) -> None:
    made = learning(tmp_path)
    made.suggest("published")
    first = made.suggest("first")
    outcome = told(tmp_path)[first["trial"]].user_attrs[OUTCOME]
    again = learning(tmp_path, begin=False)  # the first search was killed
    again.adopt_unfinished()
    configs, attrs = [], []
    for number in range(3):
        suggested = again.suggest(str(number))
        configs.append(suggested["config"])
        attrs.append(told(tmp_path)[suggested["trial"]].user_attrs)
    assert first["config"] in configs[:2]
    assert [a.get(OUTCOME) for a in attrs].count(outcome) == 1  # and no other trial has it


@pytest.mark.parametrize(
    ("space", "hold"),
    rest_thorough(
        [
            ("auto_thresholds", {"forward_cache_mb": 1}),
            ("auto_thresholds", {"CAC_PREFIX_AUTOGRAD": False}),
            ("auto_thresholds", {"CAC_NORM_STATISTICS": "hold_all"}),
            ("agp", None),
        ],
        of_several=True,
    ),
)
def test_what_replay_cannot_know_of_a_space_leaves_it_to_the_sampler(
    tmp_path: Path, space: str, hold: dict[str, Any] | None
) -> None:
    made = learning(tmp_path, space=space, hold=hold)
    assert not queue_of(made).predicts


@pytest.mark.thorough
def test_explicit_stops_save_what_they_save_whether_norms_hold_or_not(tmp_path: Path) -> None:
    """None is known before it is trained, and what is trained saves as predicted."""
    made = learning(tmp_path, space="manual_layers", hold={"CAC_NORM_STATISTICS": "hold_all"})
    assert queue_of(made).predicts
    outcomes, _ = distinct_outcomes(made.learn(), made.learn().drawn(3, 100))
    assert not any(one.known for one in outcomes)
    made.suggest("published")
    suggested = made.suggest("first")
    assert suggested["config"]["CAC_NORM_STATISTICS"] == "hold_all"
    saved = told(tmp_path)[suggested["trial"]].user_attrs[PREDICTED]
    assert train(tmp_path, suggested)["compute_saved"] == pytest.approx(saved)


@pytest.mark.thorough
def test_rules_that_measure_get_their_share_of_the_trials(tmp_path: Path) -> None:
    made = learning(tmp_path, space="stop_rules")
    rules = []
    for number in range(12):
        suggested = made.suggest(str(number))
        if not isinstance(suggested, dict):
            break
        rules.append(suggested["config"].get("CAC_RULE", "variance"))
    measured = [rule for rule in rules[1:] if rule in MEASURED_RULES]
    assert 0.2 * len(rules) <= len(measured) <= 0.7 * len(rules), rules


def test_settings_of_one_region_train_alike(tmp_path: Path) -> None:
    """Each drawn setting, replayed on its own step by step, has the stops and savings of exactly one outcome."""
    known = learning(tmp_path).learn()
    outcomes, unpredicted = distinct_outcomes(known, known.drawn(3, 300))
    assert not unpredicted
    assert 300 > len(outcomes) > 1
    assert [one.saved for one in outcomes] == sorted(one.saved for one in outcomes)
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for parameters, values in known.drawn(3, 300):
        config = TrialConfig.from_mapping(values)
        found = replay_one(analysis.load_trace(tmp_path).dense_only(), config)
        events = json.loads(f"[{found.events[0]}]")
        if not events:
            continue
        key = (tuple((event["iteration"], event["layer"]) for event in events), config.CAC_BRAKING_DISTANCE)
        groups.setdefault(key, []).append(parameters)
    assert len(groups) == len(outcomes)
    for one in outcomes:
        assert one.parameters in groups[one.stops, one.config["CAC_BRAKING_DISTANCE"]]


@pytest.mark.thorough
def test_a_search_by_outcome_on_ray_ends_early_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"epochs": 6, "results": tmp_path, "name": "s", "allowed_drop": 0.02, "concurrency": 1}
    found = search(**options, trials=30, controls=False)
    told = capsys.readouterr().err
    ended = found.trials[found.trials["status"] == "completed"]
    assert len(ended) < 30
    assert f"ended after {len(ended)} trials" in told
    assert not ended.iloc[2:].duplicated(["stop_events", "CAC_BRAKING_DISTANCE"]).any()
    info = Layout(tmp_path / "s").read_info()
    assert info.trials == len(ended)
    assert not found.interrupted
    kept = found.ranking.loc[found.ranking["within_drop"]]
    assert found.best["trial"] == kept.iloc[0]["trial"]
    seeded = search(**options, trials=1, controls=False, seeds=2)
    again = Layout(tmp_path / "s").read_info()
    assert (SearchOptions.of_study(info).seeds, SearchOptions.of_study(again).seeds) == (1, 2)
    further = seeded.trials.loc[seeded.trials["control"] == "other seed", ["candidate", "seed"]]
    assert further.to_numpy().tolist() == [[0, 1001], [found.best["trial"], 1001]]


@pytest.mark.thorough
def test_of_outcomes_that_cannot_be_told_apart_one_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 32 steps, so a difference of 3 of them is below what is then told apart."""
    monkeypatch.setattr(quality_model, "ALIKE", 3.5 / 32)
    monkeypatch.setattr(quality_model, "ALIKE_SAVED", 0.06)
    monkeypatch.setattr(module, "WORTHWHILE", 0.06)
    made = learning(tmp_path)
    trained_by(made, tmp_path)
    begun = queue_of(made)._begun_outcomes(made.trials.baseline_row() or {}, {})
    tried = queue_of(made)._features(begun)
    backward = begun[-1].saved / begun[-1].frozen  # share in the FLOPs, the same for all runs of this length
    chosen = {t.number: t.user_attrs for t in told(tmp_path) if OUTCOME in t.user_attrs}
    assert len(chosen) > 2
    for trial, attrs in chosen.items():  # as predicted when it was begun, and what had been trained by then
        predicted = [attrs[PREDICTED] / backward, 1.0, json.loads(attrs[OUTCOME])[0][0][0] / 32]
        before = [row for row, one in zip(tried, begun, strict=True) if one.trial < trial]
        assert are_new(np.array([predicted]), np.array(before)).all()
