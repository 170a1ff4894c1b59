"""Export of a trial's settings to other formats. Pure: a row in, text out."""

from __future__ import annotations

import json

import pandas as pd

from analysis.formatting import drop_text, drop_words, metric_words, percent, value_text
from analysis.io.study_files import StudyInfo
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.best_env import environment_lines
from analysis.presentation.settings_text import compresses, cut_words, length_lines, schedule_text
from analysis.presentation.summary_text import config_of, searched_options
from trainables.errors import UserError, unknown_name
from trainables.savings import saved_words

#: Formats of one trial's settings.
TRIAL_FORMATS = ("env", "yaml", "json", "schedule")


def export_trial(row: pd.Series, info: StudyInfo, format: str) -> str:
    """Return the settings of one completed trial, a row of `analysis.load` or `analysis.rank`, as text.

    Args:
        row: the trial.
        info: description of its study.
        format: ``env``: lines for a POSIX shell that set these settings and unset all others; config fields without a
            variable are not included. ``yaml`` and ``json``: the whole config, for `TrialConfig.from_mapping`.
            ``schedule``: the compression schedule as plain YAML with the marked values filled in.

    UserError: an unknown format, a trial without a result, or the schedule of one without compression.
    """
    if format not in TRIAL_FORMATS:
        raise unknown_name("--format", format, TRIAL_FORMATS)
    if row["status"] != "completed":
        error = "" if pd.isna(row.get("error")) else f" ({one_line(str(row['error']))})"
        raise UserError(
            f"only a completed trial can be exported, trial {row['trial']} is {row['status']}{error}: choose another"
        )
    config = config_of(row)
    if format == "json":
        return json.dumps(config.to_dict(), indent=2) + "\n"
    about = [f"# {one_line(line)}" for line in _about(row, info)]
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
        f"with these options of the workload: {options}" if options else "",
        f"trained {length}" if length else "",
        f"One seed. {'Epochs' if row['method'] == 'compression' else 'Iterations'} are those of a run of this length.",
    ]
    return [line for line in lines if line]


def one_line(text: str) -> str:
    """Replace each run of white space, including line breaks, by one space: a comment cannot become a command."""
    return " ".join(text.split())
