"""What a forward cache keeps within its budget, what becomes of its file, and the inputs that switch it off."""

from __future__ import annotations

import copy
import gc
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from prefix_caches import ROW_BYTES, SAMPLES, batches, cache_of, one_warning
from thorough import rest_thorough
from torch import Tensor, nn

from trainables.gradskip.cached_rows import row_checksums

# --- budget and file


@pytest.mark.parametrize(
    ("rows", "kept", "evaluated"), rest_thorough([(39, 0, 30), (40, 40, 0), (1000, 40, 30)], of_several=True)
)
def test_files_stay_under_the_budget(
    model: nn.Module, images: Tensor, rows: int, kept: int, evaluated: int, tmp_path: Path
) -> None:
    """Outputs of the training set, wholly or not at all, come before those of evaluation, which came first here."""
    budget = rows * ROW_BYTES + ROW_BYTES - 1
    with cache_of(model, budget_bytes=budget, folder=tmp_path) as cache, cache.running():
        for epoch in range(3):
            model.eval()
            with torch.no_grad():
                model(-images[:30])
            model.train()
            with (
                nullcontext() if kept or epoch else one_warning("keeps nothing of training: its budget of 10,239 bytes")
            ):
                for indices in batches(epoch):
                    model(images[indices])
        assert (cache.rows(True), cache.rows(False)) == (kept, evaluated)
        assert (cache.hits, cache.misses) == (2 * kept, 3 * SAMPLES - 2 * kept)
        assert cache.bytes == (kept + evaluated) * ROW_BYTES <= budget
        stats = [os.fstat(file._file.fileno()) for file in cache.files.values()]
        assert sum(stat.st_blocks * 512 for stat in stats) <= budget + 4096 * len(stats)
        assert {stat.st_dev for stat in stats} == {os.stat(tmp_path).st_dev}


def open_files(folder: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(str(folder) in os.readlink(link) for link in links if link.is_symlink())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("way", rest_thorough(["close", "collected", "context"]))
def test_the_file_goes_with_the_cache(model: nn.Module, images: Tensor, way: str, tmp_path: Path) -> None:
    cache = cache_of(model, folder=tmp_path)
    with cache.running():
        model(images[:10])
    assert open_files(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []  # without a name: nothing is left behind by a process that is killed
    if way == "close":
        cache.close()
    elif way == "context":
        with cache:
            pass
    else:
        del cache
        gc.collect()
    assert open_files(tmp_path) == 0


def test_a_full_disk_switches_off(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    model[:6].eval()  # type: ignore[index]
    twin = copy.deepcopy(model)
    with cache_of(model, folder=folder) as cache, cache_of(twin) as well:
        folder.rmdir()  # any OSError takes the same way
        with one_warning("forward cache off: no room for its file"), cache.running():
            out = model(images[:9])
        with well.running():
            assert torch.equal(out, twin(images[:9]))
        assert not cache.enabled


# --- off when inputs do not repeat


@pytest.mark.parametrize("size", [1, 7, 40])
def test_augmentation_switches_off_after_an_epoch(model: nn.Module, images: Tensor, size: int) -> None:
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, cache.running():
        for indices in batches(0, size):
            model(images[indices])
        with one_warning("inputs must repeat, but there are more different ones than 40 samples: augmentation"):
            model(images[:size] + 1)
        assert (cache.enabled, cache.hits, cache.bytes) == (False, 0, 0)
        before = copy.deepcopy(twin.state_dict())
        assert torch.equal(model(images[:9]), twin(images[:9]))  # as without a cache, batch statistics and all
        twin.load_state_dict(before)


def test_one_other_bit_is_another_input(model: nn.Module, images: Tensor) -> None:
    other = images[:9].clone()
    other[0, 0, 3, 3] = torch.nextafter(other[0, 0, 3, 3], torch.tensor(9.0))
    with cache_of(model) as cache, cache.running():
        model(images[:9])
        model(other)
        assert (cache.hits, cache.misses) == (8, 10)


def test_inputs_of_several_shapes_have_rows_of_their_own(model: nn.Module) -> None:
    model = nn.Sequential(*list(model)[:8], nn.AdaptiveAvgPool2d(1), nn.Flatten())  # type: ignore[call-overload]
    with cache_of(model) as cache, cache.running():
        for side in (8, 9, 8, 9):
            out = model(torch.ones(4, 1, side, side))
            model.eval()
            assert torch.equal(out, model(torch.ones(4, 1, side, side)))
            model.train()
        assert [len(file) for file in cache.files.values()] == [1, 1]
        assert cache.hits == 8


class Noise(nn.Module):
    """Random in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("odd", [nn.BatchNorm2d(3, track_running_stats=False), Noise()])
def test_a_prefix_whose_rows_do_not_stand_alone_switches_off(odd: nn.Module, images: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), odd, nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(48, 5))
    model[:3].requires_grad_(False)
    with cache_of(model) as cache, cache.running():
        model(images[:9])
        with one_warning("must compute each sample by itself"):
            model(images[3:9])
        assert not cache.enabled


def test_a_checksum_sees_one_bit_and_no_order() -> None:
    rows = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    sums = row_checksums(rows)
    assert torch.equal(row_checksums(rows[[3, 1]]), sums[[3, 1]])
    for dtype in (torch.int32, torch.uint8):
        bits = rows.clone().view(dtype)
        bits[2, 1, 2] ^= 1
        assert (row_checksums(bits.view(torch.float32)) != sums).tolist() == [False, False, True, False, False]
    swapped = rows.flip(2)
    assert (row_checksums(swapped) != sums).all()
