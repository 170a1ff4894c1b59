"""Comparison of several studies of the same training: Pareto fronts, hypervolume, cost.

All studies rank by the same compute saving, which "saved" means here. The accuracy loss, or the drop of the studies'
own metric, is against the baseline with the study's own seed, so that studies with different seeds are comparable. A
trial is on a front if it is better than the reference (nothing saved at an accuracy loss of five points) and no other
trial dominates it. Baselines and controls are excluded from fronts because all studies share them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import allowed_text, drop_cell, drop_words, percent, plural, value_text, whole_percent
from analysis.io.layout import Layout, StudyInfo
from analysis.io.studies import distinct_names, load, sources
from analysis.metrics.accounting import search_cost
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.metrics.ranking import allowed_limit, given_away, is_control, rank, reference_of
from analysis.presentation.settings_text import without_files
from analysis.presentation.summary_text import settings_text
from trainables.errors import UserError
from trainables.quality import Quality, read_drop
from trainables.savings import SAVED, share_words

#: Outcomes equal to this many decimals count as equal: losses of fractions such as 583/599 differ in the last bits.
_DECIMALS = 9
#: Helper columns: the negative accuracy loss and the compute saved, rounded so that equal outcomes compare as equal.
_VALUES = ["_gain", "_saved"]
#: Roles of trials that all studies have in common.
_COMMON = ("baseline", "control")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two or more studies of one workload and number of epochs."""

    workload: str
    """Name of the workload that all studies train."""
    length: str
    """Epochs of the full budget."""
    studies: pd.DataFrame
    """One row per study, in the order given; see `compare`."""
    joint_front: pd.DataFrame
    """Trials that no trial of any study dominates, each outcome once per study, most compute saved first: `study`, then
    the columns of `analysis.rank` except the rank and the front flag."""
    candidates: pd.DataFrame
    """All completed trials except baselines and controls, with the same columns and `on_own_front`."""
    quality: Quality
    """Metric by which the studies' trials are compared."""
    allowed_drop: float | str
    """Allowed drop of the metric (`trainables.quality.read_drop`)."""
    allowed: float
    """The same in the metric's unit; a relative one is of the mean baseline."""
    reference_drop: float
    """Drop of the metric at the hypervolumes' reference point; its compute saved is 0."""
    saving: str
    """Compute that the studies rank by: training, inference or both."""
    notes: tuple[str, ...]
    """Differences that limit the comparability of the studies, one sentence each."""


def compare(paths: Iterable[str | Path], *, allowed_drop: float | str | None = None) -> Comparison:
    """Compare studies of the same training with different spaces, methods or fixed settings.

    Args:
        paths: folders of two or more studies.
        allowed_drop: allowed accuracy loss, a fraction in [0, 1), or that of another metric, as for `analysis.rank`; by
            default that of the studies, the smallest if they differ.

    Returns:
        A comparison. Columns of its `studies`:

        - ``study`` (folder name), ``space``, ``trials`` (completed or failed, including the baseline and controls),
          ``failed``;
        - ``front_size``: distinct outcomes on the study's own front of accuracy loss against compute saved;
        - ``hypervolume``: area that this front dominates above a reference point that is the same for all studies:
          nothing saved at an accuracy loss of `GIVEN_AWAY` (five points; twice the allowed loss if that is not below
          five points; of a metric that is no fraction as many percent);
        - ``best_trial``, ``compute_saved`` (training), ``saved`` (what the studies rank by), ``accuracy_drop``: of the
          trial that saves most within the allowed loss; missing if no trial saves compute within it;
        - ``search_trainings``: cost of the search without controls, in full trainings (`analysis.search_cost`);
        - ``share_of_joint_front``: share of the joint front's distinct outcomes that the study reached; one that
          several studies reached counts for each. Missing if the joint front is empty.

    Raises:
        UserError: if there are fewer than two studies, a study is given twice or does not exist, or the studies differ
            in workload, workload options, number of epochs or the compute that they rank by.
    """
    found = sources(paths)
    if len(found) < 2:
        raise UserError(f"a comparison needs two or more studies, got {len(found)}: name another")
    names = distinct_names(found)
    for source in found:
        if source.kind != "study":
            raise UserError(f"a comparison needs folders of studies, {source.path} is none: give what a search wrote")
    infos = {name: Layout(source.path).read_info() for name, source in zip(names, found, strict=True)}
    for field in ("workload", "workload_options", "epochs", "saving", "metric"):
        if shown := _differing({name: getattr(info, field) for name, info in infos.items()}, "{1} ({0})"):
            raise UserError(
                f"studies can be compared if their {field} is the same, got {shown}: leave out what differs"
            )
    first = infos[names[0]]
    quality = first.quality
    trials = {name: load(source.path) for name, source in zip(names, found, strict=True)}
    everything = pd.concat(trials.values(), ignore_index=True)
    if allowed_drop is None:
        drop = min((info.allowed_drop for info in infos.values()), key=lambda one: allowed_limit(everything, one))
    else:
        drop = read_drop(allowed_drop, quality)
    limit, given = allowed_limit(everything, drop), given_away(quality, reference_of(everything))
    reference = given if not limit >= given else 2 * limit
    candidates = _candidates(trials, drop, reference, quality)
    joint = candidates[_on_front(candidates, reference)].drop_duplicates(["study", *_VALUES])
    joint = joint.sort_values(_VALUES[::-1], ascending=False, kind="stable")
    return Comparison(
        workload=first.workload,
        length=first.length_text,
        studies=_studies(infos, trials, candidates, joint, reference, quality),
        joint_front=joint.drop(columns=[*_VALUES, "on_own_front"]).reset_index(drop=True),
        candidates=candidates.drop(columns=_VALUES),
        quality=quality,
        allowed_drop=drop,
        allowed=limit,
        reference_drop=reference,
        saving=first.saving,
        notes=tuple(_notes(infos, trials, quality)),
    )


def _candidates(
    trials: dict[str, pd.DataFrame], allowed_drop: float | str, reference: float, quality: Quality
) -> pd.DataFrame:
    """Return each study's completed trials with a known drop, best first, with the columns `_VALUES`."""
    frames = []
    for name, frame in trials.items():
        ranking = rank(frame, allowed_drop=allowed_drop)
        ranking = ranking[~ranking["role"].isin(_COMMON)].dropna(subset=[quality.drop, SAVED])
        ranking = ranking.drop(columns=["rank", "on_front", "study"], errors="ignore")
        ranking.insert(0, "study", pd.Series(name, ranking.index, dtype="string"))
        ranking["_saved"] = ranking[SAVED].astype("float64").round(_DECIMALS)
        ranking["_gain"] = -ranking[quality.drop].astype("float64").round(_DECIMALS)
        ranking["on_own_front"] = _on_front(ranking, reference)
        frames.append(ranking)
    return pd.concat(frames, ignore_index=True)


def _on_front(candidates: pd.DataFrame, reference: float) -> NDArray[np.bool_]:
    values = candidates[_VALUES].to_numpy(dtype="float64")
    mask: NDArray[np.bool_] = np.all(values > (-reference, 0.0), axis=1)
    mask[mask] = non_dominated(values[mask])
    return mask


def _studies(
    infos: dict[str, StudyInfo],
    trials: dict[str, pd.DataFrame],
    candidates: pd.DataFrame,
    joint: pd.DataFrame,
    reference: float,
    quality: Quality,
) -> pd.DataFrame:
    """Return the table `Comparison.studies`; `joint` has each outcome of the joint front once per study."""
    outcomes = len(joint.drop_duplicates(_VALUES))
    within = candidates[candidates["within_drop"] & (candidates["_saved"] > 0)]
    chosen = within.drop_duplicates("study").set_index("study")  # the first of each, in the order of its ranking
    rows = []
    for name, frame in trials.items():
        own = candidates[(candidates["study"] == name) & candidates["on_own_front"]].drop_duplicates(_VALUES)
        cost = search_cost(frame[~is_control(frame)])  # without controls, which not every study has
        rows.append(
            {
                "study": name,
                "space": infos[name].space,
                "trials": cost.trials,
                "failed": int((frame["status"] == "failed").sum()),
                "front_size": len(own),
                "hypervolume": hypervolume(own[_VALUES], (-reference, 0.0)),
                "best_trial": chosen["trial"].get(name),
                **{column: chosen[column].get(name) for column in ("compute_saved", SAVED, quality.drop)},
                "search_trainings": cost.dense_equivalents,
                "share_of_joint_front": (joint["study"] == name).sum() / outcomes if outcomes else None,
            }
        )
    may_be_missing = ("compute_saved", SAVED, quality.drop, "share_of_joint_front")
    dtypes = {"study": "string", "space": "string", "best_trial": "Int64", **dict.fromkeys(may_be_missing, "float64")}
    return pd.DataFrame(rows).astype(dtypes)


def _notes(infos: dict[str, StudyInfo], trials: dict[str, pd.DataFrame], quality: Quality) -> Iterable[str]:
    baselines = {}
    for name, frame in trials.items():
        done = frame["status"] == "completed"
        baseline = frame.loc[done & (frame["role"] == "baseline"), quality.name]
        if len(baseline):
            baselines[name] = value_text(baseline.mean(), quality)
        else:
            yield (
                f"{name} has no completed baseline, so no {drop_words(quality)} can be stated and none of its trials "
                "is compared."
            )
        if len(baseline) and not (done & ~frame["role"].isin(_COMMON)).any():
            yield f"{name} has no completed trial beside the baseline."
        running = int((frame["status"] == "running").sum())
        if running:
            yield f"{name} is not finished: {plural(running, 'trial')} running."
    if shown := _differing({name: info.seed for name, info in infos.items()}):
        yield f"Seeds differ ({shown}): each {drop_words(quality)} is from the baseline of its own seed."
    elif shown := _differing(baselines):
        yield f"Baselines of the same seed differ in {quality.name} ({shown}): they were not trained alike."
    if _differing({name: json.dumps(info.hold, sort_keys=True) for name, info in infos.items()}):
        held = {name: " ".join(f"{k}={v}" for k, v in without_files(info.hold).items()) for name, info in infos.items()}
        yield f"Fixed values differ ({_listed({name: text or 'none' for name, text in held.items()})})."
    for package in sorted({package for info in infos.values() for package in info.versions}):
        if shown := _differing({name: info.versions.get(package, "?") for name, info in infos.items()}):
            yield f"Versions of {package} differ ({shown})."


def _differing(values: dict[str, Any], form: str = "{0}: {1}") -> str:
    """Return the studies with their values as text; empty where all values are the same."""
    return _listed(values, form) if len(set(map(str, values.values()))) > 1 else ""


def _listed(values: dict[str, Any], form: str = "{0}: {1}") -> str:
    return ", ".join(form.format(name, value) for name, value in values.items())


# --- As text ----------------------------------------------------------------------------------------------------------


#: Columns of a table: heading, column of the frame and format.
_Columns = dict[str, tuple[str, Callable[..., str]]]


def comparison_table(comparison: Comparison) -> list[list[str]]:
    """Return the studies as text cells, header first."""
    quality = comparison.quality
    columns: _Columns = {
        "study": ("study", str),
        "space": ("space", str),
        "trials": ("trials", str),
        "failed": ("failed", str),
        "front": ("front_size", str),
        "hypervolume": ("hypervolume", "{:.5f}".format),
        "best trial": ("best_trial", str),
        "saved": (SAVED, percent),
        drop_words(quality): (quality.drop, lambda drop: drop_cell(drop, quality)),
        "full trainings": ("search_trainings", "{:.1f}".format),
        "of joint front": ("share_of_joint_front", whole_percent),
    }
    return _cells(comparison.studies, columns)


def joint_front_table(comparison: Comparison, *, top: int | None = None) -> list[list[str]]:
    """Return the joint front as text cells, header first, most saved first; at most `top` rows."""
    front, quality = comparison.joint_front[:top], comparison.quality
    columns: _Columns = {
        "study": ("study", str),
        "trial": ("trial", str),
        "saved": (SAVED, percent),
        drop_words(quality): (quality.drop, lambda drop: drop_cell(drop, quality)),
        quality.name: (quality.name, lambda value: value_text(value, quality)),
        "configuration": ("configuration", str),
    }
    return _cells(front.assign(configuration=[settings_text(row) for _, row in front.iterrows()]), columns)


def equal_compute_table(reached: pd.DataFrame, quality: Quality) -> list[list[str]]:
    """Return a frame of `analysis.equal_compute` as text cells, header first."""
    columns: _Columns = {
        "budget": ("budget", percent),
        "study": ("study", str),
        "trials": ("trials", str),
        "best trial": ("trial", str),
        "epochs": ("epoch", str),
        "executed": ("executed", percent),
        quality.name: (quality.name, lambda value: value_text(value, quality)),
        f"{drop_words(quality)} against dense": ("gain", lambda gain: drop_cell(-gain, quality)),
    }
    return _cells(reached, columns)


def _cells(frame: pd.DataFrame, columns: _Columns) -> list[list[str]]:
    """Return a table as text cells, header first."""
    rows = [
        ["-" if pd.isna(row[column]) else form(row[column]) for column, form in columns.values()]
        for row in frame.to_dict("records")
    ]
    return [list(columns), *rows]


def comparison_line(comparison: Comparison) -> str:
    """Return one sentence that names the study that saves most within the allowed drop."""
    quality = comparison.quality
    within = f"within the allowed {drop_words(quality)} of {allowed_text(comparison.allowed_drop, quality)}"
    found = comparison.studies.dropna(subset=[SAVED])
    found = found[found[SAVED] > 0].sort_values(SAVED, ascending=False, kind="stable")
    if len(found) == 0:
        return f"No study has a setting that saves compute {within}."
    most = found[found[SAVED].round(_DECIMALS) == round(float(found[SAVED].iloc[0]), _DECIMALS)]
    names = _and(list(most["study"]))
    verb = "saves" if len(most) == 1 else "save"
    sentence = f"{names} {verb} most {within}: {percent(found[SAVED].iloc[0])} of {share_words(comparison.saving)}"
    others = found.iloc[len(most) :]
    if len(others):
        shares = [f"{percent(saved)} ({study})" for saved, study in zip(others[SAVED], others["study"], strict=True)]
        sentence += f"; {_and(shares)}"
    return sentence + "."


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
