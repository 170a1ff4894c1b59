"""A trial's settings in one line, by method: estimator, training recipe, compression schedule, length. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.formatting import plural
from trainables.config import TrialConfig
from trainables.gradients.fields import FIELD_NAMES
from trainables.script.placeholders import EPOCHS_VARIABLE
from trainables.training.recipe.fields import RECIPE_FIELDS


def estimator_text(values: Mapping[str, Any], *, digits: int | None = None) -> str:
    """Return the fields of an estimator as ``--set`` takes them, separated by spaces; empty if none is set.

    ``digits`` are significant digits of numbers, None for all.

    >>> estimator_text({"gradient_layers": ("fc.weight", "fc.bias"), "gradient_epsilon": 0.0123456}, digits=4)
    'gradient_layers=fc.weight,fc.bias gradient_epsilon=0.01235'
    """
    return _assignments(values, FIELD_NAMES, digits)


def recipe_text(values: Mapping[str, Any]) -> str:
    """Return the fields of the recipe as ``--set`` takes them, separated by spaces; empty if none is set.

    >>> recipe_text({"precision": "bfloat16", "fused_optimizer": True, "epochs": 3})
    'precision=bfloat16 fused_optimizer=yes'
    """
    return _assignments(values, RECIPE_FIELDS)


def _assignments(values: Mapping[str, Any], names: Iterable[str], digits: int | None = None) -> str:
    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)

    return " ".join(f"{name}={text(values[name])}" for name in names if values.get(name) is not None)


_AUTOCAST = "with torch.autocast(device.type, dtype=torch.{value}):  # around forward pass and loss"
#: Lines of code by field and value; None: any other value.
_CODE: Mapping[str, Mapping[Any, Sequence[str]]] = {
    "precision": {
        "float16": (
            _AUTOCAST,
            "scaler = torch.amp.GradScaler(device.type)  # once",
            "scaler.scale(loss).backward(); scaler.unscale_(optimizer)  # then clip",
            "scaler.step(optimizer); scaler.update()",
        ),
        "bfloat16": [_AUTOCAST],
    },
    "batch_size": {
        None: ["batch_size = {value}  # learning rate: times batch size over the old one (its square root for Adam)"]
    },
    "clip_grad_norm": {
        None: ["torch.nn.utils.clip_grad_norm_(model.parameters(), {value:g})  # before optimizer.step()"]
    },
    "channels_last": {
        True: (
            "model = model.to(memory_format=torch.channels_last)",
            "images = images.to(device, memory_format=torch.channels_last, non_blocking=True)",
        )
    },
    "fused_optimizer": {
        True: ["optimizer = torch.optim.SGD(..., fused=True)"],
        False: ["optimizer = torch.optim.SGD(..., foreach=True)"],
    },
    "activation_checkpointing": {
        "blocks": ["value = torch.utils.checkpoint.checkpoint(block, value, use_reentrant=False)  # for each block"],
        "cheap": (
            "# for each block, keeping the outputs of large products alone (docs/recipe.md):",
            "value = torch.utils.checkpoint.checkpoint(block, value, use_reentrant=False, context_fn=...)",
        ),
    },
    "loader_workers": {
        0: ["loader = DataLoader(..., num_workers=0)"],
        None: ["loader = DataLoader(..., num_workers={value}, persistent_workers=True)"],
    },
    "cudnn_benchmark": {True: ["torch.backends.cudnn.benchmark = True"]},
    "deterministic": {True: ["torch.use_deterministic_algorithms(True)"]},
    "pin_memory": {None: ["loader = DataLoader(..., pin_memory={value})"]},
}


def recipe_lines(values: Mapping[str, Any]) -> list[str]:
    """Return Python lines that give a script this recipe.

    >>> recipe_lines({"loader_workers": 2, "clip_grad_norm": 0.5})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # before optimizer.step()',
     'loader = DataLoader(..., num_workers=2, persistent_workers=True)']
    """
    lines: list[str] = []
    for name in RECIPE_FIELDS:
        if (value := values.get(name)) is not None:
            code = _CODE.get(name, {})
            lines += [line.format(value=value) for line in code.get(value, code.get(None, ()))]
    return lines


# --- A trial's compression schedule: as plain YAML, and its settings in one line --------------------------------------
# A schedule's text is never shown in full, only its marked values or its number of lines.

#: Suffix of parameter names, omitted in the output.
_WEIGHT = ".weight"
#: Default temperature, weight and first epoch of distillation (`from_config`).
_TEMPERATURE, _DISTILL_WEIGHT, _DISTILL_FROM = 1.0, 0.5, 0


def compresses(config: TrialConfig) -> bool:
    """Return whether a trial's configuration compresses anything, that is, has a schedule with a policy."""
    return config.compresses and bool(_schedule(config)["policies"])


def schedule_text(config: TrialConfig, about: Sequence[str] = ()) -> str:
    """Return the schedule of a configuration that compresses as YAML for a plain training loop, without marks.

    ``about`` are comment lines to begin with, with their number signs. UserError: the schedule cannot be read.
    """
    from trainables.compression.schedule import dump

    return "".join(f"{line}\n" for line in about) + dump(_schedule(config))


def _schedule(config: TrialConfig) -> Mapping[str, Any]:
    from trainables.compression.trial.from_config import schedule_of  # loads pydantic and a YAML reader

    return schedule_of(config)


def compression_text(values: Mapping[str, Any]) -> str:
    r"""Return the compression fields of a configuration in short; empty if none is set.

    Epochs are those of the schedule: from the first that prunes to the one after the last.

    >>> compression_text({"pruning_sensitivities": ("conv1.weight=0.5", "fc.weight=0"), "pruning_start_epoch": 3})
    's: conv1 0.5 from epoch 3'
    >>> compression_text({"agp_final_sparsity": 0.8, "pruning_start_epoch": 0, "pruning_end_epoch": 18})
    'agp 0.8 epochs 0-18 every 1'
    >>> compression_text({"schedule": "version: 1\n", "schedule_values": ("pruners.agp.final_sparsity=0.7",)})
    'final_sparsity=0.7'
    """
    parts = [marks_text(values.get("schedule_values", ()))]
    gradual = "agp_final_sparsity" in values
    if (given := values.get("pruning_sensitivities")) is not None:
        parts.append(f"s: {_sensitivities_text(given)}{'' if gradual else _epochs(values)}")
    if gradual:
        initial = values.get("agp_initial_sparsity")
        begin = f"{initial:g} to " if initial else ""
        parts.append(f"agp {begin}{values['agp_final_sparsity']:g}{_epochs(values)}")
    if any(name.startswith("distill_") for name in values):
        temperature = values.get("distill_temperature", _TEMPERATURE)
        weight, start = (
            values.get("distill_weight", _DISTILL_WEIGHT),
            values.get("distill_start_epoch", _DISTILL_FROM),
        )
        teacher = f" teacher {values['distill_teacher']}" if values.get("distill_teacher") else ""
        parts.append(f"T={temperature:g} w={weight:g} from {start}{teacher}")
    return "; ".join(part for part in parts if part) or ("as scheduled" if "schedule" in values else "")


def _epochs(values: Mapping[str, Any]) -> str:
    """Return the pruning epochs and the pruning frequency as far as they are set."""
    names = ("pruning_start_epoch", "pruning_end_epoch", "pruning_frequency")
    start, end, frequency = (values.get(name) for name in names)
    if start is not None and end is not None:
        return f" epochs {start}-{end} every {frequency or 1}"
    said = ((" from epoch", start), (" to epoch", end), (" every", frequency))
    return "".join(f"{words} {value}" for words, value in said if value is not None)


def _sensitivities_text(texts: Sequence[str]) -> str:
    """Return layers and their sensitivities; a layer with sensitivity 0 is never pruned and is omitted."""
    pairs = [_pair(text) for text in texts]
    return ", ".join(f"{name.removesuffix(_WEIGHT)} {value}" for name, value in pairs if value.strip("0.")) or "none"


def marks_text(texts: Sequence[str]) -> str:
    """Return the values of a schedule's marks, each named by the shortest unambiguous end of its path.

    >>> marks_text(["pruners.a.final_sparsity=0.7", "pruners.b.final_sparsity=0.8", "policies.0.ending_epoch=9"])
    'a.final_sparsity=0.7 b.final_sparsity=0.8 ending_epoch=9'
    """
    pairs = [_pair(text) for text in texts]
    paths = [name.removesuffix(_WEIGHT).split(".") for name, _ in pairs]
    return " ".join(f"{_unambiguous(path, paths)}={value}" for path, (_, value) in zip(paths, pairs, strict=True))


def _unambiguous(path: list[str], paths: Sequence[list[str]]) -> str:
    """Return the shortest end of a path that no other path has and that does not begin with a list index."""
    for length in range(1, len(path)):
        end = path[-length:]
        if not end[0].isdigit() and sum(other[-length:] == end for other in paths) == 1:
            return ".".join(end)
    return ".".join(path)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name, value


def without_files(hold: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return a search's fixed parameters for display in one line; a schedule's text is replaced by its length.

    >>> without_files({"schedule": "version: 1\npolicies: []\n"})
    {'schedule': 'YAML of 2 lines'}
    """
    return {
        name: f"YAML of {plural(len(value.strip().splitlines()), 'line')}" if name == "schedule" else value
        for name, value in hold.items()
    }


def cut_words(row: pd.Series) -> str:
    """Return ``16 of 30 epochs`` for a trial that trains fewer epochs than its study's full run; else empty."""
    full = row.get("of_epochs")
    return "" if full is None or pd.isna(full) else f"{int(row['epochs'])} of {int(full)} epochs"


def length_lines(row: pd.Series) -> list[str]:
    """Return lines for a shell that set a trial's epochs, where these are fewer than the full run's; else none."""
    if not (words := cut_words(row)):
        return []
    return [
        f"# Train {words}, with a learning-rate schedule of that length:",
        f"export {EPOCHS_VARIABLE}={int(row['epochs'])}",
    ]
