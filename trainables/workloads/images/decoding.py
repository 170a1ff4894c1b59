"""Decodes images to pixels of one size.

Shapes: an image is (C=3, T, T) uint8 in the order red, green, blue; T is the stored side. Training and evaluation
inputs have the side S <= T (``image_size``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainables.errors import UserError
from trainables.workloads.images.source import Encoded, ImageSplit

#: Square images of one size are stored unresized up to this side, in pixels.
SMALL_SIDE = 64
#: Reading of sizes ends after this many images that are no such squares, if there are more of them than of squares.
_MANY_OTHERS = 1000
#: S of other images unless specified, in pixels.
LARGE_IMAGE_SIZE = 224
#: T / S of images that are resized: 256 / 224, as in the evaluation of He et al. 2016 (their section 3.4, after
#: Krizhevsky et al. 2012).
STORED_SHARE = 256 / 224
#: Images processed at a time.
CHUNK_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The stored form of images."""

    image_size: int
    """S: width and height of the model's inputs, in pixels."""
    as_they_are: bool
    """True if images are stored without resizing; then T = S, and the few of another size are resized to it."""
    note: str = ""
    """One sentence on changes to images that a user may not expect; empty for none."""

    @property
    def stored_size(self) -> int:
        """Return T, the width and height of a stored image, in pixels."""
        return self.image_size if self.as_they_are else round(self.image_size * STORED_SHARE)

    @property
    def image_bytes(self) -> int:
        """Return the bytes of a stored image."""
        return 3 * self.stored_size**2


def choose_layout(splits: Mapping[str, ImageSplit], image_size: int | None) -> Layout:
    """Choose a layout without resizing if more than half of the images are squares of one side up to `SMALL_SIDE`.

    Args:
        splits: read as far as needed: `CHUNK_IMAGES` of each, or all sizes if half of these are small.
        image_size: S, or None for the images' own side, or else `LARGE_IMAGE_SIZE`.

    Raises:
        UserError: an image whose size cannot be read.
    """
    sizes, places = _sizes(splits)
    squares = {size: count for size, count in sizes.items() if size[0] == size[1] <= SMALL_SIDE}
    common = max(squares, key=lambda size: squares[size], default=(0, 0))
    others = sum(sizes.values()) - sizes[common]
    if sizes[common] > others and image_size in (None, common[0]):
        side = common[0]
        note = ""
        if others:
            odd = next(size for size in sizes if size != common)
            note = (
                f"{others} of {sum(sizes.values())} images are not {side}x{side} as the others ({places[odd]} is "
                f"{odd[0]}x{odd[1]}): their shorter side is brought to {side} and the square in the middle is kept; "
                "image_size=S chooses a size for all"
            )
        return Layout(image_size=side, as_they_are=True, note=note)
    longest = max((max(size) for size in sizes), default=LARGE_IMAGE_SIZE)
    if image_size is not None or longest > SMALL_SIDE:
        return Layout(image_size=image_size or LARGE_IMAGE_SIZE, as_they_are=False)
    note = (
        f"the images are at most {longest} pixels long, of no common square size, and are enlarged to "
        f"{LARGE_IMAGE_SIZE}x{LARGE_IMAGE_SIZE}: image_size={min(min(size) for size in sizes)} keeps them small"
    )
    return Layout(image_size=LARGE_IMAGE_SIZE, as_they_are=False, note=note)


def _sizes(splits: Mapping[str, ImageSplit]) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], str]]:
    """Count the images of each width and height, in the order in which they occur, and record the first one's place.

    Stops early where most images are large, which is sufficient to know.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], str] = {}
    for split in splits.values():
        for start, chunk in split.chunks(CHUNK_IMAGES):
            for number, encoded in enumerate(chunk, start=start):
                with _blamed(split, number), Image.open(_file(encoded)) as image:
                    size = image.size
                sizes[size] += 1
                places.setdefault(size, split.place(number))
            seen, large = sizes.total(), sum(count for size, count in sizes.items() if max(size) > SMALL_SIDE)
            others = seen - max((sizes[size] for size in sizes if size[0] == size[1] <= SMALL_SIDE), default=0)
            if 2 * large > seen or (others >= _MANY_OTHERS and 2 * others > seen and large):
                return sizes, places
    return sizes, places


def decode_rows(
    split: ImageSplit, indices: Sequence[int], encoded: Sequence[Encoded], layout: Layout
) -> NDArray[np.uint8]:
    """Decode images to pixels (B, 3, T, T).

    Args:
        split: gives the place of an image for messages.
        indices: numbers of the images in the split.
        encoded: the images.
        layout: T.

    Raises:
        UserError: an image that cannot be decoded, with its place.
    """
    side = layout.stored_size
    pixels = np.empty((len(encoded), 3, side, side), dtype=np.uint8)
    for row, (index, image) in enumerate(zip(indices, encoded, strict=True)):
        with _blamed(split, index):
            pixels[row] = decode(image, layout)
    return pixels


def decode(encoded: Encoded, layout: Layout) -> NDArray[np.uint8]:
    """Decode one image to pixels (3, T, T); raise what Pillow raises.

    If an image is resized, its shorter side becomes T (bilinear over all source pixels of a target pixel, also called
    antialias), and the central square is kept.
    """
    with Image.open(_file(encoded)) as image:
        rgb = image.convert("RGB")
    side = layout.stored_size
    if not layout.as_they_are or rgb.size != (side, side):
        width, height = rgb.size
        shorter = min(width, height)
        width, height = (max(side, round(length * side / shorter)) for length in (width, height))
        left, top = (width - side) // 2, (height - side) // 2
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + side, top + side))
    return np.asarray(rgb).transpose(2, 0, 1)


def _file(encoded: Encoded) -> BytesIO | str:
    return BytesIO(encoded) if isinstance(encoded, bytes) else str(encoded)


@contextmanager
def _blamed(split: ImageSplit, index: int) -> Iterator[None]:
    """Convert what Pillow raises into a UserError of one line with the image's place."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{split.place(index)}: the image file is gone") from error
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        said = "no image format that Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else said
        raise UserError(
            f"{split.place(index)}: the image cannot be decoded ({said}): replace it or leave it out"
        ) from (error)
