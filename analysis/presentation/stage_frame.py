"""The stage tree of a study as a frame with one row a stage, and as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.formatting import percent, plural, value_text
from analysis.io.layout import Layout
from analysis.io.studies import load
from analysis.metrics.saving import quality_of, saved_of, saving_of
from analysis.presentation.settings_text import estimator_text
from analysis.presentation.summary_text import trial_numbers
from trainables.gradients.fields import ESTIMATORS
from trainables.gradskip.settings import Settings
from trainables.interventions import Intervention
from trainables.quality import ACCURACY, Quality
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
# Symbols: i iteration, from 0. A stage runs from ``begin``, the iteration of the intervention that starts the
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
                "quality": stage.result.get("quality"),
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
