"""A trial's settings in one line, by method: estimator, training recipe, compression schedule, length. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.formatting import percent, plural, value_text
from analysis.metrics.recipe_effects import recipe_effects
from analysis.metrics.saving import quality_of
from trainables.config import TrialConfig
from trainables.gradients.fields import FIELD_NAMES
from trainables.script.placeholders import EPOCHS_VARIABLE
from trainables.training.recipe.fields import RECIPE_FIELDS


def estimator_text(values: Mapping[str, Any], *, digits: int | None = None) -> str:
    """Return the fields of an estimator as ``--set`` takes them, separated by spaces; empty if none is set.

    Args:
        values: fields of `TrialConfig`; None: not set.
        digits: significant digits of numbers, None for all.

    >>> estimator_text({"gradient_layers": ("fc.weight", "fc.bias"), "gradient_epsilon": 0.0123456}, digits=4)
    'gradient_layers=fc.weight,fc.bias gradient_epsilon=0.01235'
    """
    texts = {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}
    return " ".join(f"{name}={_text(value, digits)}" for name, value in texts.items())


def _text(value: Any, digits: int | None) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)


# --- A trial's training recipe in one line, and as lines of code for a script -----------------------------------------


_AUTOCAST = "with torch.autocast(device.type, dtype=torch.{}):  # around the forward pass and the loss"
#: Lines of code for a field's value.
_CODE: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    "precision": {
        "bfloat16": (_AUTOCAST.format("bfloat16"),),
        "float16": (
            _AUTOCAST.format("float16"),
            "scaler = torch.amp.GradScaler(device.type)  # once",
            "scaler.scale(loss).backward(); scaler.unscale_(optimizer)  # then clip",
            "scaler.step(optimizer); scaler.update()",
        ),
    },
    "channels_last": {
        True: (
            "model = model.to(memory_format=torch.channels_last)",
            "images = images.to(device, memory_format=torch.channels_last, non_blocking=True)",
        )
    },
    "fused_optimizer": {
        True: ("optimizer = torch.optim.{optimizer}(..., fused=True)",),
        False: ("optimizer = torch.optim.{optimizer}(..., foreach=True)",),
    },
    "activation_checkpointing": {
        "blocks": ("value = torch.utils.checkpoint.checkpoint(block, value, use_reentrant=False)  # for each block",),
        "cheap": (
            "# for each block, keeping the outputs of large products alone (docs/recipe.md):",
            "value = torch.utils.checkpoint.checkpoint(block, value, use_reentrant=False, context_fn=...)",
        ),
    },
    "cudnn_benchmark": {True: ("torch.backends.cudnn.benchmark = True",)},
    "deterministic": {True: ("torch.use_deterministic_algorithms(True)",)},
    "pin_memory": {
        True: ("loader = DataLoader(..., pin_memory=True)",),
        False: ("loader = DataLoader(..., pin_memory=False)",),
    },
}

#: What the table of effects holds.
RECIPE_NOTE = (
    "What a choice changes while the rest stays as it is, by least squares over all completed trials: shares of "
    "training time (compilation included) and of peak memory, and the change of the metric. One measurement a trial."
)


def recipe_text(values: Mapping[str, Any]) -> str:
    """Return the fields of the recipe as ``--set`` takes them, separated by spaces; empty if none is set.

    >>> recipe_text({"precision": "bfloat16", "fused_optimizer": True, "epochs": 3})
    'precision=bfloat16 fused_optimizer=yes'
    """
    texts = {name: values[name] for name in RECIPE_FIELDS if values.get(name) is not None}
    return " ".join(
        f"{name}={('yes' if value else 'no') if isinstance(value, bool) else value}" for name, value in texts.items()
    )


def recipe_lines(values: Mapping[str, Any], optimizer: str = "SGD") -> list[str]:
    """Return Python lines that give a script this recipe.

    Args:
        values: fields of `TrialConfig`; None: not set.
        optimizer: class of torch.optim that the script uses.

    >>> recipe_lines({"loader_workers": 2, "compile_mode": "default", "clip_grad_norm": 0.5, "batch_size": 128})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['batch_size = 128  # learning rate: times batch size over the old one (its square root for Adam)',
     'torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # before optimizer.step()',
     'model.compile(mode="default", dynamic=False)  # an nn.Sequential must be inside another module',
     'loader = DataLoader(..., num_workers=2, persistent_workers=True)']
    """
    lines: list[str] = []
    for name in RECIPE_FIELDS:
        value = values.get(name)
        if value is None:
            continue
        if name == "batch_size":
            lines.append(f"batch_size = {value}  # learning rate: times batch size over the old one (its square root "
                         "for Adam)")  # fmt: skip
        elif name == "clip_grad_norm":
            lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {value:g})  # before optimizer.step()")
        elif name == "compile_mode":
            lines.append(
                f'model.compile(mode="{value}", dynamic=False)  # an nn.Sequential must be inside another module'
            )
        elif name == "loader_workers":
            workers = f"num_workers={value}{', persistent_workers=True' if value else ''}"
            lines.append(f"loader = DataLoader(..., {workers})")
        else:
            lines += [line.replace("{optimizer}", optimizer) for line in _CODE.get(name, {}).get(value, ())]
    return lines


def recipe_table(trials: pd.DataFrame) -> list[list[str]]:
    """Return what each choice of the recipe brought as text cells, header first; empty without such choices."""
    effects = recipe_effects(trials)
    if effects.empty:
        return []
    quality = quality_of(trials)
    cells = [["choice", "trials", "time saved", "memory saved", f"change of {quality.name}"]]
    for row in effects.to_dict("records"):
        shares = ("-" if row[name] != row[name] else percent(row[name]) for name in ("time_saved", "memory_saved"))
        change = row["quality_change"]
        told = "-" if change != change else f"{'-' if change < 0 else '+'}{value_text(abs(change), quality)}"
        cells.append([f"{row['field']}={row['value']}", str(row["trials"]), *shares, told])
    return cells


# --- The compression schedule of a trial as plain YAML with all values filled in --------------------------------------


def compresses(config: TrialConfig) -> bool:
    """Return whether a trial's configuration compresses anything, that is, has a schedule with a policy."""
    return config.compresses and bool(_schedule(config)["policies"])


def schedule_text(config: TrialConfig, about: Sequence[str] = ()) -> str:
    """Return the schedule of a configuration that compresses, without marks, after comment lines.

    The YAML can be run by a plain training loop.

    Args:
        config: configuration of a trial.
        about: comment lines, with their number signs.

    Raises:
        UserError: if the schedule cannot be read.
    """
    from trainables.compression.schedule import dump

    comments = "".join(f"{line}\n" for line in about)
    return comments + dump(_schedule(config))


def _schedule(config: TrialConfig) -> Mapping[str, Any]:
    from trainables.compression.trial.from_config import schedule_of  # loads pydantic and a YAML reader

    return schedule_of(config)


# --- A trial's compression settings in one line. Pure; loads no YAML reader -------------------------------------------
# A schedule's text is never shown in full, only its marked values or its number of lines.

#: Fields whose value is the text of a whole file.
WHOLE_FILES = ("schedule",)
#: Suffix of parameter names, omitted in the output.
_WEIGHT = ".weight"
#: Default temperature, weight and first epoch of distillation (`from_config`).
_TEMPERATURE, _DISTILL_WEIGHT, _DISTILL_FROM = 1.0, 0.5, 0


def compression_text(values: Mapping[str, Any]) -> str:
    r"""Return the compression fields of a configuration in short; empty if none is set.

    Epochs are those of the schedule: from the first that prunes to the one after the last.

    Args:
        values: fields of `TrialConfig` that are set.

    >>> compression_text({"pruning_sensitivities": ("conv1.weight=0.5", "fc.weight=0"), "pruning_start_epoch": 3})
    's: conv1 0.5 from epoch 3'
    >>> compression_text({"agp_final_sparsity": 0.8, "pruning_start_epoch": 0, "pruning_end_epoch": 18})
    'agp 0.8 epochs 0-18 every 1'
    >>> compression_text({"distill_temperature": 4.0, "distill_weight": 0.5, "distill_start_epoch": 0})
    'T=4 w=0.5 from 0'
    >>> compression_text({"schedule": "version: 1\n", "schedule_values": ("pruners.agp.final_sparsity=0.7",)})
    'final_sparsity=0.7'
    """
    parts = [
        marks_text(values.get("schedule_values", ())),
        _sensitivities(values),
        _gradual(values),
        _distillation(values),
    ]
    found = "; ".join(part for part in parts if part)
    return found or ("as scheduled" if "schedule" in values else "")


def _sensitivities(values: Mapping[str, Any]) -> str:
    given = values.get("pruning_sensitivities")
    if given is None:
        return ""
    epochs = "" if "agp_final_sparsity" in values else _epochs(values)
    return f"s: {sensitivities_text(given)}{epochs}"


def sensitivities_text(texts: Sequence[str]) -> str:
    """Return layers and their sensitivities; a layer with sensitivity 0 is never pruned and is omitted.

    >>> sensitivities_text(["conv1.weight=0.5", "conv2.weight=0", "fc.weight=0.25"])
    'conv1 0.5, fc 0.25'
    """
    pairs = [_pair(text) for text in texts]
    return ", ".join(f"{name.removesuffix(_WEIGHT)} {value}" for name, value in pairs if value.strip("0.")) or "none"


def _gradual(values: Mapping[str, Any]) -> str:
    if "agp_final_sparsity" not in values:
        return ""
    initial = values.get("agp_initial_sparsity")
    begin = f"{initial:g} to " if initial else ""
    return f"agp {begin}{values['agp_final_sparsity']:g}{_epochs(values)}"


def _epochs(values: Mapping[str, Any]) -> str:
    """Return the pruning epochs and the pruning frequency as far as they are set."""
    start, end = values.get("pruning_start_epoch"), values.get("pruning_end_epoch")
    frequency = values.get("pruning_frequency")
    if start is not None and end is not None:
        return f" epochs {start}-{end} every {frequency or 1}"
    said = "" if start is None else f" from epoch {start}"
    said += "" if end is None else f" to epoch {end}"
    return said + ("" if frequency is None else f" every {frequency}")


def _distillation(values: Mapping[str, Any]) -> str:
    if not any(name.startswith("distill_") for name in values):
        return ""
    teacher = values.get("distill_teacher")
    return (
        f"T={values.get('distill_temperature', _TEMPERATURE):g} w={values.get('distill_weight', _DISTILL_WEIGHT):g} "
        f"from {values.get('distill_start_epoch', _DISTILL_FROM)}" + (f" teacher {teacher}" if teacher else "")
    )


def marks_text(texts: Sequence[str]) -> str:
    """Return the values of a schedule's marks, each named by the shortest unambiguous end of its path.

    >>> marks_text(["pruners.a.final_sparsity=0.7", "pruners.b.final_sparsity=0.8", "policies.0.ending_epoch=9"])
    'a.final_sparsity=0.7 b.final_sparsity=0.8 ending_epoch=9'
    """
    pairs = [_pair(text) for text in texts]
    paths = [name.removesuffix(_WEIGHT).split(".") for name, _ in pairs]
    return " ".join(f"{_last(path, paths)}={value}" for path, (_, value) in zip(paths, pairs, strict=True))


def _last(path: list[str], paths: Sequence[list[str]]) -> str:
    """Return the shortest end of a path that no other path has and that does not begin with a list index."""
    for length in range(1, len(path)):
        end = path[-length:]
        if not end[0].isdigit() and sum(other[-length:] == end for other in paths) == 1:
            return ".".join(end)
    return ".".join(path)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def schedule_summary(text: str) -> str:
    r"""Return a replacement for a schedule's text that fits into one cell or line.

    >>> schedule_summary("version: 1\npolicies: []\n")
    'YAML of 2 lines'
    """
    return f"YAML of {plural(len(text.strip().splitlines()), 'line')}"


def without_files(hold: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search's fixed parameters for display in one line; a whole file is replaced by its length."""
    return {name: schedule_summary(value) if name in WHOLE_FILES else value for name, value in hold.items()}


def field_text(name: str, text: str) -> str:
    """Return a table's field in short form; lists are given as JSON.

    >>> field_text("pruning_sensitivities", '["conv1.weight=0.5"]'), field_text("CAC_STOP_LAYER_NUM", "[3, 9]")
    ('conv1 0.5', '3,9')
    """
    if name in WHOLE_FILES:
        return schedule_summary(text)
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, list):
        return text
    if name == "pruning_sensitivities":
        return sensitivities_text(found)
    return marks_text(found) if name == "schedule_values" else ",".join(map(str, found))


# --- Words and lines for a trial that trains fewer epochs than its study's full run -----------------------------------


def cut_words(row: pd.Series) -> str:
    """Return ``16 of 30 epochs`` for a trial that trains fewer epochs than its study's full run; else empty."""
    full = row.get("of_epochs")
    return "" if full is None or pd.isna(full) else f"{int(row['epochs'])} of {int(full)} epochs"


def length_lines(row: pd.Series) -> list[str]:
    """Return lines for a shell that set a trial's epochs, where these are fewer than the full run's; else none."""
    return shorter_lines(int(row["epochs"]), int(row["of_epochs"])) if cut_words(row) else []


def shorter_lines(epochs: int, of_epochs: int) -> list[str]:
    """Return lines for a shell that set the epochs of a run, fewer than the full run's.

    Args:
        epochs: of the run.
        of_epochs: of the full run.
    """
    return [
        f"# Train {epochs} of {of_epochs} epochs, with a learning-rate schedule of that length:",
        f"export {EPOCHS_VARIABLE}={epochs}",
    ]
