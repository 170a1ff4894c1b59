"""Search spaces, a Python or YAML file each; its stem is the name on the command line. Loads neither torch nor ray."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.space import Space, SpaceContext
from trainables.errors import unknown_name
from trainables.registry import is_factory
from trainables.training.recipe.fields import RECIPE_MEANINGS

#: Stem and a one-line description of each space; its module has the details.
SPACES: dict[str, str] = {
    "auto_thresholds": "Gradient-Skip in auto mode: CAC_VAR_* thresholds, timing, braking distance",
    "braking_distance": "Gradient-Skip in auto mode: the braking distance alone, thresholds fixed",
    "manual_layers": "Gradient-Skip in manual mode: how many stops, through which layers, when",
    "frozen_prefix": "fine-tuning: how many layers to freeze, from when, with what held",
    "stop_rules": "Gradient-Skip's rules against each other (CAC_RULE), each with its settings",
    "pruning_sensitivities": "pruning: one sensitivity a layer",
    "pruning_sensitivities_by_block": "pruning: one sensitivity a block of layers",
    "agp": "automated gradual pruning: final sparsity, start, end and frequency",
    "distillation": "knowledge distillation: temperature, weight and start",
    "central_difference": "differences of the loss as gradients of the last layers: epsilon, when",
    "discrete_gradient": "smallest changes that lower the loss, in the last layers: step, stride, when",
    "straight_through": "gradients through binary activations: estimator, samples, weighting",
    "svrg": "a control variate from snapshots: how often, its coefficient, when",
    "kfac": "Kronecker factors of the curvature: damping, clip, decay, how often",
    "gradient_clustering": "stratified batches over clusters of gradients: how many, how often",
    "importance_sampling": "samples drawn by loss or gradient: score, even share, how often",
    "zero_gradients": "samples with nearly no loss gradient left out of the backward pass",
    "training_recipe": "precision, batch size, kernels, loading, compilation, by the clock",
    "schedule": "a compression schedule of yours: its values marked !search",
}

#: Spaces whose meanings of fields hold in spaces of the user's, too.
_MEANINGS_OF = (
    "agp", "distillation", "central_difference", "svrg", "kfac", "gradient_clustering", "importance_sampling",
    "zero_gradients",
)  # fmt: skip

#: Spaces in YAML that begin with published defaults.
PUBLISHED_STARTS = ("distillation",)

__all__ = ["SPACES", "Space", "SpaceContext", "first_options", "load", "parts_of", "read_files"]

#: Endings of a space's file.
_FILES = (".yaml", ".yml")


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the spaces that are searched together under a name such as ``auto_thresholds+agp``."""
    return tuple(name.split("+"))


def read_files(name: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the YAML files among the spaces of a name, by the file as given; known ones are not read.

    Raises:
        UserError: a file cannot be read.
    """
    files = [part for part in parts_of(name) if part.endswith(_FILES)]
    if not files:
        return {}
    from search_spaces.yaml_space import text_of

    return {file: known[file] if file in known else text_of(file) for file in files}


def load(name: str, files: Mapping[str, str] | None = None, grid: Mapping[str, Any] | None = None) -> Space:
    """Return the space of that name, or several joined by ``+`` that are searched together.

    Args:
        name: of spaces of ours, functions ``package.module:function`` and YAML files, joined by ``+``.
        files: texts of the YAML files; those that are missing are read.
        grid: the points of a grid file, which are the space where they are given.

    Raises:
        UserError: there is no such space (with the nearest name and the list), one of the user's is not valid, or two
            cannot be searched together.
    """
    if grid is not None:
        from search_spaces.grid_file import grid_space

        return grid_space(grid)
    if any(part.endswith(_FILES) or is_factory(part) for part in parts_of(name)):
        return _load_own(name, tuple(read_files(name, files or {}).items()))
    return _together([_load(part, {}) for part in parts_of(name)])


@cache
def _load_own(name: str, files: tuple[tuple[str, str], ...]) -> Space:
    """Return a space with parts of the user's; once, because the ends of all of its branches are checked."""
    from search_spaces.own_space import with_options

    return with_options(_together([_load(part, dict(files)) for part in parts_of(name)]))


def _together(spaces: list[Space]) -> Space:
    if len(spaces) == 1:
        return spaces[0]
    from search_spaces.joined import joined

    return joined(spaces)


def first_options(space: Space, given: Iterable[str]) -> tuple[str, ...]:
    """Return the options of the workload at the space's starting point, beside those given for all trials."""
    if not space.options:
        return tuple(given)
    from search_spaces.own_space import options_at_start

    return options_at_start(space, given)


def _with_meanings(space: Space) -> Space:
    """Return a user's space in which fields that it does not explain have their meanings in ours."""
    known = {field: text for ours in _MEANINGS_OF for field, text in load(ours).meanings.items()}
    return replace(space, meanings={**known, **RECIPE_MEANINGS, **space.meanings})


def _load(name: str, files: Mapping[str, str]) -> Space:
    if name.endswith(_FILES):
        from search_spaces.yaml_space import file_space

        return _with_meanings(file_space(name, files[name]))
    if is_factory(name):
        from search_spaces.own_space import function_space

        return _with_meanings(function_space(name))
    if name not in SPACES:
        raise unknown_name("space", name, SPACES)
    file = Path(__file__).with_name(f"{name}.yaml")
    if file.is_file():
        from search_spaces.yaml_space import file_space

        space = file_space(name, file.read_text(encoding="utf-8"))
        return replace(space, description=SPACES[name], start_is_published=name in PUBLISHED_STARTS)
    space = importlib.import_module(f"search_spaces.{name}").SPACE
    return replace(space, description=SPACES[name])
