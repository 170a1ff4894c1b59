"""Decoded images are Pillow's, kept once, and never half."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from image_files import encoded, noise, write_folder, write_parquet
from PIL import Image

from trainables.errors import UserError
from trainables.workloads.images import store
from trainables.workloads.images.source import find_source
from trainables.workloads.images.store import (
    ImageData,
    Layout,
    open_images,
    read_store,
    write_store,
)

ROOT = Path(__file__).parents[4]
OPEN = """
import sys
from pathlib import Path
from trainables.workloads.images.store import open_images
data = open_images(sys.argv[1], cache=Path(sys.argv[2]), cache_limit_bytes=1e9, image_size=None)
assert "torch" not in sys.modules
(stored,) = Path(sys.argv[2]).glob("*/train.npy")
print(stored.parent.name, stored.stat().st_ino, int(data.pixels["train"][:40].sum()))
"""


def opened(data: Path, cache: Path, image_size: int | None = None, limit_bytes: float = 1e9) -> ImageData:
    return open_images(str(data), cache=cache, cache_limit_bytes=limit_bytes, image_size=image_size)


def all_pixels(data: ImageData, split: str = "train") -> np.ndarray:
    return np.array(data.pixels[split])


def process(data: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, str(data), str(cache)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """130 images of 10x10, as JPEG, in two files."""
    pixels = noise(130, 10)
    for number, part in enumerate((pixels[:90], pixels[90:])):
        images = [encoded(content, "JPEG") for content in part]
        write_parquet(tmp_path / "data" / f"train-{number}.parquet", images, [i % 3 for i in range(len(part))])
    return tmp_path / "data"


def test_small_equal_images_are_kept_as_they_are(small: Path, tmp_path: Path) -> None:
    data = opened(small, tmp_path / "cache")
    assert (data.layout.image_size, data.layout.stored_size, data.layout.as_they_are) == (10, 10, True)
    kept = all_pixels(data)
    for number, content in enumerate(noise(130, 10)):
        path = tmp_path / "one.jpg"
        path.write_bytes(encoded(content, "JPEG"))
        assert np.array_equal(kept[number].transpose(1, 2, 0), np.asarray(Image.open(path)))
    assert data.labels["train"].tolist() == [i % 3 for i in range(90)] + [i % 3 for i in range(40)]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_all_kinds_of_channels_become_three(tmp_path: Path, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8))
    else:
        image = Image.fromarray(noise(1, 8)[0]).convert(mode)
    suffix = "tif" if mode == "CMYK" else "png"
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        image.save(tmp_path / "data" / name / f"x.{suffix}")
    kept = all_pixels(opened(tmp_path / "data", tmp_path / "cache"))
    assert np.array_equal(kept[0].transpose(1, 2, 0), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(("height", "width"), [(70, 90), (120, 66), (65, 65), (20, 31)])
def test_other_images_are_resized_and_cropped(tmp_path: Path, height: int, width: int) -> None:
    pixels = noise(4, height, width)
    write_folder(tmp_path / "data", pixels, ["a", "b", "a", "b"])
    data = opened(tmp_path / "data", tmp_path / "cache", image_size=28)
    assert (data.layout.as_they_are, data.layout.stored_size) == (False, 32)
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    kept = all_pixels(data)
    for number, file in enumerate([0, 2, 1, 3]):
        square = Image.fromarray(pixels[file]).resize(
            (32, 32), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
        )
        assert np.array_equal(kept[number].transpose(1, 2, 0), np.asarray(square))


def test_the_size_without_an_option(tmp_path: Path) -> None:
    for name, pixels, expected in (
        ("equal", [*noise(4, 64)], (64, True)),
        ("unequal", [*noise(3, 20), noise(1, 21)[0]], (20, True)),
        ("oblong", [*noise(4, 20, 30)], (224, False)),
        ("large", [*noise(4, 65)], (224, False)),
        ("icons among photos", [noise(1, 20)[0], *noise(3, 80, 90)], (224, False)),
    ):
        write_folder(tmp_path / name, pixels, ["a", "b", "a", "b"])
        layout = opened(tmp_path / name, tmp_path / "cache").layout
        assert (layout.image_size, layout.as_they_are) == expected, name
        assert layout.stored_size == (expected[0] if expected[1] else 256)


def test_a_later_use_reads_no_image(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(small, tmp_path / "cache")
    monkeypatch.setattr(store, "write_store", None)
    monkeypatch.setattr(store, "choose_layout", None)
    again = opened(small, tmp_path / "cache")
    assert again.digest == first.digest
    assert np.array_equal(all_pixels(again), all_pixels(first))


def test_the_digest_tells_contents_and_not_places(small: Path, tmp_path: Path) -> None:
    def of(folder: Path) -> tuple[str, str]:
        source = find_source(str(folder))
        return source.digest(contents=True), source.digest(contents=False)

    before = of(small)
    shutil.copytree(small, tmp_path / "copy", copy_function=shutil.copy)
    copied = of(tmp_path / "copy")
    assert copied[0] == before[0]
    assert copied[1] != before[1]  # decoded anew
    content = bytearray((small / "train-1.parquet").read_bytes())
    content[100] ^= 1
    (small / "train-1.parquet").write_bytes(content)
    os.utime(small / "train-1.parquet")
    assert not {*of(small)} & {*before}
    (tmp_path / "copy" / "train-1.parquet").rename(tmp_path / "copy" / "train-2.parquet")
    assert not {*of(tmp_path / "copy")} & {*copied}


def test_what_is_half_written_is_written_anew(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = opened(small, cache)
    (folder,), expected = (meta.parent for meta in cache.glob("*/meta.json")), all_pixels(data)

    def cut() -> None:
        content = (folder / "train.npy").read_bytes()
        (folder / "train.npy").write_bytes(content[:-1])

    for spoil in (cut, (folder / "meta.json").unlink, lambda: (folder / "meta.json").write_text("{")):
        spoil()
        partial = cache / f"{folder.name}.partial"
        partial.mkdir()
        (partial / "train.npy").write_bytes(b"half")
        assert read_store(folder, find_source(str(small))) is None
        again = opened(small, cache)
        assert np.array_equal(all_pixels(again), expected)
        assert not partial.exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_second_process_waits_and_uses_what_the_first_wrote(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    opened(small, cache)
    (folder,) = (meta.parent for meta in cache.glob("*/meta.json"))
    shutil.rmtree(folder)
    source = find_source(str(small))
    with FileLock(cache / f"{folder.name}.lock"):
        other = process(small, cache)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        write_store(folder, source, source.open(), Layout(image_size=10, as_they_are=True))
        written = (folder / "train.npy").stat().st_ino
    out, error = other.communicate(timeout=120)
    assert other.returncode == 0, error
    assert int(out.split()[1]) == written


def test_a_corrupt_image_is_named_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = set(threading.enumerate())  # other tests of this process may have left some
    good = [encoded(content, "JPEG") for content in noise(100, 10)]
    for bad, why in ((good[70][:-20], "truncated"), (b"GIF, honestly", "no image format"), (b"", "no image format")):
        path = write_parquet(small / "train-1.parquet", [*good[:70], bad, *good[71:]], [0, 1] * 50)
        with pytest.raises(UserError) as error:
            opened(small, cache)
        assert f"{path}, row 70 (from 0): the image cannot be decoded (" in str(error.value)
        assert why in str(error.value)
        assert "\n" not in str(error.value)
        assert not [p for p in cache.iterdir() if p.is_dir()]
    assert not [thread for thread in set(threading.enumerate()) - before if "ThreadPool" in thread.name]
    write_folder(tmp_path / "photos", noise(4, 20), ["a", "b", "a", "b"])
    broken = tmp_path / "photos" / "a" / "0002.png"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(UserError) as error:
        opened(tmp_path / "photos", cache)
    assert str(error.value).startswith(f"{broken}: the image cannot be decoded")


@contextmanager
def files_up_to(limit_bytes: int) -> Iterator[None]:
    """This process cannot write files beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_cache_that_cannot_be_written(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"image cache must be a folder that can be written: .*file"):
        opened(small, tmp_path / "file")
    with files_up_to(10_000), pytest.raises(UserError, match=r"image cache must .*File too large"):
        opened(small, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert len(all_pixels(opened(small, tmp_path / "cache"))) == 130


def test_images_that_do_not_fit_are_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"GB; cache_limit_gb must be at least that, got 1e-06; a smaller image_size"):
        opened(small, tmp_path / "other", limit_bytes=1000)
    monkeypatch.setattr(store, "SPARE_BYTES", 10**18)
    with pytest.raises(UserError, match=r"the disk of .* GB free: cache=FOLDER names another"):
        opened(small, tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*.npy"))


def test_progress_is_shown_for_what_takes_long(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(small, tmp_path / "quick")
    monkeypatch.setattr(store, "QUIET_S", 0.0)
    monkeypatch.setattr(store, "INTERVAL_S", 0.0)
    opened(small, tmp_path / "slow")
    out, error = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("decoding images: ") for line in error.splitlines() if line)
    assert "64/130" in error
    assert "130/130" in error
