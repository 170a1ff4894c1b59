"""A trial's training recipe in one line, and as lines of code for a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.formatting import percent
from analysis.metrics.quality import quality_of
from analysis.metrics.recipe_effects import recipe_effects
from analysis.quality_words import value_text
from trainables.training.recipe.fields import RECIPE_FIELDS

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
