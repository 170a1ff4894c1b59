"""Export of a trial's settings and a study's ranking to other formats. Pure: rows and frames in, text or bytes out."""

from __future__ import annotations

import json
import math

import pandas as pd

from analysis.formatting import axis_words, drop_text, drop_unit, drop_words, fixed, metric_words, percent, value_text
from analysis.io.checked import number_of
from analysis.io.layout import StudyInfo
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.best_env import comment_lines, environment_lines
from analysis.presentation.settings_text import (
    WHOLE_FILES,
    compresses,
    cut_words,
    length_lines,
    schedule_summary,
    schedule_text,
)
from analysis.presentation.summary_text import config_of, searched_options, settings_text, time_beside
from trainables.errors import UserError, unknown_name
from trainables.savings import BOTH, INFERENCE, SAVED, TIME, TRAINING, saved_words

#: Formats of one trial's settings, and of a table of trials.
TRIAL_FORMATS = ("env", "yaml", "json", "schedule")
TABLE_FORMATS = ("csv", "parquet", "latex", "markdown")
FORMATS = (*TRIAL_FORMATS, *TABLE_FORMATS)
#: Columns of a table for a paper beside the metric and the settings, by what the study ranks by: heading and column.
_TRAINING = ("compute saved (%)", "compute_saved")
_INFERENCE = (("inference saved (%)", "inference_saved"), ("sparsity (%)", "sparsity"))
_COLUMNS = {
    TRAINING: (_TRAINING, ("backward saved (%)", "backward_saved")),
    INFERENCE: _INFERENCE,
    BOTH: ((f"{saved_words(BOTH)} (%)", SAVED), _TRAINING, *_INFERENCE),
    TIME: (("training time saved (%)", "time_saved"), ("peak memory saved (%)", "peak_memory_saved")),
}
#: Characters that pandas leaves as they are and LaTeX prints as others.
_LATEX = str.maketrans({"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"})
_MARKDOWN = str.maketrans({character: "\\" + character for character in "\\|*_`<>[]"})


def export_trial(row: pd.Series, info: StudyInfo, format: str, *, same_run: str = "") -> str:
    """Return the settings of one completed trial as text.

    Args:
        row: a row of `analysis.load` or `analysis.rank`.
        info: description of its study.
        format: ``env``: lines for a POSIX shell that set these settings and unset all others; config fields without a
            variable are not included. ``yaml`` and ``json``: the whole config, for `TrialConfig.from_mapping`.
            ``schedule``: the compression schedule as plain YAML with the marked values filled in.
        same_run: which values train as the trial did, in one line (`analysis.trace_replay.same_run`).

    Raises:
        UserError: if the format is unknown or one for tables, if the trial has no result, or if the schedule of a
            trial without compression is requested.
    """
    if format not in TRIAL_FORMATS:
        raise unknown_name("format of a trial", format, TRIAL_FORMATS)
    if row["status"] != "completed":
        error = "" if pd.isna(row.get("error")) else f" ({one_line(str(row['error']))})"
        raise UserError(
            f"only a completed trial can be exported, trial {row['trial']} is {row['status']}{error}: choose another"
        )
    config = config_of(row)
    if format == "json":
        return json.dumps(config.to_dict(), indent=2) + "\n"
    about = [f"# {one_line(line)}" for line in _about(row, info)] + comment_lines(same_run)
    if format == "yaml":
        import yaml

        text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        return "\n".join(about) + "\n" + text
    if format == "schedule":
        if not compresses(config):
            raise UserError(
                f"a trial must compress something to have a schedule, trial {row['trial']} does not: choose another, "
                "or the format env"
            )
        return schedule_text(config, about)
    own = environment_lines(config, schedule="its export with --format schedule", is_cut=bool(cut_words(row)))
    return "\n".join([*about, *length_lines(row), *own]) + "\n"


def _about(row: pd.Series, info: StudyInfo) -> list[str]:
    quality = quality_of(row)
    drop, options, length = row[quality.drop], searched_options(row), cut_words(row)
    lost = "unknown, there is no baseline" if pd.isna(drop) else drop_text(float(drop), quality)
    lines = [
        f"tune_cac: {info.workload}, {info.length_text}, space {info.space}, seed {int(row['seed'])}",
        f"trial {row['trial']}: {saved_words(saving_of(row))} {percent(saved_of_one(row))}, {metric_words(quality)} "
        f"{value_text(row[quality.name], quality)}, {drop_words(quality)} {lost}",
        time_beside(row),
        f"with these options of the workload: {options}" if options else "",
        f"trained {length}" if length else "",
        f"One seed. {'Epochs' if row['method'] == 'compression' else 'Iterations'} are those of a run of this length.",
    ]
    return [line for line in lines if line]


def export_table(ranking: pd.DataFrame, format: str, *, top: int | None = None) -> str | bytes:
    """Return a ranking as text, or as the bytes of a Parquet file.

    Args:
        ranking: from `analysis.rank`.
        format: ``csv`` and ``parquet``: every column except those of the test split, fractions unchanged; in CSV a
            schedule is replaced by its number of lines. ``latex`` and ``markdown``: the columns of a paper's table, in
            percent and points: rank, accuracy, accuracy loss, what the study ranks by, settings.
        top: number of best trials; None for all. The baseline is always included.

    Raises:
        UserError: the format is unknown or one for a trial, `top` is below 1, or the ranking is empty.

    >>> ranking = pd.DataFrame({
    ...     "rank": [1, 2], "trial": [5, 0], "role": ["search", "baseline"], "method": ["gradskip", "none"],
    ...     "accuracy": [0.968, 0.97], "accuracy_drop": [0.002, 0.0], "compute_saved": [0.3, 0.0],
    ...     "CAC_VAR_MT_THR": [0.97, None],
    ... })
    >>> print(export_table(ranking, "csv", top=1).splitlines()[1])
    1,5,search,gradskip,0.968,0.002,0.3,0.97
    """
    if format not in TABLE_FORMATS:
        raise unknown_name("format of a table", format, TABLE_FORMATS)
    if top is not None and top < 1:
        raise UserError(f"top must be an integer >= 1, got {top}")
    if len(ranking) == 0:
        raise UserError("no trial has completed, so there is no table to export: wait, or see what failed with report")
    shown = ranking
    if top is not None:
        shown = ranking[(ranking["rank"] <= top) | (ranking["role"] == "baseline")]
    shown = shown.drop(columns=hidden_columns(ranking), errors="ignore")
    if format == "csv":
        files = [name for name in WHOLE_FILES if name in shown.columns]
        return shown.assign(**shown[files].map(schedule_summary, na_action="ignore")).to_csv(index=False)
    if format == "parquet":
        return shown.to_parquet(index=False)
    cells = paper_cells(shown)
    return _latex(cells) if format == "latex" else _markdown(cells)


def paper_cells(ranking: pd.DataFrame) -> list[list[str]]:
    """Return rank, figures and settings as text cells, header first; ``-`` for unknown values."""
    columns, quality = _COLUMNS[saving_of(ranking)], quality_of(ranking)

    def cell(row: pd.Series, name: str) -> str:
        value, is_metric = number_of(row, name), name in (quality.name, quality.drop)
        if math.isnan(value):
            return "-"
        if is_metric and not quality.is_fraction:
            return value_text(value, quality)
        return fixed(100 * value, 2 if is_metric else 1)

    outcome = [axis_words(quality).removeprefix("validation "), f"{drop_words(quality)}{drop_unit(quality)}"]
    table = [["rank", *outcome, *(heading for heading, _ in columns), "settings"]]
    names = [quality.name, quality.drop, *(name for _, name in columns)]
    for _, row in ranking.iterrows():
        settings = settings_text(row)
        if row["role"] == "baseline":
            settings = ", ".join(part for part in ("baseline", searched_options(row)) if part)
        table.append([str(row["rank"]), *(cell(row, name) for name in names), settings])
    return table


def hidden_columns(trials: pd.DataFrame) -> list[str]:
    """Return the columns that must not influence any choice; only reports show them."""
    return [name for name in trials.columns if name.startswith("test_")]


def _latex(cells: list[list[str]]) -> str:
    table = pd.DataFrame(cells[1:], columns=cells[0]).map(one_line)
    text = table.to_latex(index=False, escape=True, column_format="r" * (len(cells[0]) - 1) + "l")
    return f"% Needs \\usepackage{{booktabs}}.\n{text.translate(_LATEX)}"


def _markdown(cells: list[list[str]]) -> str:
    rows = ["| " + " | ".join(one_line(cell).translate(_MARKDOWN) for cell in row) + " |" for row in cells]
    rule = "|" + "--:|" * (len(cells[0]) - 1) + ":--|"
    return "\n".join([rows[0], rule, *rows[1:]]) + "\n"


def one_line(text: str) -> str:
    """Replace each run of white space, including line breaks, by one space: a comment cannot become a command."""
    return " ".join(text.split())
