"""The stage tree of a study as a frame with one row a stage, and as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.formatting import percent, plural, value_text
from analysis.io.studies import load
from analysis.io.study_files import Layout
from analysis.metrics.saving import quality_of, saved_of, saving_of
from analysis.presentation.settings_text import estimator_text
from analysis.presentation.summary_text import trial_numbers
from trainables.gradients.fields import ESTIMATORS
from trainables.gradskip.replay import FROM_START
from trainables.gradskip.settings import Settings
from trainables.interventions import Intervention
from trainables.quality import ACCURACY, Quality
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore, roots

#: The key of a compression schedule's actions (`trainables.compression.trial.replay`).
_SCHEDULE = "compression"
#: Text templates for the other effects of a stop, by key.
_HOW = {
    "norm_statistics": "norm statistics {}",
    "lr_factor": "learning rates times {}",
    "prefix_mode": "prefix in {} mode",
    "at_once": "before the first step",
    "forward_cache_mb": "forward cache {} MB",
}


def action_words(action: str, layer_names: Sequence[str], *, before: str | None = None) -> str:
    """Describe an intervention's action in words.

    ``layer_names`` are those of the parameters by number, as far as they are known; ``before`` is the action of the
    previous intervention, if there was one.

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
    parts = []
    if _SCHEDULE in values:  # the policies that begin here, by the instances that they apply
        acts = values.pop(_SCHEDULE)
        names = list(dict.fromkeys(act if isinstance(act, str) else _instance(act) for act in acts))
        parts.append(f"{', '.join(names)} begin{'' if len(names) > 1 else 's'}")
    method = next((method for method in ESTIMATORS if method in values), None)
    if "stop" in values:
        parts += _stop_words(values, layer_names, _values(before or "") or {})
    elif "rule" in values:  # one that applies to the whole run: its iterations, and what differs from the defaults
        rule, begin, end = (values.pop(name, None) for name in ("rule", "rule_start_itr", "rule_end_itr"))
        defaults = json.loads(json.dumps(vars(Settings())))  # tuples as lists
        parts.append(f"{rule} {begin}..{end}")
        parts += [_pair(n.removeprefix("rule_"), v) for n, v in values.items() if v != defaults.get(n)]
    elif method is not None:
        parts.append(f"{method.replace('_', ' ')} {estimator_text(values[method], digits=4)}")
    else:
        parts += [_pair(name, value) for name, value in values.items()]
    return ", ".join(parts)


def _values(action: str) -> dict[str, Any] | None:
    try:
        values = json.loads(action)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _instance(act: Mapping[str, Any]) -> str:
    return next((str(part["instance_name"]) for part in act["policy"].values() if isinstance(part, dict)), "a policy")


def _stop_words(values: Mapping[str, Any], layer_names: Sequence[str], before: Mapping[str, Any]) -> list[str]:
    def layer(number: int) -> str:
        return layer_names[number] if number < len(layer_names) else f"parameter {number}"

    stopped = [int(number) for number in values["stop"]]
    if "order" in values:  # custom order: the highest number may not be the last layer stopped, so name the new ones
        new = sorted(set(stopped) - set(before.get("stop", ()))) or stopped
        others = f" and {len(new) - 2} more" if len(new) > 2 else ""
        parts = [f"stop {', '.join(map(layer, new[:2]))}{others}"]
    else:
        parts = [f"stop through {layer(max(stopped))}" if stopped else "stop nothing"]
    if values.get("braking"):
        parts.append(f"braking {values['braking']}")
    return parts + [_pair(name, value) for name, value in values.items() if name not in ("stop", "braking", "order")]


def _pair(name: str, value: Any) -> str:
    if name in _HOW:
        return _HOW[name].format(value)
    said = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if isinstance(value, bool):
        said = "on" if value else "off"
    return f"{name.replace('_', ' ')} {said}"


# --- The stage tree as a tidy DataFrame with one row per stage, and as text for a terminal ----------------------------
# Symbols: i iteration, from 0. A stage runs from ``begin``, the iteration of the intervention that starts the
# stage, to ``known_until``.

#: The columns of `stage_frame` and their pandas dtypes.
_COLUMNS = {
    "root": "string", "stage": "string", "parent": "string", "depth": "int64", "begin": "Int64", "start": "int64",
    "known_until": "int64", "action": "string", "trials": "object", "ends": "object", "quality": "float64",
    "compute_saved": "float64", "inference_saved": "float64", "sparse_inference_saved": "float64", "saved": "float64",
    "checkpoints": "int64", "checkpoint_bytes": "int64", "checkpoint_steps": "object",
}  # fmt: skip
#: Those that a result row has.
_OF_RESULT = ("quality", "compute_saved", "inference_saved", "sparse_inference_saved")


@dataclass(frozen=True, kw_only=True)
class _Read:
    link: tuple[str, Intervention] | None
    """Id of the parent and the intervention that starts the stage; None for the root stage."""
    start: int  # its first own iteration
    known_until: int  # the iteration after the last recorded one
    result: Mapping[str, Any]  # the row at the end of the run; empty if the stage was not trained to the end

    @property
    def begin(self) -> int:
        return 0 if self.link is None else self.link[1].iteration


def stage_frame(path: str | Path) -> pd.DataFrame:
    """Return the stages of a study in tree order: parents before their children, siblings by iteration.

    One row per stage; none if the study, which may be searched now, has no tree. A stage whose path to the root was
    lost because a file was corrupt is left out until a trial writes the file again. ``df.attrs``: ``total_steps`` of a
    whole run, ``saving`` (the compute that the study ranks by) and ``quality`` (its metric). UserError: there is no
    study at the path.

    - ``root``, ``stage``, ``parent``: ids; ``parent`` is missing for a root stage.
    - ``depth``: number of interventions from the root to the stage.
    - ``begin``: iteration of the intervention that starts the stage, missing for a root stage; ``start``: its first own
      iteration; ``known_until``: the iteration after the last recorded one.
    - ``action``: the intervention in words.
    - ``trials``: numbers of the trials whose training contains the stage; ``ends``: of those that end in it.
    - ``accuracy`` (validation) or the study's metric, ``compute_saved``, ``inference_saved``,
      ``sparse_inference_saved``, ``saved`` (fractions; the study ranks by the last one): results of the run that ends
      in the stage, NaN if none was trained to the end. Of a run with fewer epochs, what is saved of the compute of the
      study's longest one.
    - ``checkpoints``, ``checkpoint_bytes`` (contents that two stages share count for both), ``checkpoint_steps``:
      number, bytes and ascending iterations of its checkpoints.
    """
    tree, trials = Layout(Path(path)).shared_tree, load(path)
    saving, quality = saving_of(trials), quality_of(trials)
    done = trials[trials["status"] == "completed"]
    last = dict(zip(done["trial"].map(int), done["stage"].fillna(""), strict=True))
    checkpoints = Checkpoints(tree, budget_bytes=0)  # only reads
    stores = [StageStore(tree, root) for root in roots(tree)]
    known = [(store, facts) for store in stores if (facts := store.read("root.json")) is not None]
    most_epochs = max((facts.get("epochs", 0) for _, facts in known), default=0)
    rows: list[dict[str, Any]] = []
    for store, facts in known:
        own = _root_rows(store, facts, last, checkpoints)
        share = facts.get("epochs", most_epochs) / most_epochs if most_epochs else 1
        if share != 1:  # of a run with fewer epochs, shares are of the longest run's compute
            for row in own:
                saved = row["compute_saved"]
                row["compute_saved"] = None if saved is None else 1 - share * (1 - saved)
                row["action"] += f", {plural(facts['epochs'], 'epoch')}" if row["depth"] == 0 else ""
        rows += own
    frame = pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)
    frame["saved"] = saved_of(frame.assign(saving=saving))
    frame = frame.rename(columns={"quality": quality.name})
    total_steps = max((int(facts["total_steps"]) for _, facts in known), default=0)
    frame.attrs |= {"total_steps": total_steps, "saving": saving, "quality": quality}
    return frame


def _root_rows(
    store: StageStore, facts: Mapping[str, Any], last: Mapping[int, str], checkpoints: Checkpoints
) -> list[dict[str, Any]]:
    """Return the rows of one root's stages in tree order; ``last`` has the last stage of each completed trial."""
    stages = {}
    for name, link in store.links().items():  # one at a time: all traces of a long run may not fit into memory
        read = store.stage(name, 0 if link is None else link[1].iteration + 1)
        read.refresh()
        result = read.rows.get(int(facts["total_steps"]), {})
        stages[name] = _Read(link=link, start=read.start, known_until=read.known_until, result=result)
    order, layer_names = _in_order(stages), tuple(facts.get("layer_names", ()))
    ends = {name: [trial for trial, stage in sorted(last.items()) if stage == name] for name, _ in order}
    through = {name: list(trials) for name, trials in ends.items()}
    for name, _ in reversed(order):  # children before their parents
        if link := stages[name].link:
            through[link[0]] += through[name]
    dense = ", ".join(["dense run", *(_pair(name, facts[name]) for name in FROM_START if name in facts)])
    rows = []
    for name, depth in order:
        stage, kept = stages[name], checkpoints.entries(name)
        parent, action = None, dense
        if stage.link is not None:
            parent, before = stage.link[0], stages[stage.link[0]].link
            action = action_words(stage.link[1].action, layer_names, before=before and before[1].action)
        rows.append(
            {
                "root": store.root,
                "stage": name,
                "parent": parent,
                "depth": depth,
                "begin": None if parent is None else stage.begin,
                "start": stage.start,
                "known_until": stage.known_until,
                "action": action,
                "trials": tuple(sorted(through[name])),
                "ends": tuple(ends[name]),
                **{column: stage.result.get(column) for column in _OF_RESULT},
                "checkpoints": len(kept),
                "checkpoint_bytes": sum({entry.sha256: entry.bytes for entry in kept}.values()),
                "checkpoint_steps": tuple(sorted({entry.step for entry in kept})),
            }
        )
    return rows


def _in_order(stages: Mapping[str, _Read]) -> list[tuple[str, int]]:
    """Return the stages reachable from the root with their depths: parents before children, siblings by iteration."""
    children: dict[str | None, list[str]] = {}
    for name, stage in stages.items():
        children.setdefault(stage.link and stage.link[0], []).append(name)
    found, waiting = [], [(name, 0) for name in children.get(None, ())]
    while waiting:
        name, depth = waiting.pop()
        found.append((name, depth))
        leaving = sorted(children.get(name, ()), key=lambda child: (stages[child].begin, child), reverse=True)
        waiting += [(child, depth + 1) for child in leaving]
    return found


def most_visited(frame: pd.DataFrame, count: int) -> set[str]:
    """Return the ids of the ``count`` stages with the most trials; the ancestors of each stage are included.

    Of stages with equally many trials those of early stops come first, as in the frame.
    """
    visits = frame["trials"].map(len).sort_values(ascending=False, kind="stable")
    return set(frame.loc[visits.index[:count], "stage"])


def tree_text(frame: pd.DataFrame, *, depth: int | None = None, top: int | None = None) -> str:
    """Return the tree of a `stage_frame` as indented lines, each stage once; empty for a frame without rows.

    ``depth`` is the largest to show, in interventions; ``top`` the number of stages to show, those with the most
    trials; None for all. Omitted stages are counted in a line at their position.
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
