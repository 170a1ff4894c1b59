"""The stage tree as a picture: a self-contained SVG with one lane per stage. Pure: a frame in, text out.

A bar covers the iterations of its stage and is connected by a thin line to its parent's bar. The children of a stage
are drawn latest first, so that no line crosses a bar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from analysis.formatting import percent, plural, value_text
from analysis.io.layout import Layout
from analysis.io.studies import load
from analysis.metrics.saving import quality_of, saved_of, saving_of
from analysis.presentation.figures.palette import depth_colour
from analysis.presentation.settings_text import estimator_text
from analysis.presentation.summary_text import trial_numbers
from trainables.gradients.fields import ESTIMATORS
from trainables.gradskip.settings import Settings
from trainables.interventions import Intervention
from trainables.metrics import value_in
from trainables.quality import ACCURACY, Quality
from trainables.savings import TRAINING, saved_words
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore, roots

# --- Descriptions of interventions in words ---------------------------------------------------------------------------

#: The key of a compression schedule's actions (`trainables.compression.trial.replay`).
_SCHEDULE = "compression"
#: Text templates for the other effects of a stop, by key.
_HOW = {"norm_statistics": "norm statistics {}", "forward_cache_mb": "forward cache {} MB"}


def action_words(action: str, layer_names: Sequence[str], *, before: str | None = None) -> str:
    """Describe an action in words.

    Args:
        action: an intervention's action.
        layer_names: names of the parameters by number, as far as they are known.
        before: the action of the previous intervention, if there was one.

    >>> action_words('{"braking":6,"stop":[0,1]}', ["conv1.weight", "conv1.bias"])
    'stop through conv1.bias, braking 6'
    >>> action_words('{"prune":0.5}', [])
    'prune 0.5'
    >>> action_words('{"central_difference":{"gradient_epsilon":0.01,"gradient_layers":["fc.bias"]}}', [])
    'central difference gradient_layers=fc.bias gradient_epsilon=0.01'
    """
    values = _values(action)
    if values is None:
        return action
    schedule = values.pop(_SCHEDULE, None)
    begins = "" if schedule is None else _schedule_words(schedule)
    return ", ".join(part for part in (begins, _other_words(values, layer_names, before)) if part)


def _other_words(values: dict[str, Any], layer_names: Sequence[str], before: str | None) -> str:
    if "stop" in values:
        return _stop_words(values, layer_names, _values(before or "") or {})
    if "rule" in values:
        return _rule_words(values)
    for method in ESTIMATORS:
        if method in values:
            return f"{method.replace('_', ' ')} {estimator_text(values[method], digits=4)}"
    return ", ".join(_pair(name, value) for name, value in values.items())


def _values(action: str) -> dict[str, Any] | None:
    try:
        values = json.loads(action)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _stop_words(values: Mapping[str, Any], layer_names: Sequence[str], before: Mapping[str, Any]) -> str:
    stopped = [int(number) for number in values["stop"]]
    if "order" in values:  # custom order: the highest number may not be the last layer stopped, so name the new ones
        new = sorted(set(stopped) - set(before.get("stop", ()))) or stopped
        others = f" and {len(new) - 2} more" if len(new) > 2 else ""
        parts = [f"stop {', '.join(_layer(number, layer_names) for number in new[:2])}{others}"]
    else:
        parts = [f"stop through {_layer(max(stopped), layer_names)}" if stopped else "stop nothing"]
    if values.get("braking"):
        parts.append(f"braking {values['braking']}")
    parts += [_pair(name, value) for name, value in values.items() if name not in ("stop", "braking", "order")]
    return ", ".join(parts)


def _schedule_words(acts: Sequence[Any]) -> str:
    """Describe the policies of a compression schedule that begin here, by the instances that they apply.

    >>> _schedule_words([{"policy": {"pruner": {"instance_name": "agp"}}}, "learning rates"])
    'agp, learning rates begin'
    """
    names = dict.fromkeys(act if isinstance(act, str) else _instance(act) for act in acts)
    return f"{', '.join(names)} begin{'' if len(names) > 1 else 's'}"


def _instance(act: Mapping[str, Any]) -> str:
    inner = [part["instance_name"] for part in act["policy"].values() if isinstance(part, dict)]
    return str(inner[0]) if inner else "a policy"


def _rule_words(values: Mapping[str, Any]) -> str:
    """Describe a rule that applies to the whole run: name, iterations and settings that differ from the defaults."""
    schedule = ("rule", "rule_start_itr", "rule_end_itr")
    begin, end = values.get("rule_start_itr"), values.get("rule_end_itr")
    defaults = vars(Settings())
    told = [
        _pair(name.removeprefix("rule_"), value)
        for name, value in values.items()
        if name not in schedule and value != _plain(defaults.get(name))
    ]
    return ", ".join([f"{values['rule']} {begin}..{end}", *told])


def _layer(number: int, layer_names: Sequence[str]) -> str:
    return layer_names[number] if number < len(layer_names) else f"parameter {number}"


def _pair(name: str, value: Any) -> str:
    if name in _HOW:
        return _HOW[name].format(value)
    said = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if isinstance(value, bool):
        said = "on" if value else "off"
    return f"{name.replace('_', ' ')} {said}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- The stage tree of a study as a tidy DataFrame with one row per stage, and as text for a terminal -----------------
# Symbols: i iteration, from 0. A stage's bar runs from ``begin``, the iteration of the intervention that starts the
# stage, to ``known_until``.

#: The columns of `stage_frame` and their pandas dtypes.
_COLUMNS = {
    "root": "string", "stage": "string", "parent": "string", "depth": "int64", "begin": "Int64", "start": "int64",
    "known_until": "int64", "action": "string", "trials": "object", "ends": "object", "quality": "float64",
    "compute_saved": "float64", "inference_saved": "float64", "saved": "float64", "steps_shared": "int64",
    "checkpoints": "int64", "checkpoint_bytes": "int64", "checkpoint_steps": "object",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Data of one stage from the store."""

    root: str
    """Its root's id."""
    link: tuple[str, Intervention] | None
    """Id of the parent and the intervention that starts the stage; None for the root stage."""
    start: int
    """Its first own iteration."""
    known_until: int
    """The iteration after the last recorded one."""
    result: Mapping[str, Any]
    """The row at the end of the run; empty if the stage was not trained to the end."""

    @property
    def begin(self) -> int:
        return 0 if self.link is None else self.link[1].iteration


def stage_frame(path: str | Path) -> pd.DataFrame:
    """Return the stages of a study in tree order: parents before their children, siblings by iteration.

    Args:
        path: the folder that a search wrote; the search may be running.

    Returns:
        One row per stage; none if the study has no tree. ``df.attrs["total_steps"]`` is the number of steps of a whole
        run, ``df.attrs["saving"]`` the compute that the study ranks by, ``df.attrs["quality"]`` its
        metric.

        - ``root``, ``stage``, ``parent``: ids; ``parent`` is missing for a root stage.
        - ``depth``: number of interventions from the root to the stage.
        - ``begin``: iteration of the intervention that starts the stage, missing for a root stage; ``start``: its
          first own iteration; ``known_until``: the iteration after the last recorded one.
        - ``action``: the intervention in words.
        - ``trials``: numbers of the trials whose training contains the stage; ``ends``: numbers of the trials whose
          last stage it is.
        - ``accuracy`` (fraction, validation) or the study's metric, ``compute_saved``, ``inference_saved``, ``saved``
          (fractions; the study ranks by the last one): results of the run that ends in the stage; NaN if no run was
          trained to the end. Of a run with fewer epochs, what is saved of the compute of the study's longest one.
        - ``steps_shared``: additional steps that the stage's trials would have executed without sharing it.
        - ``checkpoints``: number of checkpoints; ``checkpoint_bytes``: bytes of their contents (contents shared by two
          stages count for both); ``checkpoint_steps``: their iterations, ascending.

        A stage whose path to the root was lost because a file was corrupt is left out until a trial writes the file
        again.

    Raises:
        UserError: if there is no study at the path.
    """
    tree = Layout(Path(path)).shared_tree
    trials = load(path)
    last, saving = _last_stages(trials), saving_of(trials)
    checkpoints = Checkpoints(tree, budget_bytes=0)  # only reads
    rows: list[dict[str, Any]] = []
    stores = [StageStore(tree, root) for root in roots(tree)]
    known = [(store, facts) for store in stores if (facts := store.read("root.json")) is not None]
    total_steps = max((int(facts["total_steps"]) for _, facts in known), default=0)
    most_epochs = max((facts.get("epochs", 0) for _, facts in known), default=0)
    for store, facts in known:
        share = facts.get("epochs", most_epochs) / most_epochs if most_epochs else 1
        own = _root_rows(_read(store, int(facts["total_steps"])), facts, last, checkpoints)
        rows += own if share == 1 else [_of_full_run(row, share, facts) for row in own]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)
    frame["saved"] = saved_of(frame.assign(saving=saving))
    quality = quality_of(trials)
    frame = frame.rename(columns={"quality": quality.name})
    frame.attrs |= {"total_steps": total_steps, "saving": saving, "quality": quality}
    return frame


def _of_full_run(row: dict[str, Any], share: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's row of a run that has a share of the longest run's steps."""
    own = row["compute_saved"]
    length = f", {plural(facts['epochs'], 'epoch')}" if row["depth"] == 0 and "epochs" in facts else ""
    return {
        **row, "compute_saved": None if own is None else 1 - share * (1 - own), "action": f"{row['action']}{length}"
    }  # fmt: skip


def _last_stages(trials: pd.DataFrame) -> dict[int, str]:
    """Return the last stage of each completed trial that was trained in the tree, keyed by trial number."""
    if "stage" not in trials.columns:  # a study of an earlier version
        return {}
    done = trials[(trials["status"] == "completed") & trials["stage"].notna() & (trials["stage"] != "")]
    return {int(number): str(stage) for number, stage in zip(done["trial"], done["stage"], strict=True)}


def _read(store: StageStore, total_steps: int) -> dict[str, _Read]:
    """Return all stages of a root by id.

    Reads one stage at a time because all traces of a long run together may not fit into memory.
    """
    found = {}
    for name, link in store.links().items():
        stage = store.stage(name, 0 if link is None else link[1].iteration + 1)
        stage.refresh()
        found[name] = _Read(
            root=store.root,
            link=link,
            start=stage.start,
            known_until=stage.known_until,
            result=stage.rows.get(total_steps, {}),
        )
    return found


def _root_rows(
    stages: Mapping[str, _Read], facts: Mapping[str, Any], last: Mapping[int, str], checkpoints: Checkpoints
) -> list[dict[str, Any]]:
    """Return the rows of one root's stages in tree order."""
    order = _in_order(stages)
    ends = {name: [trial for trial, stage in sorted(last.items()) if stage == name] for name, _ in order}
    through = {name: list(trials) for name, trials in ends.items()}
    # For each trial of a stage, the steps from the stage's begin to where the trial leaves it or ends.
    spans = {name: [stages[name].known_until - stages[name].begin] * len(trials) for name, trials in ends.items()}
    for name, _ in reversed(order):  # children before their parents
        link = stages[name].link
        if link is not None:
            through[link[0]] += through[name]
            spans[link[0]] += [stages[name].begin - stages[link[0]].begin] * len(through[name])
    rows = []
    for name, depth in order:
        stage = stages[name]
        kept = checkpoints.entries(name)
        rows.append(
            {
                "root": stage.root,
                "stage": name,
                "parent": None if stage.link is None else stage.link[0],
                "depth": depth,
                "begin": None if stage.link is None else stage.begin,
                "start": stage.start,
                "known_until": stage.known_until,
                "action": _words(stages, stage, facts.get("layer_names", ())),
                "trials": tuple(sorted(through[name])),
                "ends": tuple(ends[name]),
                "quality": value_in(stage.result),
                **{column: stage.result.get(column) for column in ("compute_saved", "inference_saved")},
                "steps_shared": sum(spans[name]) - max(spans[name], default=0),
                "checkpoints": len(kept),
                "checkpoint_bytes": sum({entry.sha256: entry.bytes for entry in kept}.values()),
                "checkpoint_steps": tuple(sorted({entry.step for entry in kept})),
            }
        )
    return rows


def _words(stages: Mapping[str, _Read], stage: _Read, layer_names: Iterable[str]) -> str:
    if stage.link is None:
        return "dense run"
    before = stages[stage.link[0]].link
    return action_words(stage.link[1].action, tuple(layer_names), before=None if before is None else before[1].action)


def _in_order(stages: Mapping[str, _Read]) -> list[tuple[str, int]]:
    """Return the stages reachable from the root with their depths: parents before children, siblings by iteration."""
    children: dict[str, list[str]] = {}
    waiting: list[tuple[str, int]] = []
    for name, stage in stages.items():
        if stage.link is None:
            waiting.append((name, 0))
        else:
            children.setdefault(stage.link[0], []).append(name)
    found = []
    while waiting:
        name, depth = waiting.pop()
        found.append((name, depth))
        leaving = sorted(children.get(name, ()), key=lambda child: (stages[child].begin, child), reverse=True)
        waiting += [(child, depth + 1) for child in leaving]
    return found


def most_visited(frame: pd.DataFrame, count: int) -> set[str]:
    """Return the ids of the ``count`` stages with the most trials; the ancestors of each stage are included.

    Stages with equally many trials are taken in the frame's order, so that paths are shown to their ends, early stops
    first.
    """
    visits = frame["trials"].map(len).sort_values(ascending=False, kind="stable")
    return set(frame.loc[visits.index[:count], "stage"])


def tree_text(frame: pd.DataFrame, *, depth: int | None = None, top: int | None = None) -> str:
    """Return the tree as indented lines, each stage once; empty for a frame without rows.

    Args:
        frame: from `stage_frame`, in its order.
        depth: largest depth to show, in interventions, >= 0; None for all.
        top: number of stages to show, >= 1, those with the most trials; None for all. Omitted stages are counted in a
            line at their position.
    """
    shown = most_visited(frame, len(frame) if top is None else top)
    if depth is not None:
        shown &= set(frame.loc[frame["depth"] <= depth, "stage"])
    rows = frame.to_dict("records")
    children: dict[str | None, list[dict[Any, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"] if row["depth"] > 0 else None, []).append(row)
    trunks = children.pop(None, [])
    several = len(trunks) > 1
    quality: Quality = frame.attrs.get("quality", ACCURACY)

    def lines(row: dict[Any, Any], front: str, under: str) -> Iterator[str]:
        """Yield the lines of a stage and its descendants, which begin with `front` and `under`."""
        yield front + _stage_line(row, quality, several=several)
        below = children.get(row["stage"], [])
        hidden = [child for child in below if child["stage"] not in shown]
        visible = [child for child in below if child["stage"] in shown]
        for place, child in enumerate(visible, start=1):
            last = place == len(visible) and not hidden
            yield from lines(child, under + ("└─ " if last else "├─ "), under + ("   " if last else "│  "))
        if hidden:
            trials = {trial for stage in hidden for trial in stage["trials"]}
            yield f"{under}└─ ... {plural(sum(map(size, hidden)), 'more stage')}, {plural(len(trials), 'trial')}"

    def size(row: dict[Any, Any]) -> int:
        return 1 + sum(map(size, children.get(row["stage"], [])))

    return "\n".join(line for row in trunks if row["stage"] in shown for line in lines(row, "", ""))


def _stage_line(row: Mapping[str, Any], quality: Quality, *, several: bool) -> str:
    if row["depth"] == 0:
        root = f" {row['root'][:8]}" if several else ""
        parts = [f"{row['action']}{root}, 0..{row['known_until']}"]
    else:
        parts = [f"{row['begin']}: {row['action']}, ..{row['known_until']}"]
    parts.append(plural(len(row["trials"]), "trial"))
    if not pd.isna(row[quality.name]):
        parts.append(f"{quality.name} {value_text(row[quality.name], quality)}")
    if row["depth"] > 0 and not pd.isna(row["saved"]):
        parts.append(f"saved {percent(row['saved'])}")
    return ", ".join(parts) + (f" ({trial_numbers(row['ends'])})" if row["ends"] else "")


# --- The stage tree as a picture --------------------------------------------------------------------------------------

#: Maximum number of lanes in a picture; further stages are counted in its last line.
MOST_LANES = 60

# Lengths in pixels.
_MARGIN = 24
_PLOT_WIDTH = 560
_LANE = 20
_BAR = 11
_FIRST_LANE = 128
_INDENT = 8
_MOST_INDENTS = 8
_LETTER = 6.7  # width at 11 px, enough for the widest of the listed fonts
_MOST_LETTERS = 60
_LABELS = "what was done, at which iteration"
_NUMBERS, _METRIC = {"trials": 58, "saved": 64}, 70  # columns and their widths; that of the metric comes last
_TICK_STEP = 0.5  # checkpoints closer together share one tick

_TEXT, _FAINT, _LINE, _GRID, _STRIPE, _UNKNOWN = "#1f2933", "#52606d", "#8491a0", "#d9dee3", "#f5f7f9", "#aab4be"
#: From nothing saved to the most saved; all contrast with the background, and with each other also in grey print.
_SCALE = ("#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """A stage in the picture."""

    row: Mapping[Any, Any]
    """Its row of the frame."""
    begin: int
    """The iteration at which it branches off its parent, 0 for a root stage."""
    label: str
    """Its text beside the bar."""
    indent: int
    """Distance of the label from the column's left edge."""
    y: float
    """Vertical middle of its bar."""
    parent_y: float | None
    """Vertical middle of its parent's bar, None for a root stage."""


def tree_svg(frame: pd.DataFrame, total_steps: int, *, title: str | None = None) -> str:
    """Draw the tree: iterations on the horizontal axis, one bar per stage, shared parts of runs drawn once.

    Bars are coloured by the compute saved of the run that ends in them; ticks under a bar are checkpoints. Of more than
    `MOST_LANES` stages, those with the fewest trials are counted in a line instead of drawn.

    Args:
        frame: from `analysis.stage_frame`, in its order, with at least one row.
        total_steps: iterations of a whole run.
        title: title, for example "24 trials for 3.4 full trainings"; None for the number of trials.

    Returns:
        The SVG's text. Each drawn stage is a ``rect`` of class ``stage`` with its id in ``data-stage``.
    """
    assert len(frame) > 0
    shown = most_visited(frame, MOST_LANES)
    drawn = frame[frame["stage"].isin(shown)]
    folded = frame[~frame["stage"].isin(shown)]
    lanes = list(_lanes(drawn, several=frame["root"].nunique() > 1))
    most_saved = max(0.0, float(drawn["saved"].fillna(0.0).max()))
    label_x = _MARGIN + _PLOT_WIDTH + 24
    numbers_x = label_x + max(_LETTER * len(_LABELS), *(_LETTER * len(lane.label) + lane.indent for lane in lanes))
    quality: Quality = frame.attrs.get("quality", ACCURACY)
    widths = {**_NUMBERS, quality.name: max(_METRIC, round(_LETTER * len(quality.name)) + 14)}
    width = round(numbers_x + sum(widths.values()) + _MARGIN)
    bottom = _FIRST_LANE + _LANE * len(lanes)
    height = bottom + (_LANE if len(folded) else 0) + _MARGIN // 2
    if title is None:
        title = plural(len({trial for trials in frame["trials"] for trial in trials}), "trial")

    def x(iteration: float) -> float:
        return _MARGIN + _PLOT_WIDTH * min(max(iteration / max(1, total_steps), 0.0), 1.0)

    parts = [
        *_head(width, height, title),
        *_legend(saved_words(frame.attrs.get("saving", TRAINING)), most_saved),
        _text(_MARGIN + _PLOT_WIDTH / 2, _FIRST_LANE - 29, "iteration", fill=_FAINT, anchor="middle"),
        *_row_of_texts(_FIRST_LANE - 10, label_x, _LABELS, numbers_x, list(widths), widths, fill=_FAINT),
    ]
    for lane in lanes[::2]:  # shaded, so that a bar and its text are seen as one row
        parts.append(_rect(_MARGIN - 8, lane.y - _LANE / 2, width - 2 * _MARGIN + 16, _STRIPE, height=_LANE, rx=0))
    for iteration in _round_numbers(max(1, total_steps)):
        parts.append(_path(f"M{x(iteration):.1f} {_FIRST_LANE - 4}V{bottom:g}", _GRID))
        parts.append(_text(x(iteration), _FIRST_LANE - 10, f"{iteration:,}", fill=_FAINT, anchor="middle"))
    for lane in lanes:
        if lane.parent_y is not None:
            down = f"M{x(lane.begin):.2f} {lane.parent_y + _BAR / 2:g}V{lane.y:g}"
            parts.append(_path(down, _LINE, kind="connector"))
    for lane in lanes:
        row, left = lane.row, min(x(lane.begin), _MARGIN + _PLOT_WIDTH - 2)  # keeps a stage of a single step visible
        fill = _UNKNOWN if pd.isna(row["saved"]) else depth_colour(row["saved"] / (most_saved or 1.0), _SCALE)
        parts.append(
            _rect(left, lane.y - _BAR / 2, max(2.0, x(row["known_until"]) - left), fill, stage=row["stage"],
                  tooltip=_tooltip(row))
        )  # fmt: skip
        ticks = sorted({round(x(step) / _TICK_STEP) * _TICK_STEP for step in row["checkpoint_steps"]})
        if ticks:
            down = "".join(f"M{at:g} {lane.y + _BAR / 2:g}v3.5" for at in ticks)
            parts.append(_path(down, _TEXT, width=0.8, kind="checkpoints"))
        numbers = [
            str(len(row["trials"])),
            "" if pd.isna(row["saved"]) else percent(row["saved"]),
            "" if pd.isna(row[quality.name]) else value_text(row[quality.name], quality),
        ]
        parts += _row_of_texts(lane.y + 4, label_x + lane.indent, lane.label, numbers_x, numbers, widths)
    if len(folded):
        most = int(folded["trials"].map(len).max())
        rest = f"… and {plural(len(folded), 'more stage')}, each with {plural(most, 'trial')} at most"
        parts.append(_text(_MARGIN, bottom + 0.7 * _LANE, rest, fill=_FAINT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lanes(frame: pd.DataFrame, *, several: bool) -> Iterator[_Lane]:
    """Yield the lanes from top to bottom: each stage above its children, the latest child first.

    With several trees, the labels of their root stages have the tree's id.
    """
    children: dict[Any, list[Mapping[Any, Any]]] = {}
    for found in frame.fillna({"begin": 0}).to_dict("records"):
        children.setdefault(found["parent"] if found["depth"] > 0 else None, []).append(found)
    for leaving in children.values():
        leaving.sort(key=lambda row: (row["begin"], len(row["trials"])))  # taken from the end of the list
    heights: dict[str, float] = {}
    waiting = children.get(None, [])
    while waiting:
        row = waiting.pop()
        y = _FIRST_LANE + _LANE * (len(heights) + 0.5)
        heights[row["stage"]] = y
        words = _action(row) + (f" {row['root'][:8]}" if several and row["depth"] == 0 else "")
        yield _Lane(
            row=row,
            begin=int(row["begin"]),
            label=words if len(words) <= _MOST_LETTERS else words[: _MOST_LETTERS - 1] + "…",
            indent=_INDENT * min(int(row["depth"]), _MOST_INDENTS),
            y=y,
            parent_y=heights[row["parent"]] if row["depth"] > 0 else None,
        )
        waiting += children.get(row["stage"], [])


def _action(row: Mapping[Any, Any]) -> str:
    return f"{row['begin']}: {row['action']}" if row["depth"] > 0 else str(row["action"])


def _tooltip(row: Mapping[Any, Any]) -> str:
    counts = f"{plural(len(row['trials']), 'trial')}, {plural(row['checkpoints'], 'checkpoint')}"
    return f"{_action(row)}, to {row['known_until']}; {counts}"


def _head(width: int, height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        "role=\"img\" font-family=\"-apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Verdana, sans-serif\" "
        'font-size="11">',
        f"<title>{_clean(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 32, title, size=17, weight="600"),
        _text(_MARGIN, 52, "One bar a stretch of training; what trials have in common was trained once.", fill=_FAINT),
    ]


def _legend(saved: str, most_saved: float) -> list[str]:
    """Return the legend line under the title: colour scale, meaning of grey, tick of a checkpoint."""
    y, x = 70.0, float(_MARGIN)
    stops = "".join(
        f'<stop offset="{place / (len(_SCALE) - 1):.2f}" stop-color="{colour}"/>' for place, colour in enumerate(_SCALE)
    )
    some = most_saved > 0
    bar = _LETTER * (len(saved) + len(": 0 %")) + 1.4
    words = f"{percent(most_saved) if some else '0 %'} by the run that ends here"
    grey_x = x + bar + 86 + _LETTER * (len(words) + 2)
    tick_x = grey_x + 24 + _LETTER * 22
    return [
        f'<defs><linearGradient id="stage-tree-saved">{stops}</linearGradient></defs>',
        _text(x, y, f"{saved}: 0 %" if some else f"{saved}:", fill=_FAINT),
        _rect(x + bar, y - 9, 80, "url(#stage-tree-saved)" if some else _SCALE[0]),
        _text(x + bar + 86, y, words, fill=_FAINT),
        _rect(grey_x, y - 9, 18, _UNKNOWN),
        _text(grey_x + 24, y, "not trained to the end", fill=_FAINT),
        _path(f"M{tick_x:.1f} {y - 6}v6", _TEXT, width=1.2),
        _text(tick_x + 6, y, "checkpoint", fill=_FAINT),
    ]


def _round_numbers(total: int, most: int = 7) -> list[int]:
    """Return at most ``most`` + 1 round numbers from 0, and the total if there is room for its label.

    >>> _round_numbers(300)
    [0, 50, 100, 150, 200, 250, 300]
    >>> _round_numbers(480)
    [0, 100, 200, 300, 400, 480]
    """
    step, place = 1, 0
    while total / step > most:
        place += 1
        step = (1, 2, 5)[place % 3] * 10 ** (place // 3)
    numbers = list(range(0, total + 1, step))
    return numbers if total - numbers[-1] < 0.09 * total else [*numbers, total]


def _row_of_texts(
    y: float, label_x: float, label: str, numbers_x: float, cells: Sequence[str], widths: Mapping[str, int],
    fill: str = _TEXT,
) -> list[str]:  # fmt: skip
    """Return a label and the cells of the columns of numbers, without empty ones."""
    right = [numbers_x + end for end in accumulate(widths.values())]
    numbers = [_text(x, y, cell, fill=fill, anchor="end") for x, cell in zip(right, cells, strict=True) if cell]
    return [_text(label_x, y, label, fill=fill), *numbers]


def _rect(
    x: float, y: float, width: float, fill: str, *, height: float = _BAR, rx: int = 2, stage: str = "",
    tooltip: str = "",
) -> str:  # fmt: skip
    of = f' class="stage" data-stage={quoteattr(stage)}' if stage else ""
    return f'<rect{of} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height}" rx="{rx}" fill="{fill}">' + (
        f"<title>{_clean(tooltip)}</title></rect>" if tooltip else "</rect>"
    )


def _path(d: str, stroke: str, *, width: float = 1, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<path{of} d="{d}" stroke="{stroke}" stroke-width="{width:g}" fill="none"/>'


def _text(
    x: float, y: float, words: str, *, fill: str = _TEXT, size: int | None = None, weight: str = "", anchor: str = ""
) -> str:
    more = f' font-size="{size}"' if size else ""
    more += f' font-weight="{weight}"' if weight else ""
    more += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{more}>{_clean(words)}</text>'


def _clean(words: str) -> str:
    """Escape text for XML; characters that are not printable become the replacement character."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in words))
