"""Export of a trial's settings to other formats. Pure: a row in, text out."""

from __future__ import annotations

import json

import pandas as pd

from analysis.formatting import LINE_WIDTH, drop_text, drop_words, metric_words, percent, value_text
from analysis.io.study_files import StudyInfo
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.best_env import environment_lines
from analysis.presentation.figures.figure import stop_events
from analysis.presentation.settings_text import compresses, cut_words, length_lines, schedule_text
from analysis.presentation.summary_text import config_of, searched_options
from analysis.presentation.thawing import thawing_schedule
from analysis.trace_replay.traces import RunTrace, facts_key
from trainables.config import TrialConfig
from trainables.errors import UserError, unknown_name
from trainables.savings import saved_words

#: Formats of one trial's settings.
TRIAL_FORMATS = ("env", "yaml", "json", "schedule", "torch", "finetuning-scheduler")


def export_trial(row: pd.Series, info: StudyInfo, format: str, trace: RunTrace | None = None) -> str:
    """Return the settings of one completed trial, a row of `analysis.load` or `analysis.rank`, as text.

    Args:
        row: the trial.
        info: description of its study.
        format: ``env``: lines for a POSIX shell that set these settings and unset all others; config fields without a
            variable are not included. ``yaml`` and ``json``: the whole config, for `TrialConfig.from_mapping`.
            ``schedule``: the compression schedule as plain YAML with the marked values filled in. ``torch``: lines of
            a training loop that freeze what the trial stopped, when it did, without this package.
            ``finetuning-scheduler``: a schedule of that library, which thaws layers and never freezes them.
        trace: the study's recorded training, where there is one: names of all parameters, in the order of stops.

    UserError: an unknown format, a trial without a result, the schedule of one without compression, stops that are not
    known by name or that a format cannot express.
    """
    if format not in TRIAL_FORMATS:
        raise unknown_name("--as", format, TRIAL_FORMATS)
    if row["status"] != "completed":
        error = "" if pd.isna(row.get("error")) else f" ({one_line(str(row['error']))})"
        raise UserError(
            f"only a completed trial can be exported, trial {row['trial']} is {row['status']}{error}: choose another"
        )
    config = config_of(row)
    if format == "json":
        return json.dumps(config.to_dict(), indent=2) + "\n"
    about = [f"# {one_line(line)}" for line in _about(row, info)]
    if format in ("torch", "finetuning-scheduler"):
        trace = trace if trace is not None and facts_key(config) in trace.facts else None
        write = _torch_lines if format == "torch" else _thawing_lines
        return "\n".join([*about, *write(config, _frozen_at(row, config, trace), trace)]) + "\n"
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
    own = environment_lines(config, schedule="its export with --as schedule", is_cut=bool(cut_words(row)))
    return "\n".join([*about, *length_lines(row), *own]) + "\n"


def _frozen_at(row: pd.Series, config: TrialConfig, trace: RunTrace | None) -> dict[int, tuple[str, ...]]:
    """Return the names of the parameters that stop by the step from which on they do not train.

    Without a trace the name of the last one alone, before which all others were registered.
    """
    events = stop_events(row.get("stop_events"))
    settings, known = config.gradskip_settings(), None if trace is None else trace.facts[facts_key(config)]
    if config.method not in ("gradskip", "none"):
        raise UserError(
            f"trial {row['trial']} must be one of Gradient-Skip alone, got {config.method}: choose another, or --as env"
        )
    if not events:
        raise UserError(f"trial {row['trial']} must stop a layer, and trains all of them to its end: choose another")
    if not all(event.get("name") for event in events) or (settings.whole_units and known is None):
        raise UserError(
            f"the layers that trial {row['trial']} stops must be known by name, and no training of its length was "
            "recorded: choose another, or --as env"
        )
    if settings.mode == "freezeout" or not settings.prefix_autograd:
        what = "a learning rate of each layer" if settings.prefix_autograd else "CAC_PREFIX_AUTOGRAD=0"
        raise UserError(f"trial {row['trial']} has {what}, which lines that freeze cannot express: choose env")
    braking, found = settings.braking_distance, dict[int, tuple[str, ...]]()
    for event in events:
        # In the last step that it brakes a layer does not move; what never trains does not brake.
        step = 0 if event["iteration"] < 0 else event["iteration"] + (braking - 1 if braking else 1)
        if trace is None or known is None:
            found[step] = (event["name"],)
            continue
        ends = {unit.number: unit.end for unit in known.plan.units}
        manual = settings.mode == "manual" or event["layer"] not in ends
        end = known.plan.position_of_stop(event["layer"]) if manual else ends[event["layer"]]
        before = {name for names in found.values() for name in names}
        names = (trace.layer_names[number] for number in known.plan.order[: end + 1])
        found[step] = (*found.get(step, ()), *(name for name in names if name not in before))
    return found


def _torch_lines(config: TrialConfig, frozen: dict[int, tuple[str, ...]], trace: RunTrace | None) -> list[str]:
    settings, norms = config.gradskip_settings(), "isinstance(module, torch.nn.modules.batchnorm._NormBase)"
    lines = ["stops = {  # by number of optimizer steps before which they stop"]
    for step, names in frozen.items():
        line = f"    {step}: {names!r},"
        is_long = len(line) > LINE_WIDTH
        lines += [f"    {step}: (", *(f"        {name!r}," for name in names), "    ),"] if is_long else [line]
    lines.append("}")
    holds = settings.prefix_mode == "eval" or settings.norm_statistics == "hold"
    if settings.braking_distance > 1 or (settings.braking_distance and holds):
        lines.insert(0, f"# Updates that shrink over {settings.braking_distance} steps before a stop are left out.")
    if settings.lr_factor != 1:
        lines.insert(0, f"# Once, before the scheduler is made: group['lr'] *= {settings.lr_factor:g} in every group.")
    if settings.norm_statistics == "hold_all":
        lines += [
            "for module in model.modules():  # after every model.train()",
            f"    if {norms}:",
            "        module.eval()",
        ]
    # What has stopped before a resumed training begins stops at once.
    lines.append("for names in [stops.pop(at) for at in sorted(stops) if at <= step]:  # before the forward pass")
    if trace is None:
        lines += [
            "    every = [name for name, _ in model.named_parameters()]",
            "    names = every[: every.index(names[0]) + 1]",
        ]
    lines += ["    for name in names:", "        model.get_parameter(name).requires_grad_(False).grad = None"]
    each = [
        "for module in model.modules():  # then, and after every model.train(); not of norms without weights",
        "    own = list(module.parameters())",
    ]
    if settings.prefix_mode == "eval":
        lines += [
            "between = []  # modules without weights, which are frozen if frozen weights follow: dropout",
            *each,
            "    if not own:",
            "        between.append(module)",
            "    elif not any(parameter.requires_grad for parameter in own):",
            "        for frozen in [*between, module]:",
            "            frozen.eval()",
            "        between = []",
            "    elif any(parameter.requires_grad for parameter in module.parameters(recurse=False)):",
            "        between = []",
        ]
    elif holds:
        lines += [
            *each,
            f"    if {norms} and own and not any(parameter.requires_grad for parameter in own):",
            "        module.eval()",
        ]
    return lines


def _thawing_lines(config: TrialConfig, frozen: dict[int, tuple[str, ...]], trace: RunTrace | None) -> list[str]:
    if trace is None:
        raise UserError(
            "finetuning-scheduler needs the names of all parameters, which this study has not recorded: choose torch"
        )
    if set(frozen) != {0}:
        raise UserError(
            "finetuning-scheduler thaws layers, so all stops must come before step 0, got "
            f"{', '.join(map(str, frozen))}: choose a trial of --space frozen_prefix, or the format torch"
        )
    trained = zip(trace.layer_names, trace.trains, strict=True)
    rest = [name for name, trains in trained if trains == "1" and name not in frozen[0]]
    return thawing_schedule(config.gradskip_settings(), rest)


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
