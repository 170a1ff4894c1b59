"""A study's tables as text cells, header first, and its report as Markdown. Pure: frames in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import pandas as pd

from analysis.formatting import (
    drop_cell,
    drop_number,
    drop_unit,
    drop_words,
    percent,
    plural,
    value_text,
    whole_percent,
)
from analysis.io.checked import number_of, numbers_of
from analysis.io.study_files import StudyInfo
from analysis.metrics.accounting import SearchCost, search_cost, search_fraction
from analysis.metrics.confirmation import compared, rate_excluded, retrained_saving
from analysis.metrics.ranking import allowed_limit, baseline_of, beats_shorter, control_line
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.best_env import best_env
from analysis.presentation.figures.figure import stop_events
from analysis.presentation.settings_text import compresses, without_files
from analysis.presentation.summary_text import compression_of, config_of, headline, settings_text, short
from trainables.gradskip.variables import ratio_name
from trainables.quality import Quality
from trainables.savings import BOTH, BOTH_SPARSE, SAVED, TIME, TRAINING, saved_words

_ROLES = {"baseline": " (baseline)", "published": " (published)"}


def ranked_table(
    ranking: pd.DataFrame,
    *,
    top: int | None = None,
    test: bool = False,
    beats: pd.Series[Any] | None = None,
    allowed_drop: float | str | None = None,
) -> list[list[str]]:
    """Return the ranked table of an `analysis.rank`, its first ``top`` rows and the baseline.

    ``saved`` is the saving that the study ranks by, ``GFLOPs`` the trial's own training compute without sharing,
    ``search cost`` the compute that the search executed for it, as a fraction of a dense run, ``MACs`` those of the
    nonzero weights as a share of the original model's, ``other seeds`` the probability of staying within the allowed
    loss on another seed. Columns that do not belong to the study's saving, or of which it knows nothing, are left out.

    ``test`` adds the metric on the test split, which a search must not choose by, ``beats`` (from
    `analysis.beats_shorter`) the comparison with a cut dense run; a drop above ``allowed_drop`` gets enough decimals to
    show that.
    """
    saving, quality = saving_of(ranking), quality_of(ranking)
    limit = None if allowed_drop is None else allowed_limit(ranking, allowed_drop)
    of_inference = saving not in (TRAINING, TIME)

    def drop(row: Any) -> str:
        value = row[quality.drop]
        return "-" if pd.isna(value) else drop_cell(value, quality, allowed=limit)

    def metric(name: str) -> Callable[[Any], str]:
        return lambda row: "-" if pd.isna(row[name]) else value_text(row[name], quality)

    columns: list[tuple[str, bool, Callable[[Any], str]]] = [
        ("rank", True, lambda row: str(row["rank"])),
        ("trial", True, lambda row: f"{row['trial']}{_ROLES.get(row['role'], '')}"),
        ("baseline", "baseline" in ranking.columns, lambda row: _number(row["baseline"], 0)),
        (quality.name, True, metric(quality.name)),
        (drop_words(quality), True, drop),
        ("test acc." if quality.is_accuracy else quality.test, test, metric(quality.test)),
        ("saved", True, lambda row: _share(row.get(SAVED))),
        ("training saved", saving in (BOTH, BOTH_SPARSE), lambda row: _share(row["compute_saved"])),
        ("sparsity", of_inference, lambda row: _share(row.get("sparsity"))),
        ("MACs", of_inference, lambda row: _share(1 - number_of(row, "inference_saved"))),
        ("GFLOPs", True, lambda row: _number(row["executed_flops"] / 1e9, 2)),
        ("search cost", True, lambda row: _number(row["search cost"], 2)),
        ("peak MB", saving == TIME, lambda row: _number(row["peak_memory_bytes"] / 1e6, 0)),
        ("time s", True, lambda row: _number(row["train_time_s"], 2)),
        ("joules", bool(numbers_of(ranking, "train_energy_j").notna().any()),
         lambda row: _number(row["train_energy_j"], 0)),
        ("within", True, lambda row: "yes" if row["within_drop"] else "no"),
        ("over seeds", "seeds" in ranking.columns, lambda row: _over_seeds(row, quality)),
        ("front", True, lambda row: "yes" if row["on_front"] else ""),
        ("than cut dense run", beats is not None and bool(beats.notna().any()),
         lambda row: "" if pd.isna(row["beats"]) else str(row["beats"])),
        ("configuration", True, settings_text),
    ]  # fmt: skip
    shown = [(name, cell) for name, is_shown, cell in columns if is_shown]
    rows = ranking.assign(**{"search cost": search_fraction(ranking), "beats": beats})
    rows = rows if top is None else rows[(rows.index < top) | (rows["role"] == "baseline")]
    return [[name for name, _ in shown], *([cell(row) for _, cell in shown] for _, row in rows.iterrows())]


def _over_seeds(row: pd.Series, quality: Quality) -> str:
    if pd.isna(row["seeds"]):
        return ""
    lost = drop_cell(row["drop_mean"], quality) if math.isfinite(row["drop_mean"]) else "failed"
    saved = number_of(row, "saved_mean")
    return f"{lost}{'' if math.isnan(saved) else f', saved {percent(saved)}'} ({row['seeds']})"


def _number(value: Any, decimals: int) -> str:
    return "-" if pd.isna(value) else f"{value:.{decimals}f}"


def _share(fraction: Any) -> str:
    return "-" if fraction is None or pd.isna(fraction) else percent(fraction)


def stop_table(row: pd.Series) -> list[list[str]]:
    """Return the stops of a trial."""
    events = stop_events(row.get("stop_events"))
    table = [["iteration", "layer", "name", "rule", ratio_name(str(events[0].get("rule")) if events else "")]]
    for event in events:
        ratio = event.get("ratio")
        seen = f"{ratio:.4f}" if isinstance(ratio, (int, float)) else ""
        names = [str(event.get(name) or "") for name in ("name", "rule")]
        table.append([str(event["iteration"]), str(event["layer"]), *names, seen])
    return table


def confirmation_table(confirmation: pd.DataFrame, saved: str, allowed: float, quality: Quality) -> list[list[str]]:
    """Return the candidates that were retrained on fresh seeds (`analysis.confirm_table`).

    ``saved`` is the compute saving that the study ranks by, in words, ``allowed`` the allowed drop in the metric's
    unit.
    """
    unit = drop_unit(quality)
    loss = f"{drop_words(quality)}{unit}"
    table = [["trial", "seeds", saved, loss, f"interval{unit}", "worst seed", "confidence", "confirmed"]]
    for _, row in confirmation.iterrows():
        drop, low, high, worst = (
            "-" if pd.isna(row[name]) else drop_number(row[name], quality, allowed=allowed, sign="+")
            for name in (quality.drop, "drop_low", "drop_high", "drop_worst")
        )
        again = percent(retrained_saving(row)) if row["seeds"] > 0 else "-"
        interval = f"{low} to {high}" if row["seeds"] > 1 else "-"
        confidence = "" if pd.isna(row["confidence"]) else whole_percent(row["confidence"])
        found = [str(row["candidate"]), str(row["seeds"]), again, drop, interval, worst, confidence]
        table.append([*found, "yes" if row["confirmed"] else "no"])
    return table


def _rare_losses(confirmation: pd.DataFrame) -> str:
    """Return which rate of large losses the seeds of each confirmed setting exclude; empty where none is."""
    found = [
        f"{whole_percent(rate_excluded(int(row['seeds'])))} for trial {row['candidate']}"
        for _, row in confirmation[confirmation["confirmed"]].iterrows()
    ]
    said = " The share of all seeds that lose more than the worst of these is, with 95 % confidence each, at most "
    return f"{said}{', '.join(found)}." if found else ""


# --- Sparsity and MACs of a trial's model, in total and by layer ------------------------------------------------------
# Sparsities are fractions of the elements; MACs are multiply-accumulate operations for one sample.

#: Totals: column, label, format.
_SUMS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("sparsity", "sparsity", percent),
    ("structured_sparsity", "sparsity in whole filters, rows or channels", percent),
    ("inference_saved", "inference compute saved", percent),
    ("sparse_inference_saved", "inference compute saved where zeros are skipped", percent),
    ("dense_macs", "MACs of a sample, zeros included", "{:,.0f}".format),
    ("effective_macs", "MACs of the weights that are not zero", "{:,.0f}".format),
    ("parameters", "parameters", "{:,.0f}".format),
    ("latency_s", "latency of a sample", lambda seconds: f"{1000 * seconds:.2f} ms"),
)


def is_compressed(row: pd.Series | None) -> bool:
    """Return whether a trial used a compression schedule."""
    return row is not None and "compression" in str(row.get("method")).split("+")


def sums(row: pd.Series) -> list[tuple[str, str]]:
    """Return names and values of a model's totals; values that were not measured are left out.

    >>> sums(pd.Series({"sparsity": 0.8, "effective_macs": 51200, "latency_s": 0.0123}))
    [('sparsity', '80.0 %'), ('MACs of the weights that are not zero', '51,200'), ('latency of a sample', '12.30 ms')]
    """
    values = ((said, form, number_of(row, name)) for name, said, form in _SUMS)
    return [(said, form(value)) for said, form, value in values if isfinite(value)]


def layers(row: pd.Series) -> list[tuple[str, str]]:
    """Return the names of the weights and their sparsities, in the model's order; empty if not measured.

    >>> layers(pd.Series({"layer_sparsity": '{"conv1.weight": 0.25, "fc.weight": 0}'}))
    [('conv1.weight', '25.0 %'), ('fc.weight', '0.0 %')]
    """
    text = row.get("layer_sparsity")
    shares = json.loads(text) if isinstance(text, str) and text else {}
    return [(name, percent(share)) for name, share in shares.items()]


def full_trainings(equivalents: float) -> str:
    """Return an amount of compute in trainings of the baseline, as text.

    >>> full_trainings(11.83), full_trainings(1.04)
    ('11.8 full trainings', '1.0 full training')
    """
    said = f"{equivalents:.1f}"
    return f"{said} full training{'' if said == '1.0' else 's'}"


def search_cost_line(cost: SearchCost, *, of: str = "Search cost") -> str:
    """Return one sentence on the compute executed, and on the trials' and their outcomes' without sharing if more."""
    line = f"{of}: {full_trainings(cost.dense_equivalents)} for {plural(cost.trials, 'trial')}"
    repeats = cost.outcomes < cost.completed
    line += f" ({plural(cost.outcomes, 'distinct outcome')})" if repeats else ""
    alone, executed = f"{cost.own_equivalents:.1f}", f"{cost.dense_equivalents:.1f}"
    if cost.own_equivalents > cost.dense_equivalents and alone != executed:
        line += f"; trained alone, each from its start, they would have cost {alone}"
        line += f", the outcomes {cost.outcome_equivalents:.1f}" if repeats else ""
    return line + "."


def counts_line(info: StudyInfo, trials: pd.DataFrame) -> str:
    """Return a study's length and seed, and how many trials ended how."""
    counts = ", ".join(f"{n} {status}" for status, n in trials["status"].value_counts().items())
    return f"{info.length_text}, seed {info.seed}; trials: {counts}."


def report_markdown(info: StudyInfo, trials: pd.DataFrame, ranking: pd.DataFrame, best: pd.Series | None,
                    allowed_drop: float | str, *,
                    confirmation: pd.DataFrame | None = None) -> str:  # fmt: skip
    """Return the report: headline, best trial on the test split, settings, ranked table, failures, versions.

    Arguments are those of `summary_text.headline`.
    """
    line, quality = control_line(trials), info.quality
    said = headline(
        ranking,
        best,
        allowed_drop,
        confirmation=confirmation,
        line=line,
        why_little=info.why_little,
    )
    parts = [
        f"# {info.space} on {info.workload}",
        said,
        search_cost_line(search_cost(trials)),
        counts_line(info, trials),
    ]
    if info.hold:
        held = " ".join(f"{name}={short(value)}" for name, value in without_files(info.hold).items())
        parts.append(f"Fixed in every trial but the baseline: {held}.")
    if best is not None and saved_of_one(best) > 0:
        env = best_env(info, best, allowed_drop, confirmation=confirmation, line=line)
        parts += ["## Best settings", f"```sh\n{env.rstrip()}\n```", *_about_best(best, ranking, confirmation)]
    if confirmation is not None:
        losses = "accuracy losses are" if quality.is_accuracy else f"each {drop_words(quality)} is"
        cells = confirmation_table(confirmation, saved_words(saving_of(trials)), allowed_limit(ranking, allowed_drop),
                                   quality)  # fmt: skip
        parts += [
            "## Confirmation",
            f"Retrained with the baseline on seeds that the search never saw; {losses} in "
            f"{compared(confirmation.iloc[0])}, with intervals that have their confidence together."
            f"{_rare_losses(confirmation)}",
            _table(cells, "--:|--:|--:|--:|--:|--:|--:|:--"),
        ]
    if controls := control_cells(line):
        parts += ["## Controls", _table(controls, ":--|--:|--:")]
    table = ranked_table(ranking, test=True, beats=beats_shorter(ranking, line), allowed_drop=allowed_drop)
    parts += ["## Ranking", _table(table, "|".join(["--"] * len(table[0])))]
    failed = trials[trials["status"] == "failed"]
    if len(failed):
        lines = [f"- trial {trial}: {error}" for trial, error in zip(failed["trial"], failed["error"], strict=True)]
        parts += ["## Failed trials", "\n".join(lines)]
    parts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in info.versions.items()) + ".")
    return "\n\n".join(parts) + "\n"


def beside_answer(best: pd.Series, ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> str:
    """Return sentences on the best trial's test split, and on what it saves beside what the study ranks by."""
    quality = quality_of(best)
    if pd.isna(best[quality.test]):
        values = "accuracies" if quality.is_accuracy else "values"
        tested = f"There is no test split, so all {values} are those of the validation split."
    else:
        baseline = value_text(baseline_of(ranking, best)[quality.test], quality)
        # What is trained on further seeds is judged by both splits.
        unseen = "" if confirmation is not None or "seeds" in ranking else ", which no choice was made by"
        tested = (
            f"On the test split{unseen}, seed {int(best['seed'])}: {value_text(best[quality.test], quality)}, "
            f"baseline {baseline}."
        )
    savings = []
    if saving_of(ranking) != TRAINING and not pd.isna(best["compute_saved"]):
        savings.append(f"Training compute saved: {percent(best['compute_saved'])}.")
    if not pd.isna(best["backward_saved"]):
        savings.append(f"Backward FLOPs saved: {percent(best['backward_saved'])}.")
    time = percent(best["time_saved"])
    savings.append(f"Training time saved in this run: {time} (one measurement, beside other trials).")
    return f"{tested}\n{' '.join(savings)}"


def _about_best(best: pd.Series, ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> list[str]:
    """Return what is said of the best trial beside its settings: test split, savings, stops, sparsity."""
    parts = [beside_answer(best, ranking, confirmation)]
    if len(stops := stop_table(best)) > 1:
        parts.append(_table(stops, "--:|--:|:--|:--|--:"))
    if is_compressed(best):
        parts.append("## Sparsity")
        if compresses(config_of(best)):
            whole = "The whole schedule is in `best.yaml`."
            parts.append(f"Trial {best['trial']} compresses: {compression_of(best)}. {whole}")
        parts.append("\n".join(f"- {name}: {value}" for name, value in sums(best)))
        if found := layers(best):
            parts.append(_table([("layer", "sparsity"), *found], ":--|--:"))
    return parts


def control_cells(line: pd.DataFrame) -> list[list[str]]:
    """Return what the runs of `analysis.control_line` saved and reached as text cells, header first; empty for none."""
    if len(line) == 0:
        return []
    quality = line.attrs["quality"]
    cells = [
        [plural(int(row["epochs"]), "epoch"), percent(row["compute_saved"]), value_text(row[quality.name], quality)]
        for _, row in line.iterrows()
    ]
    return [["trained", "compute saved", quality.name], *cells]


def _table(cells: Sequence[Sequence[str]], alignment: str) -> str:
    """Return a table from its text cells, header first, and the alignment of its columns."""
    head, *rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([head, f"|{alignment}|", *rows])
