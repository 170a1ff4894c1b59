"""Fields of a configuration that say how a run is executed: the training recipe. Loads no torch.

They may go with any method and belong to the run, not to the method: a baseline has them, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import is_number

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
#: Number formats of the forward and backward pass; the weights stay float32.
PRECISIONS = (FLOAT32, BFLOAT16, FLOAT16)
CHEAP, BLOCKS = "cheap", "blocks"
#: What is computed again in the backward pass instead of being kept: all of a block but its large products, or all.
CHECKPOINTING = (CHEAP, BLOCKS)
#: Modes of torch.compile.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class RecipeFields:
    """Fields of the training recipe (`RECIPE_MEANINGS`); None: the default that each names."""

    precision: str | None = None  # `PRECISIONS` (torch.amp). None: float32
    batch_size: int | None = None  # >= 1. None: the workload's own
    clip_grad_norm: float | None = None  # above 0. None: no clipping
    activation_checkpointing: str | None = None  # `CHECKPOINTING`. None: nothing
    channels_last: bool | None = None  # of weights and images. None: False
    fused_optimizer: bool | None = None  # False: a kernel an operation (foreach). None: torch's choice
    compile_mode: str | None = None  # `COMPILE_MODES`. None: not compiled
    loader_workers: int | None = None  # >= 0. None: the workload's choice, 0 where its data lies in memory
    pin_memory: bool | None = None  # transfers from there overlap the computation. None: True on a GPU
    cudnn_benchmark: bool | None = None  # the fastest need not repeat bit for bit. None: False
    deterministic: bool | None = None  # an error where there is no such algorithm. None: False


#: Names of the fields.
RECIPE_FIELDS = tuple(field.name for field in fields(RecipeFields))
#: Fields that change when a batch is ready, and never what it holds.
OF_LOADING = ("loader_workers", "pin_memory")
#: Fields with which each parameter gets the gradient of the workload's own loss, in float32.
BESIDE_ESTIMATORS = (*OF_LOADING, "batch_size", "cudnn_benchmark", "deterministic", "fused_optimizer", "channels_last")
#: Meanings of the fields in tables.
RECIPE_MEANINGS = {
    "precision": "number format of the forward and backward pass",
    "batch_size": "samples of a step; the learning rate follows it",
    "clip_grad_norm": "largest norm of all gradients together",
    "activation_checkpointing": "what is computed again in the backward pass instead of being kept",
    "channels_last": "whether the channels are the innermost dimension",
    "fused_optimizer": "whether an optimizer step is one kernel",
    "compile_mode": "mode of torch.compile",
    "loader_workers": "processes that prepare batches",
    "pin_memory": "whether batches lie in page-locked memory",
    "cudnn_benchmark": "whether cuDNN times its algorithms and takes the fastest",
    "deterministic": "whether only deterministic algorithms are allowed",
}


def recipe_of(config: Any) -> dict[str, Any]:
    """Return the fields of the recipe that a configuration sets, by name."""
    return {name: value for name in RECIPE_FIELDS if (value := getattr(config, name)) is not None}


def changes_results(config: Any) -> dict[str, Any]:
    """Return the fields of the recipe that a configuration sets and that change what is computed."""
    return {name: value for name, value in recipe_of(config).items() if name not in OF_LOADING}


def check_recipe(config: Any, estimator: str | None) -> None:
    """Raise UserError for a value out of range, or fields that exclude each other or the gradient estimator."""
    given = recipe_of(config)
    if not given:
        return
    choices = {"precision": PRECISIONS, "activation_checkpointing": CHECKPOINTING, "compile_mode": COMPILE_MODES}
    lowest = {"batch_size": 1, "loader_workers": 0}
    for name, value in given.items():
        if name in choices:
            if value not in choices[name]:
                raise unknown_name(name, str(value), choices[name])
        elif name in lowest:
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest[name]:
                raise UserError(f"{name} must be an integer >= {lowest[name]}, got {value!r}")
        elif name == "clip_grad_norm":
            if not (is_number(value) and value > 0):
                raise UserError(f"{name} must be a number above 0, got {value!r}: leave it out for no clipping")
        elif not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, got {value!r}")
    if config.cudnn_benchmark and config.deterministic:
        raise UserError(
            "cudnn_benchmark must be False with deterministic=True, got True: the fastest algorithm is measured anew "
            "in each run; leave one of them out"
        )
    if config.fused_optimizer and config.precision == FLOAT16 and "gradskip" in config.method:
        raise UserError(
            "fused_optimizer must be False with precision=float16 and Gradient-Skip, got True: a fused step hides from "
            "the rule that it was skipped for an overflow; leave fused_optimizer out, or take precision=bfloat16"
        )
    if config.compile_mode is not None and config.activation_checkpointing is not None:
        raise UserError(
            f"activation_checkpointing must be left out with compile_mode, got {config.activation_checkpointing}: the "
            "compiler itself chooses what is computed again"
        )
    for name in ("compile_mode", "activation_checkpointing", "precision"):
        if config.forward_cache_mb and name in given and given[name] != FLOAT32:
            raise UserError(
                f"forward_cache_mb must be 0 with {name}={given[name]}, got {config.forward_cache_mb}: the outputs of "
                "layers are kept as a plain forward pass makes them; leave one of them out"
            )
    if estimator is None:
        return
    for name in given:
        if name not in BESIDE_ESTIMATORS and (name, given[name]) != ("precision", FLOAT32):
            raise UserError(
                f"method {config.method} computes gradients of its own in float32, got {name}={given[name]}: leave "
                f"{name} out, or choose another method"
            )
