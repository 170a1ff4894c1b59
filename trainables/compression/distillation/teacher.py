"""The teacher model of distillation: built by name, by the user's function, or like the student; and its weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.model_copies import bare_copy
from trainables.compression.schedule.distiller_configs import KnowledgeDistillationConfig
from trainables.compression.schedule.names import without_parallel
from trainables.errors import UserError, unknown_name
from trainables.runtime.checkpoint_file import CHECKPOINT_FILE
from trainables.runtime.generators import kept_generators
from trainables.workloads.models import MODELS, build_model
from trainables.workloads.user_code import import_attribute

#: The name of a teacher with the student's architecture.
SAME = "same"
#: Keys under which a checkpoint may store the weights.
_WEIGHTS = ("model", "state_dict", "model_state_dict")
#: Number of names that a message lists in full; the rest are counted.
_NAMED = 3
#: Seed for initial weights, so that a resumed run without loaded weights has the same teacher.
_SEED = 0


def build_teacher(
    settings: KnowledgeDistillationConfig, student: nn.Module, make_model: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Build the teacher on the CPU with its weights; the states of the random generators are restored.

    Args:
        settings: ``teacher`` is a name of `trainables.workloads.models.MODELS`, built for the student's input channels
            and classes; or ``package.module:function``, called with ``num_classes`` and ``channels`` if its signature
            has them and, if ``pretrained``, with ``pretrained=True``; or ``same`` or None for the student's
            architecture.
        student: the model that will be trained; not changed.
        make_model: builds a fresh model of the student's architecture. None: a copy of the student is used.

    Raises:
        UserError: the teacher is unknown or cannot be built, or the checkpoint is missing or does not fit.
    """
    devices = {parameter.device for parameter in student.parameters()}
    with kept_generators(devices):
        torch.default_generator.manual_seed(_SEED)
        teacher = _built(settings, student, make_model)
    if settings.checkpoint is not None:
        load_weights(teacher, settings.checkpoint)
    elif not settings.pretrained:
        warnings.warn(
            f"the teacher {settings.teacher} has neither checkpoint nor pretrained weights: unless its function loads "
            "some, the student learns from random scores",
            stacklevel=2,
        )
    return teacher


def _built(
    settings: KnowledgeDistillationConfig, student: nn.Module, make_model: Callable[[], nn.Module] | None
) -> nn.Module:
    name = settings.teacher or SAME
    if ":" in name:
        return _called(name, student, pretrained=settings.pretrained)
    if name != SAME and name not in MODELS:
        raise unknown_name("teacher", name, [*MODELS, SAME, "package.module:function"])
    if settings.pretrained:
        raise UserError(
            f"there are no pretrained weights for the teacher {name}: give a checkpoint, or "
            "package.module:function that loads some"
        )
    if name == SAME:
        return bare_copy(student) if make_model is None else make_model()
    channels, classes = _channels(student), _classes(student)
    if channels is None or classes is None:
        raise UserError(
            f"the teacher {name} is built for the student's input channels and classes, but the student has no "
            f"{'convolution' if channels is None else 'linear layer'} to tell them: give package.module:function"
        )
    return build_model(name, classes, channels=channels)


def _called(name: str, student: nn.Module, *, pretrained: bool) -> nn.Module:
    function = import_attribute(name, "teacher")
    if not callable(function):
        raise UserError(f"teacher {name} must be a function or a class, got {type(function).__name__}")
    sizes = {"num_classes": _classes(student), "channels": _channels(student)}
    try:
        named = set(inspect.signature(function).parameters)
    except ValueError:  # written in C
        named = set()
    arguments: dict[str, Any] = {key: size for key, size in sizes.items() if key in named and size is not None}
    if pretrained:
        arguments["pretrained"] = True
    try:
        teacher = function(**arguments)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"teacher {name} must be built by calling it, which raised {told}") from error
    if not isinstance(teacher, nn.Module):
        raise UserError(f"teacher {name} must return an nn.Module, got {type(teacher).__name__}")
    return teacher


def _channels(student: nn.Module) -> int | None:
    """Return the input channels of the first convolution, or None."""
    return next((int(m.in_channels) for m in student.modules() if isinstance(m, nn.Conv2d)), None)


def _classes(student: nn.Module) -> int | None:
    """Return the outputs of the last linear layer, or None."""
    widths = [int(module.out_features) for module in student.modules() if isinstance(module, nn.Linear)]
    return widths[-1] if widths else None


def load_weights(teacher: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint's weights into a teacher.

    A ``module`` that a parallel wrapper added to names is ignored on both sides.

    Args:
        teacher: its parameters and buffers are overwritten.
        checkpoint: a file with a state dict, or with a dict that has one under ``model``, ``state_dict`` or
            ``model_state_dict``, such as tune_cac's checkpoints; or the folder of a tune_cac checkpoint.

    Raises:
        UserError: the file is missing, not a checkpoint, or has weights of another architecture.
    """
    weights = _read(Path(checkpoint))
    own = teacher.state_dict()
    names = {without_parallel(name): name for name in own}
    found = {names.get(without_parallel(name), name): value for name, value in weights.items()}
    complaints = [
        _listed("it lacks", [name for name in own if name not in found]),
        _listed("the teacher has no", [name for name in found if name not in own]),
        _listed(
            "of another shape are",
            [
                f"{name} {list(value.shape)} for {list(own[name].shape)}"
                for name, value in found.items()
                if name in own and value.shape != own[name].shape
            ],
        ),
    ]
    if any(complaints):
        raise UserError(
            f"teacher checkpoint {checkpoint} does not fit the teacher: {'; '.join(c for c in complaints if c)}"
        )
    teacher.load_state_dict(found)


def _read(path: Path) -> Mapping[str, Tensor]:
    """Return a checkpoint's tensors by name."""
    file = path
    if path.is_dir():
        file = path / CHECKPOINT_FILE
    if not file.is_file():
        raise UserError(f"teacher checkpoint {path}: there is no such file")
    rule = f"teacher checkpoint {path} must hold tensors by name, as torch.save(model.state_dict(), file) writes them"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"{rule}, but reading it raised {type(error).__name__}: {first}") from error
    if isinstance(content, Mapping):
        content = next((content[key] for key in _WEIGHTS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping):
        raise UserError(f"{rule}, got {type(content).__name__}")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        raise UserError(f"{rule}, got {_listed('no tensors as', others) or 'nothing'}")
    return content


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what} {', '.join(names[:_NAMED])}{more}"
