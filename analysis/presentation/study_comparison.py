"""Comparison of several studies of the same training: Pareto fronts, hypervolume, cost.

All studies rank by the same compute saving: that of training, of inference, or the mean of both; "saved" means this
saving here. Accuracy is compared as the accuracy loss against the baseline with the study's own seed, so that studies
with different seeds are comparable. A trial is on a front if it is better than the reference (nothing saved at an
accuracy loss of five points) and no other trial dominates it. Baselines and controls are excluded from fronts because
all studies share them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import fixed, percent, plural, points
from analysis.io.layout import Layout, StudyInfo
from analysis.io.sources import distinct_names, sources
from analysis.io.studies import load
from analysis.metrics.accounting import search_cost
from analysis.metrics.controls import is_control
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.metrics.ranking import GIVEN_AWAY, best, check_allowed_drop, rank
from analysis.metrics.saving import SAVED, share_words
from analysis.presentation.compression_text import without_files
from analysis.presentation.summary_text import settings_text
from trainables.errors import UserError

#: Outcomes equal to this many decimals count as equal: losses of fractions such as 583/599 differ in the last bits.
_DECIMALS = 9
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
    allowed_drop: float
    """Allowed accuracy loss, a fraction."""
    reference_drop: float
    """Accuracy loss of the hypervolumes' reference point; its compute saved is 0."""
    saving: str
    """Compute that the studies rank by: training, inference or both."""
    notes: tuple[str, ...]
    """Differences that limit the comparability of the studies, one sentence each."""


def compare(paths: Iterable[str | Path], *, allowed_drop: float | None = None) -> Comparison:
    """Compare studies of the same training with different spaces, methods or fixed settings.

    Args:
        paths: folders of two or more studies.
        allowed_drop: allowed accuracy loss, a fraction in [0, 1); by default that of the studies, the smallest if they
            differ.

    Returns:
        A comparison. Columns of its `studies`:

        - ``study`` (folder name), ``space``, ``trials`` (completed or failed, including the baseline and controls),
          ``failed``;
        - ``front_size``: distinct outcomes on the study's own front of accuracy loss against compute saved;
        - ``hypervolume``: area that this front dominates relative to a reference point that is the same for all
          studies: an accuracy loss of `GIVEN_AWAY` (five points; twice the allowed loss if that is not below five
          points) with nothing saved. If no trial is more accurate than its baseline, the area divided by the
          reference's loss is the compute saving averaged over all allowed losses from 0 to the reference's;
        - ``best_trial``, ``compute_saved`` (training), ``saved`` (what the studies rank by), ``accuracy_drop``: of the
          trial that saves most within the allowed loss; missing if no trial saves compute within it;
        - ``search_trainings``: cost of the search without controls, in full trainings (`analysis.search_cost`);
        - ``share_of_joint_front``: share of the joint front's distinct outcomes that the study reached. An outcome
          reached by several studies counts for each, so the shares may add up to more than 1. Missing if the joint
          front is empty.

    Raises:
        UserError: if there are fewer than two studies, a study is given twice or does not exist, or the studies differ
            in workload, workload options, number of epochs or the compute that they rank by.
    """
    if allowed_drop is not None:
        check_allowed_drop(allowed_drop)
    found = sources(paths)
    if len(found) < 2:
        raise UserError(f"a comparison needs two or more studies, got {len(found)}: name another")
    names = distinct_names(found)
    for source in found:
        if source.kind != "study":
            raise UserError(f"a comparison needs folders of studies, {source.path} is none: give what a search wrote")
    infos = {name: Layout(source.path).read_info() for name, source in zip(names, found, strict=True)}
    _check_same(infos, "workload")
    _check_same(infos, "workload_options")
    _check_same(infos, "epochs")
    _check_same(infos, "saving")
    drop = min(info.allowed_drop for info in infos.values()) if allowed_drop is None else allowed_drop
    first = next(iter(infos.values()))
    trials = {name: load(source.path) for name, source in zip(names, found, strict=True)}
    reference = GIVEN_AWAY if drop < GIVEN_AWAY else 2 * drop
    candidates = _candidates(trials, drop, reference)
    joint = _on_front(candidates, reference)
    outcomes = set(_outcomes(candidates[joint]))
    rows = [
        {
            "study": name,
            "space": infos[name].space,
            **_figures(trials[name], candidates[candidates["study"] == name], reference),
            "share_of_joint_front": _share(candidates[joint & (candidates["study"] == name)], outcomes),
        }
        for name in names
    ]
    front = candidates[joint].drop_duplicates(["study", "_saved", "_gain"])
    front = front.sort_values(["_saved", "_gain"], ascending=False, kind="stable")
    return Comparison(
        workload=first.workload,
        length=first.length_text,
        studies=pd.DataFrame(rows).astype({"study": "string", "space": "string", "best_trial": "Int64"}),
        joint_front=_public(front).drop(columns="on_own_front"),
        candidates=_public(candidates),
        allowed_drop=drop,
        reference_drop=reference,
        saving=first.saving,
        notes=tuple(_notes(infos, trials)),
    )


def _check_same(infos: dict[str, StudyInfo], field: str) -> None:
    values = {name: getattr(info, field) for name, info in infos.items()}
    if len({str(value) for value in values.values()}) > 1:
        shown = ", ".join(f"{value} ({name})" for name, value in values.items())
        raise UserError(f"studies can be compared if their {field} is the same, got {shown}: leave out what differs")


def _candidates(trials: dict[str, pd.DataFrame], allowed_drop: float, reference: float) -> pd.DataFrame:
    """Return each study's completed trials with a known accuracy loss, best first, with columns `_saved` and `_gain`.

    `_gain` is the negative accuracy loss; both helper columns are rounded, so that equal outcomes compare as equal.
    """
    frames = []
    for name, frame in trials.items():
        ranking = rank(frame, allowed_drop=allowed_drop)
        ranking = ranking[~ranking["role"].isin(_COMMON)].dropna(subset=["accuracy_drop", SAVED])
        ranking = ranking.drop(columns=[c for c in ("rank", "on_front", "study") if c in ranking])
        ranking.insert(0, "study", pd.array([name] * len(ranking), dtype="string"))
        ranking["_saved"] = ranking[SAVED].astype("float64").round(_DECIMALS)
        ranking["_gain"] = -ranking["accuracy_drop"].astype("float64").round(_DECIMALS)
        ranking["on_own_front"] = _on_front(ranking, reference)
        frames.append(ranking)
    return pd.concat(frames, ignore_index=True)


def _values(candidates: pd.DataFrame) -> NDArray[np.float64]:
    return candidates[["_gain", "_saved"]].to_numpy(dtype="float64")


def _outcomes(candidates: pd.DataFrame) -> list[tuple[float, float]]:
    return [(float(gain), float(saved)) for gain, saved in _values(candidates)]


def _on_front(candidates: pd.DataFrame, reference: float) -> NDArray[np.bool_]:
    values = _values(candidates)
    mask: NDArray[np.bool_] = np.all(values > (-reference, 0.0), axis=1)
    mask[mask] = non_dominated(values[mask])
    return mask


def _figures(trials: pd.DataFrame, own: pd.DataFrame, reference: float) -> dict[str, Any]:
    chosen = best(own[own["_saved"] > 0])  # still in the order of the ranking
    front = set(_outcomes(own[own["on_own_front"]]))
    cost = search_cost(trials[~is_control(trials)])  # without controls, which not every study has
    return {
        "trials": cost.trials,
        "failed": int((trials["status"] == "failed").sum()),
        "front_size": len(front),
        "hypervolume": hypervolume(sorted(front), (-reference, 0.0)) if front else 0.0,
        "best_trial": pd.NA if chosen is None else int(chosen["trial"]),
        "compute_saved": float("nan") if chosen is None else float(chosen["compute_saved"]),
        SAVED: float("nan") if chosen is None else float(chosen[SAVED]),
        "accuracy_drop": float("nan") if chosen is None else float(chosen["accuracy_drop"]),
        "search_trainings": cost.dense_equivalents,
    }


def _share(reached: pd.DataFrame, outcomes: set[tuple[float, float]]) -> float:
    return len(set(_outcomes(reached))) / len(outcomes) if outcomes else float("nan")


def _public(candidates: pd.DataFrame) -> pd.DataFrame:
    return candidates.drop(columns=["_saved", "_gain"]).reset_index(drop=True)


def _notes(infos: dict[str, StudyInfo], trials: dict[str, pd.DataFrame]) -> Iterable[str]:
    for name, frame in trials.items():
        done = frame["status"] == "completed"
        if not (done & (frame["role"] == "baseline")).any():
            yield (
                f"{name} has no completed baseline, so no accuracy loss can be stated and none of its trials is "
                "compared."
            )
        elif not (done & ~frame["role"].isin(_COMMON)).any():
            yield f"{name} has no completed trial beside the baseline."
        running = int((frame["status"] == "running").sum())
        if running:
            yield f"{name} is not finished: {plural(running, 'trial')} running."
    seeds = {name: info.seed for name, info in infos.items()}
    if len(set(seeds.values())) > 1:
        yield f"Seeds differ ({_listed(seeds)}): each accuracy loss is from the baseline of its own seed."
    else:
        baselines = {name: _baseline_accuracy(frame) for name, frame in trials.items()}
        known = {name: f"{value:.4f}" for name, value in baselines.items() if value is not None}
        if len(set(known.values())) > 1:
            yield f"Baselines of the same seed differ in accuracy ({_listed(known)}): they were not trained alike."
    held = {name: json.dumps(info.hold, sort_keys=True) for name, info in infos.items()}
    if len(set(held.values())) > 1:
        yield f"Fixed values differ ({_listed({name: _held(info) for name, info in infos.items()})})."
    for package in sorted({package for info in infos.values() for package in info.versions}):
        versions = {name: info.versions.get(package, "?") for name, info in infos.items()}
        if len(set(versions.values())) > 1:
            yield f"Versions of {package} differ ({_listed(versions)})."


def _baseline_accuracy(trials: pd.DataFrame) -> float | None:
    done = trials[(trials["role"] == "baseline") & (trials["status"] == "completed")]
    return float(done["accuracy"].mean()) if len(done) else None


def _held(info: StudyInfo) -> str:
    return " ".join(f"{name}={value}" for name, value in without_files(info.hold).items()) or "none"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())


# --- as text --------------------------------------------------------------------------------------------------------


def comparison_table(comparison: Comparison) -> list[list[str]]:
    """Return the studies as text cells, header first."""
    table = [
        [
            "study", "space", "trials", "failed", "front", "hypervolume", "best trial", "saved", "accuracy loss",
            "full trainings", "of joint front",
        ]
    ]  # fmt: skip
    for row in comparison.studies.to_dict("records"):
        table.append(
            [
                row["study"],
                row["space"],
                str(row["trials"]),
                str(row["failed"]),
                str(row["front_size"]),
                f"{row['hypervolume']:.5f}",
                "-" if pd.isna(row["best_trial"]) else str(row["best_trial"]),
                "-" if pd.isna(row[SAVED]) else percent(row[SAVED]),
                "-" if pd.isna(row["accuracy_drop"]) else _drop(row["accuracy_drop"]),
                f"{row['search_trainings']:.1f}",
                "-" if pd.isna(row["share_of_joint_front"]) else f"{100 * row['share_of_joint_front']:.0f} %",
            ]
        )
    return table


def joint_front_table(comparison: Comparison, *, top: int | None = None) -> list[list[str]]:
    """Return the joint front as text cells, header first, most saved first; at most `top` rows."""
    table = [["study", "trial", "saved", "accuracy loss", "accuracy", "configuration"]]
    for _, row in comparison.joint_front.head(len(comparison.joint_front) if top is None else top).iterrows():
        table.append(
            [
                str(row["study"]),
                str(row["trial"]),
                percent(row[SAVED]),
                _drop(row["accuracy_drop"]),
                f"{row['accuracy']:.4f}",
                settings_text(row),
            ]
        )
    return table


def comparison_line(comparison: Comparison) -> str:
    """Return one sentence that names the study that saves most within the allowed accuracy loss."""
    within = f"within the allowed accuracy loss of {points(comparison.allowed_drop)}"
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
        shares = [f"{percent(row.saved)} ({row.study})" for row in others.itertuples()]
        sentence += f"; {_and(shares)}"
    return sentence + "."


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _drop(drop: float) -> str:
    return fixed(drop, 4, sign="+")
