"""Cached forward passes against the prefix computed by hand; what runs, what is kept, and when the cache goes off.

Shapes: 40 samples, images (N, 1, 8, 8), labels (N,) in 0..4. The chain of `conv_model`: convolution, norm, ReLU (0-2),
convolution, norm, ReLU (3-5), convolution, ReLU, flatten, linear (6-9); parameters 0..6 are modules 0, 1, 3 and 4.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_models import conv_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables.errors import UserError
from trainables.gradskip.forward_cache.cache import ForwardCache
from trainables.gradskip.forward_cache.row_file import RowFile, row_checksums
from trainables.gradskip.integrations.data_parallel import DistributedDataParallel
from trainables.gradskip.optimizers import SGD

SAMPLES = 40
#: Bytes of a row after the second block: 4 channels of 4x4 in float32.
ROW_BYTES = 4 * 4 * 4 * 4


@pytest.fixture
def images() -> Tensor:
    return torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(images: Tensor) -> nn.Module:
    """Trained running statistics, parameters 0..6 stopped."""
    model = conv_model().train()
    for part in images.split(10):
        model(part)
    return stopped(model, 7)


def stopped(model: nn.Module, parameters: int) -> nn.Module:
    for parameter in list(model.parameters())[:parameters]:
        parameter.requires_grad_(False)
    return model


def cache_of(model: nn.Module, **more: Any) -> ForwardCache:
    return ForwardCache(model, **{"samples": SAMPLES, "budget_bytes": 10**6, **more})


@contextmanager
def one_warning(pattern: str) -> Iterator[None]:
    """The block warns once, and so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert len(said) == 1, [str(warning.message) for warning in said]
    assert re.search(pattern, str(said[0].message)), said[0].message


def batches(epoch: int, size: int = 7) -> Iterator[Tensor]:
    return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(size))


def by_hand(model: nn.Module, modules: int, x: Tensor) -> Tensor:
    """The first modules of an equal model in eval mode, written with functions, then the others as they are."""
    twin = copy.deepcopy(model).eval()
    for module in list(twin)[:modules]:  # type: ignore[arg-type]
        if isinstance(module, nn.Conv2d):
            x = F.conv2d(x, module.weight.detach(), None if module.bias is None else module.bias.detach())
        elif isinstance(module, nn.BatchNorm2d):
            mean, scale = module.running_mean, (module.running_var + module.eps).rsqrt()  # type: ignore[operator]
            x = (x - mean[:, None, None]) * scale[:, None, None]  # type: ignore[index]
            x = x * module.weight.detach()[:, None, None] + module.bias.detach()[:, None, None]
        else:
            x = x.clamp(min=0)
    return x


class Kernels(TorchDispatchMode):
    """Counts the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# --- what comes out


def test_outputs_are_those_of_the_prefix_in_eval_mode(model: nn.Module, images: Tensor) -> None:
    rest = list(model)[6:]  # type: ignore[call-overload]
    with cache_of(model) as cache:
        for epoch in range(3):
            for indices in batches(epoch):
                with cache.batch(indices):
                    out = model(images[indices])
                expected = by_hand(model, 6, images[indices])
                for module in rest:
                    expected = module(expected)
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert (cache.hits, cache.misses) == (2 * SAMPLES, SAMPLES)
        assert cache.cached_through == 5
        assert cache.bytes == SAMPLES * ROW_BYTES


def test_read_equals_computed_bit_for_bit(model: nn.Module, images: Tensor) -> None:
    """A cache without room always computes; batches of 1, 2, 3, 7 and 40 rows; full, partial and no hits."""
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, one_warning("holds nothing"):
        always = cache_of(twin, budget_bytes=0)
        for epoch, size in enumerate((3, 1, 7, 40, 2)):
            for indices in [*batches(epoch, size)][: 5 if epoch == 0 else None]:
                with cache.batch(indices):
                    read = model(images[indices])
                with always.batch(indices):
                    computed = twin(images[indices])
                assert torch.equal(read, computed)
        assert cache.hits > 0
        assert always.hits == always.bytes == 0
        always.close()


def test_gradients_after_the_prefix_are_those_of_the_frozen_model(model: nn.Module, images: Tensor) -> None:
    plain = copy.deepcopy(model)
    with cache_of(model) as cache:
        for epoch in range(2):
            for indices in batches(epoch):
                model.zero_grad()
                with cache.batch(indices):
                    loss = model(images[indices]).square().sum()
                loss.backward()
        plain[:6].eval()  # type: ignore[index]
        plain(images[indices]).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not ours.requires_grad), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_layout_is_kept(model: nn.Module, images: Tensor, layout: torch.memory_format) -> None:
    model = model.to(memory_format=layout)
    images = images.to(memory_format=layout)
    seen: list[tuple[int, ...]] = []
    model[6].register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))  # type: ignore[operator, index]
    with cache_of(model) as cache:
        for held in ([], [1, 2], [1, 2, 3, 4]):  # computed, in parts, read
            with cache.batch(torch.tensor(held + [5, 6, 7, 8][len(held) :])):
                model(images[:4])
            cache.verify_every = 10**9
            cache.hit_batches = 1
    assert len(set(seen)) == 1


# --- what runs


def test_no_kernel_of_the_prefix_runs_on_a_hit(model: nn.Module, images: Tensor) -> None:
    indices = torch.arange(10)
    with cache_of(model) as cache:
        for convolutions in (5, 1, 1):  # computed, and checked on every other row: twice the prefix's two; then none
            with cache.batch(indices), Kernels() as kernels:
                model(images[indices])
            assert kernels.counts["convolution"] == convolutions
        assert "native_batch_norm" not in kernels.counts
        assert cache.last is not None
        assert (cache.last.rows, cache.last.computed) == (10, 0)


def test_missing_rows_alone_are_computed(model: nn.Module, images: Tensor) -> None:
    rows: list[int] = []
    model[1].register_forward_hook(lambda _, args, __: rows.append(len(args[0])))  # type: ignore[operator, index]
    with cache_of(model) as cache:
        for indices, computed in (([0, 1, 2, 3], 6), ([2, 9, 0, 5], 2), ([9, 8, 1], 2), ([5, 8], 0)):
            with cache.batch(torch.tensor(indices)):
                model(images[indices])
            assert cache.last is not None
            assert cache.last.computed == computed  # 4 and a check of 2; 2; one row runs as two; none
    assert rows[:3] == [4, 2, 2]
    assert (cache.hits, cache.misses) == (2 + 2 + 2, 4 + 2 + 1)


def test_norms_in_the_prefix_hold_and_the_others_go_on(images: Tensor) -> None:
    model = stopped(conv_model(), 4).train()  # convolution, norm; the second norm trains
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with cache_of(model) as cache:
        for indices in batches(0):
            with cache.batch(indices):
                model(images[indices])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) == name.startswith("1."), name
    assert all(part.training for part in model.modules())


# --- where the chain is cut


def test_nothing_stopped_changes_nothing(images: Tensor) -> None:
    model, twin = conv_model(), conv_model()
    with cache_of(model) as cache:
        for indices in batches(0):
            with cache.batch(indices):
                out = model(images[indices])
            assert torch.equal(out, twin(images[indices]))
        assert (cache.cached_through, cache.bytes, cache.last) == (-1, 0, None)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize(
    ("parameters", "through"), [(0, -1), (1, -1), (2, 0), (3, 0), (4, 2), (5, 3), (7, 5), (8, 5), (9, 8), (11, 9)]
)
def test_the_cut_is_the_longest_prefix_without_a_gradient(parameters: int, through: int) -> None:
    """Layer 0 is two parameters, its norm two; ReLU and flatten are added, a half-stopped module is not."""
    cache = cache_of(stopped(conv_model(), parameters))
    cache.update()
    assert cache.cached_through == through
    cache.close()


@pytest.mark.parametrize(
    ("tail", "through"),
    [
        ([nn.ReLU(), nn.MaxPool2d(2)], 2),
        ([nn.ReLU(), nn.Dropout(0.5)], 1),
        ([nn.Dropout2d(0.0), nn.ReLU()], 2),
        ([nn.Dropout(0.5).eval(), nn.ReLU()], 2),
        ([nn.RReLU(), nn.ReLU()], 0),
        ([nn.BatchNorm2d(2, affine=False)], 0),
        ([nn.Upsample(scale_factor=2)], 0),
        ([nn.Flatten(0), nn.ReLU()], 0),
        ([nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1)), nn.Flatten()], 3),
    ],
)
def test_modules_without_parameters_are_added_where_that_is_right(tail: list[nn.Module], through: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), *tail, nn.Linear(3, 3))
    model[0].requires_grad_(False)
    cache = cache_of(model)
    cache.update()
    assert cache.cached_through == through
    cache.close()


def test_a_prefix_that_grows_begins_a_new_cache(model: nn.Module, images: Tensor) -> None:
    indices = torch.arange(12)
    with cache_of(model) as cache:
        for parameters, through in ((7, 5), (9, 8)):
            stopped(model, parameters)
            for _ in range(2):
                with cache.batch(indices):
                    out = model(images[indices])
            assert cache.cached_through == through
        assert (cache.hits, cache.misses) == (24, 24)
        expected = by_hand(model, 8, images[indices])
        torch.testing.assert_close(out, list(model)[9](expected.flatten(1)))  # type: ignore[call-overload]


def test_weights_that_change_under_the_cache_are_noticed(model: nn.Module, images: Tensor) -> None:
    """A checkpoint loaded; the published optimizer, whose momentum moves stopped layers."""
    other = stopped(conv_model(), 7)
    with torch.no_grad():
        other[0].weight.mul_(2)  # type: ignore[index]
    indices = torch.arange(10)
    with cache_of(model) as cache, cache_of(other) as fresh:
        with cache.batch(indices):
            model(images[:10])
        model.load_state_dict(other.state_dict())
        with cache.batch(indices), fresh.batch(indices):
            assert torch.equal(model(images[:10]), other(images[:10]))
        assert cache.hits == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[3].weight.grad = torch.ones_like(model[3].weight)  # type: ignore[index]
        optimizer.step()
        with cache.batch(indices):
            out = model(images[:10])
        torch.testing.assert_close(
            out, nn.Sequential(*list(model)[6:])(by_hand(model, 6, images[:10]))  # type: ignore[call-overload]
        )  # fmt: skip
        assert cache.hits == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_module_may_be_in_the_chain_twice(images: Tensor, shared: bool) -> None:
    torch.manual_seed(0)
    relu = nn.ReLU()
    second = relu if shared else nn.ReLU()
    model = nn.Sequential(nn.Conv2d(1, 3, 3), relu, nn.Conv2d(3, 3, 3), second, nn.Flatten(), nn.Linear(48, 5))
    model[0].requires_grad_(False)
    with cache_of(model) as cache:
        for _ in range(2):
            with cache.batch(torch.arange(9)):
                out = model(images[:9])
        assert (cache.cached_through, cache.hits) == (1, 9)
    torch.testing.assert_close(out, model(images[:9]))


# --- only in training


def test_evaluation_passes_untouched(model: nn.Module, images: Tensor) -> None:
    twin = copy.deepcopy(model)
    indices = torch.arange(10)
    with cache_of(model) as cache:
        with torch.no_grad(), cache.batch(indices):
            assert torch.equal(model(images[:10]), twin(images[:10]))
        model.eval(), twin.eval()
        with cache.batch(indices):
            assert torch.equal(model(images[:10]), twin(images[:10]))
        assert (cache.hits, cache.misses, cache.last) == (0, 0, None)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_rows_of_any_type_come_back(dtype: torch.dtype) -> None:
    rows = (torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    file = RowFile(samples=9, budget_bytes=5 * rows[0].numel() * rows.element_size())
    numbers = torch.tensor([4, 8, 4, 0, 1, 7])  # 4 twice: the first row counts
    file.put(numbers, rows, row_checksums(rows))
    assert file.held(torch.arange(9)).tolist() == [True, True, False, False, True, False, False, True, True]
    assert torch.equal(file.get(torch.tensor([7, 4, 8])), rows[[5, 0, 1]])
    assert torch.equal(file.checksums(torch.tensor([7, 4, 8])), row_checksums(rows)[[5, 0, 1]])
    assert file.room == 0
    file.close()


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


def test_wrong_sample_numbers_switch_off(model: nn.Module, images: Tensor) -> None:
    with cache_of(model) as cache, one_warning("sample numbers that do not belong"):
        for shift in (0, 1):
            with cache.batch(torch.arange(9)):
                model(images[shift : shift + 9])
    assert not cache.enabled


def test_inputs_that_vary_later_are_noticed_within_verify_every(model: nn.Module, images: Tensor) -> None:
    indices = torch.arange(9)
    with cache_of(model, verify_every=4) as cache, one_warning("came with other values"):
        for number in range(20):
            with cache.batch(indices):
                model(images[:9] + (number > 5))
            if not cache.enabled:
                break
    assert number <= 5 + 4


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


# --- the model stays as it is


class Bang(RuntimeError):
    pass


@pytest.mark.parametrize("where", [0, 4, 7])
def test_an_exception_inside_restores_the_model(model: nn.Module, images: Tensor, where: int) -> None:
    def bang(*_: Any) -> None:
        raise Bang

    handle = model[where].register_forward_hook(bang)  # type: ignore[operator, index]
    before = {name: set(part.__dict__) for name, part in model.named_modules()}
    with cache_of(model) as cache:
        with pytest.raises(Bang), cache.batch(torch.arange(9)):
            model(images[:9])
        handle.remove()
        assert {name: set(part.__dict__) for name, part in model.named_modules()} == before
        assert all(part.training for part in model.modules())
        assert (cache.bytes > 0) == (where == 7)  # nothing of a prefix that did not finish
        with cache.batch(torch.arange(9)):
            model(images[:9])
        assert cache.hits == (9 if where == 7 else 0)


def test_the_model_copies_pickles_and_saves_as_ever(model: nn.Module, images: Tensor) -> None:
    state = copy.deepcopy(model.state_dict())
    keys = list(state)
    mine = model[2].forward = model[2].forward  # type: ignore[union-attr, index]  # a forward of the user's own
    with cache_of(model) as cache:
        for _ in range(2):
            with cache.batch(torch.arange(9)):
                out = model(images[:9])
                assert list(model.state_dict()) == keys
        assert model[2].__dict__["forward"] == mine  # type: ignore[index]
        del model[2].forward  # type: ignore[union-attr, index]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(images[:9]), model(images[:9]))
        assert all("forward" not in part.__dict__ for part in model.modules())
        torch.save(model.state_dict(), io.BytesIO())
        after = model.state_dict()
        assert all(torch.equal(after[name], state[name]) for name, _ in model.named_parameters())
    assert out.requires_grad


@pytest.mark.parametrize("fullness", ["all", "part"])
def test_compiled_models_are_seen_through(model: nn.Module, images: Tensor, fullness: str) -> None:
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    with cache_of(compiled) as cache, cache_of(plain) as theirs:
        for epoch in range(3):
            for indices in [*batches(epoch)][: None if fullness == "all" else 4]:
                with cache.batch(indices), theirs.batch(indices):
                    torch.testing.assert_close(compiled(images[indices]), plain(images[indices]))
        assert cache.hits == theirs.hits > 0


@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_data_parallel_processes_are_seen_through(model: nn.Module, images: Tensor, whose: str) -> None:
    plain = copy.deepcopy(model)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        if whose == "ours":
            wrapped: nn.Module = DistributedDataParallel(model, SGD(list(model.parameters()), lr=0.1))
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        with cache_of(wrapped) as cache, cache_of(plain) as theirs:
            for _ in range(2):
                for indices in batches(0):
                    with cache.batch(indices), theirs.batch(indices):
                        loss, expected = wrapped(images[indices]).sum(), plain(images[indices]).sum()
                    loss.backward(), expected.backward()
            assert cache.hits == theirs.hits == SAMPLES
        assert torch.equal(model[9].weight.grad, plain[9].weight.grad)  # type: ignore[index]
    finally:
        torch.distributed.destroy_process_group()


def test_autocast_outputs_are_kept_as_they_are(model: nn.Module, images: Tensor) -> None:
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, one_warning("autocast off after .* autocast on"):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), cache.batch(torch.arange(9)):
                out = model(images[:9])
        twin[:6].eval()  # type: ignore[index]
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(out, twin(images[:9]), rtol=0.05, atol=0.05)
        assert cache.hits == 9
        with cache.batch(torch.arange(9)):
            model(images[:9])


# --- models of other kinds


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.body, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(108, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.body(x)).flatten(1))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_chain_is_given_for_another_model(images: Tensor, by_name: bool) -> None:
    torch.manual_seed(0)
    model = Residual()
    stopped(model, 4)
    twin = copy.deepcopy(model)
    with cache_of(model, chain=["stem", "norm"] if by_name else [model.stem, model.norm]) as cache:
        for _ in range(2):
            with cache.batch(torch.arange(9)):
                out = model(images[:9])
        assert (cache.hits, cache.names) == (9, ["stem", "norm"])
    twin.norm.eval()
    torch.testing.assert_close(out, twin(images[:9]))


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (None, r"chain must be given for a model that is no nn.Sequential, got Residual: list the modules"),
        (["stem", "nrom"], r"unknown module of the forward cache's chain 'nrom': did you mean 'norm'\?"),
        ([], "chain must have at least one module, got none"),
        ([nn.ReLU()], "chain must hold modules of the model, got another ReLU"),
    ],
)
def test_chains_that_are_none(chain: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cache_of(Residual(), chain=chain)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (["stem", "body"], "ran 'norm'|gave 'body' another input than the output before it: give the chain"),
        (["norm", "stem"], "it ran 'stem': give the chain that it runs"),
        (["stem", "norm", "head", "body"], "another input than|ran 'body'"),
    ],
)
def test_a_model_that_does_not_run_the_chain_is_refused(chain: list[str], message: str, images: Tensor) -> None:
    model = Residual()
    model.requires_grad_(False)
    with cache_of(model, chain=chain) as cache:
        with pytest.raises(UserError, match=message), cache.batch(torch.arange(9)):
            model(images[:9])
        assert all("forward" not in part.__dict__ for part in model.modules())


def test_a_forward_pass_that_ends_inside_the_chain_is_refused(model: nn.Module, images: Tensor) -> None:
    with cache_of(model) as cache, pytest.raises(UserError, match="it ended before '2'"):  # noqa: SIM117
        with cache.batch(torch.arange(9)):
            model[1](model[0](images[:9]))  # type: ignore[operator, index]


def test_one_forward_pass_a_batch(model: nn.Module, images: Tensor) -> None:
    with cache_of(model) as cache:
        with pytest.raises(UserError, match=r"it ran twice inside one batch\(\)"), cache.batch(torch.arange(9)):
            model(images[:9]), model(images[:9])
        with (
            pytest.raises(UserError, match=r"batch\(\) was entered inside another one: use one a forward pass"),
            cache.batch(torch.arange(9)),
            cache.batch(torch.arange(9)),
        ):
            pass
        with cache.batch(torch.arange(9)):
            model(images[:9])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 0}, "samples must be an integer >= 1, got 0"),
        ({"budget_bytes": -1}, "budget_bytes must be an integer >= 0, got -1"),
        ({"budget_bytes": 1.5}, r"budget_bytes must be an integer >= 0, got 1\.5"),
        ({"verify_every": 0}, "verify_every must be an integer >= 1, got 0"),
        ({"folder": "/no/such/folder"}, "folder must be a folder that exists, got '/no/such/folder': create it"),
    ],
)
def test_arguments_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cache_of(conv_model(), **given)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(UserError, match=r"must not be in DataParallel.*use DistributedDataParallel"):
        cache_of(nn.DataParallel(conv_model()))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([0, 40]), r"indices must be in 0\.\.39 \(samples=40\), got 0\.\.40"),
        (torch.tensor([-1, 0]), r"indices must be in 0\.\.39 \(samples=40\), got -1\.\.0"),
        (torch.tensor([0.0]), r"must be a 1-D int64 tensor of sample numbers, got torch.float32 of shape \(1,\)"),
        (torch.tensor([[0]]), r"must be a 1-D int64 tensor of sample numbers, got torch.int64 of shape \(1, 1\)"),
        ([0, 1], r"must be a 1-D int64 tensor of sample numbers, got \[0, 1\]"),
        (torch.tensor([0], device="meta"), r"indices must be on the CPU, got meta: take them before"),
        (torch.arange(8), r"one index a row of the model's input, got 8 indices for shape \(9, 1, 8, 8\)"),
    ],
)
def test_indices_of_another_form(model: nn.Module, images: Tensor, indices: Any, message: str) -> None:
    with cache_of(model) as cache, pytest.raises(UserError, match=message):  # noqa: SIM117
        with cache.batch(indices):
            model(images[:9])
