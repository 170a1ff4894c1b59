"""The stage tree as a frame, as text and as a picture, against trees written by hand and counted step by step."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import HandTree, result_row, write_study

from analysis.presentation.tree_picture import MOST_LANES, action_words, stage_frame, tree_svg, tree_text
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.replay import Blueprint, GradskipReplay, LayerPlan, Unit, stop_action
from trainables.interventions import Intervention, child_id
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore

NAMES = ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc.weight")
TOTAL = 40
ROOT = "0" * 24
SVG = "{http://www.w3.org/2000/svg}"

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
@settings(max_examples=25)
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


@pytest.mark.slow
@given(st.lists(paths, min_size=1, max_size=12))
@settings(max_examples=25)
def test_shared_steps_are_those_that_nobody_trained_again(trials: list[tuple[tuple[int, int], ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = a_study(Path(folder) / "s", trials)
    # A step is the same where what was done up to it is the same.
    steps = {
        (tuple(act for act in path if act[0] <= step), step) for path in trials for step in range(TOTAL)
    }  # fmt: skip
    assert frame["steps_shared"].sum() == len(trials) * TOTAL - len(steps)


def test_parents_come_first_and_stages_that_leave_one_by_iteration(tmp_path: Path) -> None:
    frame = a_study(tmp_path / "s", [(), ((20, 0),), ((5, 0),), ((5, 0), (9, 1)), ((5, 0), (7, 0))])
    assert frame["begin"].tolist() == [pd.NA, 5, 7, 9, 20]
    assert frame["depth"].tolist() == [0, 1, 2, 2, 1]
    assert frame.attrs["total_steps"] == TOTAL


def test_checkpoints_are_counted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "s" / "tree", budget_bytes=10**6)
    checkpoints.put(ROOT, 0, b"abc")
    checkpoints.put(ROOT, 30, b"abcde", kind="plasticity-0-5")
    checkpoints.put(stage_id(((5, 0),)), 6, b"abc")
    frame = a_study(tmp_path / "s", [(), ((5, 0),)])
    assert frame["checkpoints"].tolist() == [2, 1]
    assert frame["checkpoint_bytes"].tolist() == [8, 3]
    assert frame["checkpoint_steps"].tolist() == [(0, 30), (6,)]


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
    assert len(bars(tree_svg(frame, TOTAL))) == 3


# --- words ----------------------------------------------------------------------------------------------------------


def test_actions_in_words() -> None:
    assert action_words(stop(5, 2, 6).action, NAMES) == "stop through conv2.weight, braking 6"
    assert action_words(stop(5, 2).action, ()) == "stop through parameter 2"
    assert action_words(
        '{"stop":[0],"norm_statistics":"hold","prefix_autograd":false,"forward_cache_mb":50}', NAMES
    ) == ("stop through conv1.weight, norm statistics hold, prefix autograd off, forward cache 50 MB")
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


@pytest.mark.slow
@given(st.lists(paths, min_size=1, max_size=12), st.integers(0, 4), st.integers(1, 12))
@settings(max_examples=30)
def test_text_shows_or_counts_every_stage_once(trials: list[tuple[tuple[int, int], ...]], depth: int, top: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = a_study(Path(folder) / "s", trials)
    lines = tree_text(frame, depth=depth, top=top).splitlines()
    folded = [int(found[1]) for line in lines if (found := re.search(r"\.\.\. (\d+) more stage", line))]
    shown = len(lines) - len(folded)
    assert shown <= top
    assert shown + sum(folded) == len(frame)


# --- the picture ----------------------------------------------------------------------------------------------------


def bars(svg: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == "stage"]


def box(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, right, top, bottom."""
    x, y, width, height = (float(str(rect.get(name))) for name in ("x", "y", "width", "height"))
    return x, x + width, y, y + height


@pytest.mark.slow
@given(st.lists(paths, min_size=1, max_size=12))
@settings(max_examples=25)
def test_the_picture_has_every_stage_once_and_nothing_overlaps(trials: list[tuple[tuple[int, int], ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = a_study(Path(folder) / "s", [(), *trials])  # the first bar is a whole run
    svg = tree_svg(frame, TOTAL)
    found = bars(svg)
    assert Counter(rect.get("data-stage") for rect in found) == Counter(frame["stage"])
    boxes = [box(rect) for rect in found]
    for place, (left, right, top, bottom) in enumerate(boxes):
        for other in boxes[:place]:
            assert right <= other[0] or left >= other[1] or bottom <= other[2] or top >= other[3]
    # A bar is as long as its stage.
    unit = (boxes[0][1] - boxes[0][0]) / TOTAL
    rows = frame.set_index("stage")
    for rect, (left, right, _, _) in zip(found, boxes, strict=True):
        row = rows.loc[str(rect.get("data-stage"))]
        begin = 0 if pd.isna(row["begin"]) else row["begin"]
        assert left - boxes[0][0] == pytest.approx(begin * unit, abs=0.02)
        assert right - left == pytest.approx((row["known_until"] - begin) * unit, abs=0.02)
    assert_no_line_crosses_a_bar(svg, boxes)
    assert_texts_apart(svg)


def assert_no_line_crosses_a_bar(svg: str, boxes: list[tuple[float, float, float, float]]) -> None:
    lines = [line for line in ElementTree.fromstring(svg).iter(f"{SVG}path") if line.get("class") == "connector"]
    assert len(lines) == len(boxes) - 1
    for line in lines:
        found = re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)", str(line.get("d")))
        assert found is not None
        x, upper, lower = map(float, found.groups())
        for left, right, top, bottom in boxes:
            assert not (left + 0.02 < x < right - 0.02 and upper < top and bottom < lower)


def assert_texts_apart(svg: str) -> None:
    """Words on a line do not touch, in a font of 0.6 em a letter, and none leaves the picture."""
    root = ElementTree.fromstring(svg)
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in root.iter(f"{SVG}text"):
        x, y, words = float(str(text.get("x"))), float(str(text.get("y"))), str(text.text)
        width = 0.6 * float(text.get("font-size", "11")) * len(words)
        left = x - {"end": width, "middle": width / 2}.get(text.get("text-anchor", ""), 0.0)
        lines.setdefault(y, []).append((left, left + width))
    for spans in lines.values():
        spans.sort()
        assert all(left[1] <= right[0] + 0.01 for left, right in pairwise(spans)), spans
        assert spans[0][0] >= 0
        assert spans[-1][1] <= float(str(root.get("width")))
    height = float(str(root.get("height")))
    assert max(lines) < height


def test_names_are_escaped(tmp_path: Path) -> None:
    frame = a_study(tmp_path / "s", [(), ((5, 1),)], names=('<b>&"\x01', "a", "b", "c", "d"))
    svg = tree_svg(frame, TOTAL, title="<2> trials & more")
    root = ElementTree.fromstring(svg)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert '5: stop through <b>&"\ufffd, braking 6' in texts
    assert "<2> trials & more" in texts
    assert not list(root.iter("b"))
    assert not list(root.iter(f"{SVG}b"))


def test_a_large_tree_is_folded(tmp_path: Path) -> None:
    trials = [(), *(((n % 90, 0),) for n in range(95))]
    frame = a_study(tmp_path / "s", trials, total=400)
    assert len(frame) == 91
    svg = tree_svg(frame, 400)
    assert len(bars(svg)) == MOST_LANES
    shown = {rect.get("data-stage") for rect in bars(svg)}
    assert {ROOT, *(stage_id(((n, 0),)) for n in range(5))} <= shown  # the most visited
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert f"… and {91 - MOST_LANES} more stages, each with 1 trial at most" in texts
    assert_texts_apart(svg)


@pytest.mark.parametrize("total", [1, 40, 300, 450_450])
def test_pictures_of_short_and_long_runs(total: int, tmp_path: Path) -> None:
    tree = HandTree(tmp_path / "s" / "tree", root=ROOT, total_steps=total, layer_names=NAMES)
    stage = tree.train([], result_row())
    last = tree.train([stop(total - 1, 0)], result_row())
    write_study(tmp_path / "s", [{"row": result_row(stage=stage)}, {"row": result_row(stage=last)}])
    frame = stage_frame(tmp_path / "s")
    svg = tree_svg(frame, total, title="2 trials for 1.0 training")
    (_, run_end, _, _), (left, right, _, _) = map(box, bars(svg))
    assert right - left >= 2
    assert right == pytest.approx(run_end, abs=0.01)
    assert_texts_apart(svg)


def test_checkpoints_are_ticks(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "s" / "tree", budget_bytes=10**6)
    for step in (0, 10, 20):
        checkpoints.put(ROOT, step, b"%d" % step)
    svg = tree_svg(a_study(tmp_path / "s", [()]), TOTAL)
    (ticks,) = (p for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "checkpoints")
    places = [float(x) for x in re.findall(r"M([\d.]+)", str(ticks.get("d")))]
    left, right, _, _ = box(bars(svg)[0])
    assert places == pytest.approx([left + (right - left) * step / TOTAL for step in (0, 10, 20)], abs=0.5)


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


def test_stages_of_a_study_of_inference_show_what_it_ranks_by(tmp_path: Path) -> None:
    frame = a_study(tmp_path / "s", [(), ((5, 0),)])
    assert frame["saved"].tolist() == frame["compute_saved"].tolist()
    tree = HandTree(tmp_path / "c" / "tree", root=ROOT, total_steps=TOTAL, layer_names=NAMES)
    trials = []
    for path, inference in (((), 0.0), (((5, 0),), 0.75)):
        row = result_row(0.9, saved(path), inference_saved=inference)
        config = TrialConfig(method="compression" if path else "none", saving="both").to_dict()
        trials.append({"row": row | {"stage": tree.train(acts(path), row)}, "config": config})
    write_study(tmp_path / "c", trials)
    found = stage_frame(tmp_path / "c")
    mean = (saved(((5, 0),)) + 0.75) / 2
    assert found["saved"].tolist() == pytest.approx([0.0, mean])
    assert f"saved {100 * mean:.1f} %" in tree_text(found)
    svg = tree_svg(found, TOTAL)
    assert "mean of training and inference saved: 0 %" in svg
    assert_texts_apart(svg)
