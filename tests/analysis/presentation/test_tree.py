"""The stage tree as a frame, as text and as a plot, against trees written by hand and counted step by step."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import HandTree, result_row, write_study

from analysis.presentation.figures.figure import Bars, Figure, Points
from analysis.presentation.figures.stage_tree import MOST_LANES, stage_tree
from analysis.presentation.stage_frame import action_words, stage_frame, tree_text
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.replay import Blueprint, GradskipReplay, LayerPlan, Unit, stop_action
from trainables.interventions import Intervention, child_id
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore

NAMES = ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc.weight")
TOTAL = 40
ROOT = "0" * 24

#: A trial's interventions: ascending iterations, of each one of few actions, so that trials have much in common.
paths = st.lists(st.tuples(st.integers(0, TOTAL - 2), st.integers(0, 1)), max_size=4).map(
    lambda pairs: tuple(sorted(dict(pairs).items()))
)


def stop(iteration: int, through: int, braking: int = 0) -> Intervention:
    blueprint = Blueprint(
        plan=LayerPlan(order=(0, 1, 2, 3, 4), units=(Unit(number=0, watched=(0,), end=0),)),
        stoppable=1, names=NAMES, single_precision=True,
    )  # fmt: skip
    return Intervention(iteration=iteration, action=stop_action(TrialConfig(), blueprint, through, braking))


def acts(path: tuple[tuple[int, int], ...]) -> list[Intervention]:
    """A path as interventions: each stops further than the one before."""
    return [stop(iteration, min(place, 3), braking=6 * kind) for place, (iteration, kind) in enumerate(path)]


def saved(path: tuple[tuple[int, int], ...]) -> float:
    return sum(TOTAL - iteration for iteration, _ in path) / (5 * TOTAL)


def a_study(
    folder: Path, trials: list[tuple[tuple[int, int], ...]], names: tuple[str, ...] = NAMES, total: int = TOTAL
) -> pd.DataFrame:
    """The stage frame of a study whose trials acted so; trial 0 is the first of them."""
    tree = HandTree(folder / "tree", root=ROOT, total_steps=total, layer_names=names)
    rows = []
    for path in trials:
        row = result_row(0.9 + saved(path) / 50, saved(path))
        rows.append(row | {"stage": tree.train(acts(path), row)})
    write_study(folder, [{"row": row} for row in rows])
    return stage_frame(folder)


def prefixes(path: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
    return [path[:n] for n in range(len(path) + 1)]


def stage_id(path: tuple[tuple[int, int], ...]) -> str:
    stage = ROOT
    for intervention in acts(path):
        stage = child_id(stage, intervention)
    return stage


@pytest.mark.slow
@given(st.lists(paths, min_size=1, max_size=12))
@settings(max_examples=12)
def test_every_stage_once_with_those_that_went_through_it(trials: list[tuple[tuple[int, int], ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = a_study(Path(folder) / "s", trials).set_index("stage", drop=False)
    wanted = {stage_id(prefix): prefix for path in trials for prefix in prefixes(path)}
    assert sorted(frame.index) == sorted(wanted)
    for stage, prefix in wanted.items():
        row = frame.loc[stage]
        assert row["trials"] == tuple(n for n, path in enumerate(trials) if path[: len(prefix)] == prefix)
        assert row["ends"] == tuple(n for n, path in enumerate(trials) if path == prefix)
        assert row["depth"] == len(prefix)
        assert (pd.isna(row["begin"]) and not prefix) or row["begin"] == prefix[-1][0]
        assert row["start"] == (prefix[-1][0] + 1 if prefix else 0)
        if row["ends"]:
            assert row["known_until"] == TOTAL
            assert row["compute_saved"] == pytest.approx(saved(prefix))
            assert row["accuracy"] == pytest.approx(0.9 + saved(prefix) / 50)
        else:
            assert row[["accuracy", "compute_saved"]].isna().all()
        if prefix:
            assert row["parent"] == stage_id(prefix[:-1])


def test_parents_come_first_and_stages_that_leave_one_by_iteration(tmp_path: Path) -> None:
    frame = a_study(tmp_path / "s", [(), ((20, 0),), ((5, 0),), ((5, 0), (9, 1)), ((5, 0), (7, 0))])
    assert frame["begin"].tolist() == [pd.NA, 5, 7, 9, 20]
    assert frame["depth"].tolist() == [0, 1, 2, 2, 1]
    assert frame.attrs["total_steps"] == TOTAL


def test_what_is_corrupt_is_left_out(tmp_path: Path) -> None:
    trials = [(), ((5, 0),), ((5, 0), (9, 0)), ((20, 0),)]
    a_study(tmp_path / "s", trials)
    stages = tmp_path / "s" / "tree" / ROOT / "stages"
    (stages / stage_id(((5, 0),)) / "stage.json").write_bytes(b"torn")
    (chunk,) = (stages / stage_id(((20, 0),))).glob("*.chunk")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    frame = stage_frame(tmp_path / "s")
    assert frame["begin"].tolist() == [pd.NA, 20]
    assert frame["known_until"].tolist() == [TOTAL, 21]
    assert frame["accuracy"].isna().tolist() == [False, True]
    assert frame["trials"].tolist() == [(0, 3), (3,)]


def test_a_study_without_a_tree_has_no_stages(tmp_path: Path) -> None:
    write_study(tmp_path / "s", [{"row": result_row()}])
    frame = stage_frame(tmp_path / "s")
    assert len(frame) == 0
    assert {"stage", "trials", "compute_saved"} <= set(frame.columns)
    assert tree_text(frame) == ""
    with pytest.raises(UserError, match="no study in"):
        stage_frame(tmp_path / "nothing")


def test_several_roots_are_several_trees(tmp_path: Path) -> None:
    other = HandTree(tmp_path / "s" / "tree", root="1" * 24, total_steps=TOTAL, layer_names=NAMES)
    other.train([], result_row())
    frame = a_study(tmp_path / "s", [(), ((5, 0),)])
    assert frame["root"].tolist() == [ROOT, ROOT, "1" * 24]
    assert frame["depth"].tolist() == [0, 1, 0]
    lines = tree_text(frame).splitlines()
    assert lines[0].startswith("dense run 00000000, 0..40, 2 trials")
    assert lines[2] == "dense run 11111111, 0..40, 0 trials, accuracy 0.9700"
    assert drawn(frame) == Counter(frame["stage"])


@pytest.mark.parametrize(("saving", "saved"), [("sparse-inference", 0.6), ("both", 0.3), ("both-sparse", 0.4)])
def test_stages_save_what_the_study_ranks_by(saving: str, saved: float, tmp_path: Path) -> None:
    row = result_row(0.9, 0.2, inference_saved=0.4, sparse_inference_saved=0.6)
    tree = HandTree(tmp_path / "s" / "tree", root=ROOT, total_steps=TOTAL, layer_names=NAMES)
    config = TrialConfig(method="compression", saving=saving).to_dict()
    write_study(tmp_path / "s", [{"row": row | {"stage": tree.train([], row)}, "config": config}])
    assert stage_frame(tmp_path / "s")["saved"].tolist() == [pytest.approx(saved)]


def test_a_root_whose_norms_hold_says_so(tmp_path: Path) -> None:
    other = HandTree(tmp_path / "s" / "tree", root="1" * 24, total_steps=TOTAL, layer_names=NAMES)
    facts = other.store.read("root.json")
    other.store.write("root.json", {**facts, "norm_statistics": "hold_all"})
    other.train([], result_row())
    frame = a_study(tmp_path / "s", [()])
    assert frame["action"].tolist() == ["dense run", "dense run, norm statistics hold_all"]


# --- words ----------------------------------------------------------------------------------------------------------


def test_actions_in_words() -> None:
    assert action_words(stop(5, 2, 6).action, NAMES) == "stop through conv2.weight, braking 6"
    assert action_words(stop(5, 2).action, ()) == "stop through parameter 2"
    assert action_words(
        '{"stop":[0],"norm_statistics":"hold","prefix_autograd":false,"forward_cache_mb":50}', NAMES
    ) == ("stop through conv1.weight, norm statistics hold, prefix autograd off, forward cache 50 MB")
    assert action_words('{"stop":[0],"prefix_mode":"eval"}', NAMES) == "stop through conv1.weight, prefix in eval mode"
    # In another order than the numbering's, the highest number is not the last to stop.
    before = '{"braking":0,"order":"ab","stop":[0,3]}'
    assert action_words('{"braking":6,"order":"ab","stop":[0,2,3]}', NAMES, before=before) == (
        "stop conv2.weight, braking 6"
    )
    assert action_words('{"order":"ab","stop":[0,1,2,3]}', NAMES) == "stop conv1.weight, conv1.bias and 2 more"
    assert action_words('{"prune":0.5,"layers":[1,2]}', NAMES) == "prune 0.5, layers 1,2"
    assert action_words("anything", NAMES) == "anything"


def test_freezeout_in_words() -> None:
    config = TrialConfig(
        CAC_RULE="freezeout", CAC_RULE_START_ITR=20, CAC_RULE_END_ITR=300, CAC_RULE_CUBIC=True, CAC_WATCH=("linear",)
    )
    blueprint = Blueprint(
        plan=LayerPlan(order=(0, 1), units=(Unit(number=0, watched=(0,), end=0),)),
        stoppable=1, names=None, single_precision=True,
    )  # fmt: skip
    acted = GradskipReplay(config, blueprint).advance(StageStore(Path("none"), ROOT).first(), 1)
    assert acted is not None
    assert action_words(acted.action, NAMES) == "freezeout 20..300, cubic on, watch linear"


def test_the_tree_as_text(tmp_path: Path) -> None:
    frame = a_study(tmp_path / "s", [(), ((5, 1),), ((5, 1),), ((20, 0),), ((5, 1), (9, 0)), (), ((5, 1), (12, 0))])
    assert tree_text(frame).splitlines() == [
        "dense run, 0..40, 7 trials, accuracy 0.9000 (trials 0, 5)",
        "├─ 5: stop through conv1.weight, braking 6, ..40, 4 trials, accuracy 0.9035, saved 17.5 % (trials 1, 2)",
        "│  ├─ 9: stop through conv1.bias, ..40, 1 trial, accuracy 0.9066, saved 33.0 % (trial 4)",
        "│  └─ 12: stop through conv1.bias, ..40, 1 trial, accuracy 0.9063, saved 31.5 % (trial 6)",
        "└─ 20: stop through conv1.weight, ..40, 1 trial, accuracy 0.9020, saved 10.0 % (trial 3)",
    ]
    assert tree_text(frame, depth=1).splitlines()[2:] == [
        "│  └─ ... 2 more stages, 2 trials",
        "└─ 20: stop through conv1.weight, ..40, 1 trial, accuracy 0.9020, saved 10.0 % (trial 3)",
    ]
    assert tree_text(frame, depth=0).splitlines()[1:] == ["└─ ... 4 more stages, 5 trials"]
    assert tree_text(frame, top=2).splitlines()[2:] == [
        "│  └─ ... 2 more stages, 2 trials",
        "└─ ... 1 more stage, 1 trial",
    ]


# --- the plot -------------------------------------------------------------------------------------------------------


def plot(frame: pd.DataFrame) -> Figure:
    found = stage_tree(frame)
    assert found is not None
    return found


def drawn(frame: pd.DataFrame) -> Counter[str]:
    """The drawn stages: those whose iterations and words a bar has."""
    bars = plot(frame).traces[0]
    assert isinstance(bars, Bars)
    begins = frame["begin"].fillna(0)
    ends = zip(begins, frame["known_until"], frame["stage"], frame["action"], strict=True)
    left = Counter(zip(bars.begins, bars.lengths, [text.split(", to ")[0] for text in bars.labels], strict=True))
    found: Counter[str] = Counter()
    for begin, end, stage, action in ends:
        key = next((k for k in left if k[:2] == (begin, end - begin) and action in k[2] and left[k]), None)
        if key is not None:
            left[key] -= 1
            found[stage] += 1
    return found


@pytest.mark.thorough
@pytest.mark.slow
@given(st.lists(paths, min_size=1, max_size=12))
@settings(max_examples=12)
def test_the_plot_has_every_stage_once_and_no_joint_crosses_a_bar(trials: list[tuple[tuple[int, int], ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = a_study(Path(folder) / "s", trials)
    assert drawn(frame) == Counter(frame["stage"])
    bars, joints = plot(frame).traces[:2]
    assert isinstance(bars, Bars)
    assert isinstance(joints, Points)
    spans = list(zip(bars.rows, bars.begins, bars.lengths, strict=True))
    assert [lane for lane, _, _ in spans] == list(range(len(frame)))
    for at, upper, lower in zip(joints.x[::3], joints.y[::3], joints.y[1::3], strict=True):
        assert upper < lower
        assert all(not (upper < lane < lower and begin < at < begin + length) for lane, begin, length in spans)


def test_a_large_tree_is_folded_and_checkpoints_are_ticks(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "s" / "tree", budget_bytes=10**6)
    for step in (0, 10, 20):
        checkpoints.put(ROOT, step, b"%d" % step)
    frame = a_study(tmp_path / "s", [(), *(((n % 90, 0),) for n in range(95))], total=400)
    found = plot(frame)
    bars, _, ticks = found.traces
    assert isinstance(bars, Bars)
    assert isinstance(ticks, Points)
    assert len(bars.lengths) == MOST_LANES
    assert f"{91 - MOST_LANES} more stages not shown." in found.notes
    assert ticks.x == [0, 10, 20]


def test_what_a_schedule_begins_is_said_by_the_instances() -> None:
    acts = [
        {"place": 0, "policy": {"pruner": {"instance_name": "gradual"}, "epochs": [3]}, "component": {"class": "X"}},
        {"place": 1, "policy": {"starting_epoch": 3, "distiller": {"instance_name": "teacher"}}, "component": {}},
        {"place": 2, "policy": {"pruner": {"instance_name": "gradual"}, "epochs": [5]}, "component": {"class": "X"}},
    ]
    assert action_words(json.dumps({"compression": acts[:1]}), NAMES) == "gradual begins"
    assert action_words(json.dumps({"compression": ["learning rates", *acts]}), NAMES) == (
        "learning rates, gradual, teacher begin"
    )
    together = {**json.loads(stop(3, 2, 6).action), "compression": acts[:1]}
    assert action_words(json.dumps(together), NAMES) == "gradual begins, stop through conv2.weight, braking 6"
