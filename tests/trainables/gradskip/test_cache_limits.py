"""What a forward cache keeps within its budget, what becomes of its file, and the inputs that switch it off."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
from prefix_caches import ROW_BYTES, SAMPLES, batches, cache_of, one_warning
from torch import Tensor, nn

from trainables.gradskip.forward_cache import VERIFY_EVERY, row_checksums

# --- budget and file


@pytest.mark.parametrize("rows", [1, 13, 39, 40, 1000])
def test_the_file_stays_under_the_budget(model: nn.Module, images: Tensor, rows: int, tmp_path: Path) -> None:
    budget = rows * ROW_BYTES + ROW_BYTES - 1
    held = min(rows, SAMPLES)
    with cache_of(model, budget_bytes=budget, folder=tmp_path) as cache:
        for epoch in range(2):
            for indices in batches(epoch):
                with cache.batch(indices):
                    model(images[indices])
        assert (cache.hits, cache.misses) == (held, 2 * SAMPLES - held)
        assert cache.bytes == held * ROW_BYTES <= budget
        stat = os.fstat(cache.rows._file.fileno())  # type: ignore[union-attr]
        assert stat.st_size == held * ROW_BYTES
        assert stat.st_blocks * 512 <= -(-budget // 4096) * 4096
        assert stat.st_dev == os.stat(tmp_path).st_dev


def open_files(folder: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(str(folder) in os.readlink(link) for link in links if link.is_symlink())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("way", ["close", "collected", "context"])
def test_the_file_goes_with_the_cache(model: nn.Module, images: Tensor, way: str, tmp_path: Path) -> None:
    cache = cache_of(model, folder=tmp_path)
    with cache.batch(torch.arange(10)):
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
    twin = copy.deepcopy(model)
    with cache_of(model, folder=folder) as cache, cache_of(twin) as well:
        folder.rmdir()  # any OSError takes the same way
        with one_warning("forward cache off: no room for its file"), cache.batch(torch.arange(9)):
            out = model(images[:9])
        with well.batch(torch.arange(9)):
            assert torch.equal(out, twin(images[:9]))
        assert not cache.enabled


# --- off when inputs do not repeat


@pytest.mark.parametrize("size", [1, 7, 40])
def test_augmentation_switches_off_at_the_first_hit(model: nn.Module, images: Tensor, size: int) -> None:
    twin = copy.deepcopy(model)
    with cache_of(model) as cache:
        for indices in batches(0, size):
            with cache.batch(indices):
                model(images[indices])
        indices = next(batches(1, size))
        noisy = images[indices].clone()
        noisy[0, 0, 3, 3] = torch.nextafter(noisy[0, 0, 3, 3], torch.tensor(9.0))
        with (
            one_warning(f"sample {indices[0]} came with other values"),
            cache.batch(indices),
        ):
            out = model(noisy)
        assert torch.equal(out, twin(noisy))  # as without a cache, batch statistics and all
        assert (cache.enabled, cache.hits, cache.bytes, cache.last) == (False, 0, 0, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with cache.batch(indices):
                assert torch.equal(model(noisy), twin(noisy))


def test_inputs_that_vary_later_are_noticed(model: nn.Module, images: Tensor) -> None:
    indices = torch.arange(9)
    with cache_of(model) as cache, one_warning("came with other values"):
        for number in range(2 * VERIFY_EVERY):
            with cache.batch(indices):
                model(images[:9] + (number > 5))
            if not cache.enabled:
                break
    assert number <= 5 + VERIFY_EVERY


def test_another_shape_switches_off(model: nn.Module) -> None:
    model[9] = nn.LazyLinear(5)  # type: ignore[operator, index]
    model = nn.Sequential(*list(model)[:8], nn.AdaptiveAvgPool2d(1), nn.Flatten())  # type: ignore[call-overload]
    with cache_of(model) as cache:
        with cache.batch(torch.arange(4)):
            model(torch.ones(4, 1, 8, 8))
        with one_warning(r"inputs must be alike, got rows of shape \(1, 9, 9\)"):  # noqa: SIM117
            with cache.batch(torch.arange(4)):
                assert model(torch.ones(4, 1, 9, 9)).shape == (4, 4)


class Noise(nn.Module):
    """Random in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("odd", [nn.BatchNorm2d(3, track_running_stats=False), Noise()])
def test_a_prefix_whose_rows_do_not_stand_alone_switches_off(odd: nn.Module, images: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), odd, nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(48, 5))
    model[:3].requires_grad_(False)
    twin = copy.deepcopy(model)
    with cache_of(model) as cache:
        with one_warning("must compute each sample by itself"), cache.batch(torch.arange(9)):
            out = model(images[:9])
        assert not cache.enabled
        assert cache.last is not None
        assert cache.last.computed == 9 + 5 + 9
    if not isinstance(odd, Noise):
        assert torch.equal(out, twin(images[:9]))


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
