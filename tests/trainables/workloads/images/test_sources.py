"""Which files are read as which images, and what is said about those that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import encoded, noise, write_folder, write_parquet

from trainables.errors import UserError
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.source import find_source
from trainables.workloads.images.store import ImageData, default_cache, open_images
from trainables.workloads.images.workload import count_classes, hold_out

LABELS = [0, 1, 2, 0, 1, 2, 0]


def opened(data: Path, image_size: int | None = None) -> ImageData:
    return open_images(str(data), cache=default_cache(), cache_limit_bytes=1e9, image_size=image_size)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))


def refused(call: Callable[[], object], *parts: object) -> None:
    """One line that names all of these."""
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    for part in parts:
        assert str(part) in str(error.value)


@pytest.mark.parametrize(
    ("train", "others", "splits"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], ["test-0.parquet"], {"train", "test"}),
        (["data/train-0.parquet"], ["data/validation-0.parquet", "data/test-0.parquet"],
         {"train", "validation", "test"}),
        (["train/0000.parquet"], ["val/0000.parquet"], {"train", "validation"}),
        (["train.parquet"], [], {"train"}),
    ],
)  # fmt: skip
def test_parquet_files_by_split(tmp_path: Path, train: list[str], others: list[str], splits: set[str]) -> None:
    pixels = noise(14, 8)
    for number, name in enumerate(train):
        write_parquet(tmp_path / name, pixels[7 * number : 7 * number + 7], LABELS)
    for name in others:
        write_parquet(tmp_path / name, pixels[:7], LABELS)
    found = find_source(str(tmp_path)).open()
    assert set(found) == splits
    assert found["train"].labels.tolist() == LABELS * len(train)
    read = [image for _, chunk in found["train"].chunks(3) for image in chunk]
    assert read == [encoded(content) for content in pixels[: 7 * len(train)]]


def test_rows_are_in_order_across_files_and_row_groups(tmp_path: Path) -> None:
    pixels = noise(20, 8)
    write_parquet(tmp_path / "train-0.parquet", pixels[:13], [0] * 13, group_rows=4)
    write_parquet(tmp_path / "train-1.parquet", pixels[:0], pa.array([], pa.int64()))
    write_parquet(tmp_path / "train-2.parquet", pixels[13:], [1] * 7, group_rows=3)
    split = find_source(str(tmp_path)).open()["train"]
    assert [image for _, chunk in split.chunks(3) for image in chunk] == [encoded(content) for content in pixels]
    assert split.place(12).endswith("train-0.parquet, row 12 (from 0)")
    assert split.place(13).endswith("train-2.parquet, row 0 (from 0)")


def test_names_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    kind = pa.struct([("bytes", pa.binary())])
    images = pa.array([{"bytes": encoded(content)} for content in noise(2, 8)], kind)
    pq.write_table(pa.table({"fine_label": [1, 0], "labels": [0, 1], "image": images}), path)
    assert find_source(str(path)).open()["train"].labels.tolist() == [0, 1]
    pq.write_table(pa.table({"fine_label": [1, 0], "coarse_label": [0, 0], "image": images}), path)
    assert find_source(str(path)).open()["train"].labels.tolist() == [1, 0]
    pq.write_table(pa.table({"label": [1, 0], "image": images.field("bytes")}), path)
    ((_, chunk),) = find_source(str(path)).open()["train"].chunks(2)
    assert chunk == [encoded(content) for content in noise(2, 8)]


def test_an_image_without_bytes(tmp_path: Path) -> None:
    rows = [encoded(noise(1, 8)[0]), {"bytes": None, "path": "gone.png"}]
    path = write_parquet(tmp_path / "train.parquet", rows, [0, 1])
    refused(lambda: opened(path), path, "row 1", "an image must have bytes")


def test_an_unlabelled_test_split_is_none(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", noise(4, 8), [0, 1, 0, 1])
    write_parquet(tmp_path / "test-0.parquet", noise(2, 8), [-1, -1])
    assert set(opened(tmp_path).labels) == {"train"}


def test_folders_by_class(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "photos", noise(5, 8), ["dog", "cat", "dog", "ant", "cat"])
    (root / "cat" / "notes.txt").write_text("no image")
    (root / ".thumbnails").mkdir()
    (root / "dog" / "deeper").mkdir()
    (root / "dog" / "deeper" / "z.PNG").write_bytes(encoded(noise(1, 8)[0]))
    source = find_source(str(root))
    split = source.open()["train"]
    assert split.labels.tolist() == [0, 1, 1, 2, 2, 2]
    assert [Path(split.place(i)).name for i in range(6)] == [
        "0003.png", "0001.png", "0004.png", "0000.png", "0002.png", "z.PNG"
    ]  # fmt: skip


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_folders_by_split(tmp_path: Path, validation: str) -> None:
    write_folder(tmp_path / "train", noise(4, 8), ["a", "b", "c", "c"])
    write_folder(tmp_path / validation, noise(2, 8), ["c", "a"])
    write_folder(tmp_path / "test", noise(1, 8), ["b"])
    found = find_source(str(tmp_path)).open()
    assert {name: split.labels.tolist() for name, split in found.items()} == {
        "train": [0, 1, 2, 2], "validation": [0, 2], "test": [1]
    }  # fmt: skip


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    refused(lambda: find_source(str(tmp_path / "nowhere")), "does not exist", tmp_path / "nowhere")
    refused(lambda: find_source(str(tmp_path)), tmp_path, "neither Parquet files", "folders of images by class")
    write_folder(tmp_path / "val", noise(1, 8), ["d"])
    refused(lambda: find_source(str(tmp_path)), "needs a folder train", "val")
    (tmp_path / "train").mkdir()
    refused(lambda: find_source(str(tmp_path)), tmp_path / "train", "for each class")
    write_folder(tmp_path / "train", noise(2, 8), ["a", "b"])
    refused(lambda: find_source(str(tmp_path)), tmp_path / "val" / "d", "lacks", "a, b")
    (tmp_path / "train" / "d").mkdir()
    refused(lambda: find_source(str(tmp_path)), tmp_path / "train" / "d", "it has none")
    (tmp_path / "val" / "d" / "0000.png").unlink()
    (tmp_path / "train" / "d").rmdir()
    (tmp_path / "val" / "d").rmdir()
    refused(lambda: opened(tmp_path), "validation is empty", tmp_path)


def test_parquet_files_that_do_not_fit(tmp_path: Path) -> None:
    data = tmp_path / "data"
    path = write_parquet(data / "test-0.parquet", noise(2, 8), [0, 1])
    refused(lambda: opened(data), "train-*.parquet", "test-0.parquet")
    train = data / "train-0.parquet"
    train.write_bytes(path.read_bytes()[:-20])
    refused(lambda: opened(data), data, "has a Parquet file that cannot be read", train.name)
    write_parquet(train, noise(2, 8), [0, 1], image="picture")
    refused(lambda: opened(data), train, "needs a column img or image", "picture, label")
    write_parquet(train, noise(2, 8), [0, 1], label="class")
    refused(lambda: opened(data), train, "needs a column label or labels or fine_label", "img, class")
    write_parquet(train, noise(2, 8), [0, 1])
    write_parquet(path, noise(0, 8), pa.array([], pa.int64()))
    refused(lambda: opened(data), data, "test is empty")
    pq.write_table(pa.table({"img": ["a", "b"], "label": [0, 1]}), train)
    refused(lambda: opened(data), train, "column img", "struct with bytes", "string")


@pytest.mark.parametrize(
    ("labels", "parts"),
    [
        ([0, 1, None], ("row 2", "must be an integer", "null")),
        ([0.0, 1.0, 0.5], ("column label", "must hold integers", "double")),
        (["a", "b", "a"], ("column label", "must hold integers", "string")),
        ([0, -1, 1], ("row 1", "must be in 0..1", "got -1")),
    ],
)
def test_labels_that_are_none(tmp_path: Path, labels: list[object], parts: tuple[str, ...]) -> None:
    path = write_parquet(tmp_path / "train-0.parquet", noise(3, 8), labels)
    refused(lambda: count_classes(opened(tmp_path), None), path, *parts)


def test_labels_and_the_number_of_classes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train-0.parquet", noise(4, 8), [0, 1, 2, 1])
    test = write_parquet(tmp_path / "test-0.parquet", noise(2, 8), [0, 3])
    refused(lambda: count_classes(opened(tmp_path), None), test, "row 1", "0..2 for 3 classes", "got 3")
    test.unlink()
    data = opened(tmp_path)
    assert count_classes(data, None) == count_classes(data, 3) == 3
    refused(lambda: count_classes(data, 2), path, "row 2", "0..1 for 2 classes", "got 2")
    refused(lambda: count_classes(data, 10), "images of all 10 classes", "none has label 3, 4, 5, 6, 7:")
    write_parquet(path, noise(4, 8), [0, 2, 2, 0])
    refused(lambda: count_classes(opened(tmp_path), None), "none has label 1:", "without gaps")
    write_parquet(path, noise(2, 8), [0, 0])
    refused(lambda: count_classes(opened(tmp_path), None), "at least 2 classes")


def test_validation_is_taken_class_by_class() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], [100, 40, 5, 1]))
    train, validation = hold_out(labels, 0.1)
    assert sorted([*train, *validation]) == list(range(146))
    assert np.bincount(labels[validation], minlength=4).tolist() == [10, 4, 1, 0]
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    assert np.array_equal(hold_out(labels, 0.1)[1], validation)
    # Chosen from all over, not the first of each class.
    assert validation.mean() > 40
    with pytest.raises(UserError, match="there is one training image"):
        hold_out(np.zeros(1), 0.1)
