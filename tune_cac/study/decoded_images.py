"""Folder of decoded images: beside the results, so that all studies there share them."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from analysis.io.study_options import RESULTS, results_here
from analysis.presentation.figures.report_data import SampleImage
from trainables.registry import is_factory
from trainables.workload_options import CACHE_VARIABLE, read_options

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def kept_beside(results: str | Path) -> Iterator[None]:
    """Keep decoded images under this folder of results, unless the environment names a folder."""
    if CACHE_VARIABLE in os.environ:
        yield
        return
    os.environ[CACHE_VARIABLE] = str(results_here(results).absolute() / ".images")
    try:
        yield
    finally:
        os.environ.pop(CACHE_VARIABLE, None)


def keeps_decoded_images(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with an argument ``results`` so that decoded images are kept there while it runs."""

    @functools.wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        results: Any = kwargs.get("results", RESULTS)
        with kept_beside(results):
            return function(*args, **kwargs)

    return keeping


# --- Small pictures of the samples that clusters name, for the report -------------------------------------------------

#: Registered workloads whose samples are images, and are there without a download.
_IMAGE_WORKLOADS = ("digits", "images")
#: Maximum side of a picture in pixels; larger images are made smaller.
_MOST_PIXELS = 48


def cluster_images(workload: str, options: Iterable[str], numbers: Iterable[int]) -> dict[int, SampleImage]:
    """Return pictures of training samples by number; none where that fails, for the report does without.

    Args:
        workload: the trial's. Only registered ones of images are built: a user's code is not run for a report.
        options: NAME=VALUE texts of the trial.
        numbers: of the samples.
    """
    options, wanted = tuple(options), sorted(set(numbers))
    if not wanted or workload not in _IMAGE_WORKLOADS or any(map(is_factory, read_options(options).values())):
        return {}
    try:
        return _images(workload, options, wanted)
    except Exception:  # noqa: BLE001  # the data may have gone or have changed in any way
        return {}


def _images(workload: str, options: tuple[str, ...], wanted: list[int]) -> dict[int, SampleImage]:
    import torch

    from trainables.workloads import build

    built = build(workload, options)
    samples = built.samples()
    if samples is None:
        return {}
    wanted = [number for number in wanted if number < samples.count]
    images, *more = samples.batch(torch.tensor(wanted, dtype=torch.int64), torch.Generator().manual_seed(0))
    if not wanted or images.ndim != 4 or images.shape[1] not in (1, 3):
        return {}
    labels: list[Any] = more[0].tolist() if more and more[0].ndim == 1 else [""] * len(wanted)
    if names := getattr(built, "class_names", None):
        labels = [names[label] for label in labels]
    return {n: _picture(pixels, str(label)) for n, pixels, label in zip(wanted, images, labels, strict=True)}


def _picture(pixels: Tensor, label: str) -> SampleImage:
    """Return an image (C, H, W) as a picture, its darkest value black and its brightest white."""
    from PIL import Image

    low, high = pixels.min(), pixels.max()
    bright = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(bright[:, :, 0] if bright.shape[2] == 1 else bright)
    picture.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return SampleImage(label=label, png=file.getvalue(), width=picture.width, height=picture.height)
