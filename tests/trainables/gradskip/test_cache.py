"""Cached forward passes against the prefix computed by hand: what comes out, what runs and where the chain is cut."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_models import conv_model
from prefix_caches import ROW_BYTES, SAMPLES, batches, cache_of, one_warning, stopped
from thorough import rest_thorough
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables.gradskip.forward_cache import ForwardCache
from trainables.workloads.batch_structure import tensors_in


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
                with cache.running():
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
    model[:6].eval()  # type: ignore[index]
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, one_warning("keeps nothing of training"):
        always = cache_of(twin, budget_bytes=0)
        for epoch, size in enumerate((3, 1, 7, 40, 2)):
            for indices in [*batches(epoch, size)][: 5 if epoch == 0 else None]:
                with cache.running():
                    read = model(images[indices])
                with always.running():
                    computed = twin(images[indices])
                assert torch.equal(read, computed)
        assert cache.hits > 0
        assert always.hits == always.bytes == 0
        always.close()


@pytest.mark.parametrize("dtype", rest_thorough([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("size", rest_thorough([3, 32, 24]))
def test_a_last_batch_rounds_as_it_does_without(size: int, dtype: torch.dtype) -> None:
    """Behind 512 features a linear layer rounds otherwise for fewer than 16 rows, in bfloat16 for other numbers."""
    model = stopped(nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype), 2)
    plain, features = copy.deepcopy(model), torch.randn(SAMPLES, 512).to(dtype)
    with ForwardCache(model, budget_bytes=SAMPLES * 64 * features.element_size(), samples=SAMPLES) as cache:
        for epoch in range(4):
            for indices in batches(epoch, size):
                with cache.running():
                    assert torch.equal(model(features[indices]), plain(features[indices]))
            with cache.running(), torch.no_grad():
                model.eval()
                assert all(torch.equal(model(rows), plain(rows)) for rows in features.split(size + 1))
                model.train()
        assert (cache.hits, cache.rows(True), cache.enabled) == (3 * SAMPLES, SAMPLES, True)


class Sorted(nn.Module):
    """Takes batches sorted by their last feature, of different rows if so asked, and in training a second argument."""

    def __init__(self, *, takes_equal_rows: bool) -> None:
        super().__init__()
        self.takes_equal_rows = takes_equal_rows
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        stopped(self.rest, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if (x[1:, -1] < x[:-1, -1]).any() or (self.training and y is None):
            raise ValueError("not sorted, or without labels")
        if not self.takes_equal_rows and len(x.unique(dim=0)) < len(x):
            raise ValueError("equal rows")
        out: Tensor = self.rest(x)
        return out


@pytest.mark.parametrize("takes_equal_rows", rest_thorough([True, False]))
def test_models_that_do_not_take_any_batch_train_on(takes_equal_rows: bool) -> None:
    model, x = Sorted(takes_equal_rows=takes_equal_rows), torch.randn(40, 8).sort(0).values
    with ForwardCache(model, budget_bytes=10**6) as cache, cache.running():
        for _ in range(3):
            with torch.no_grad():
                for batch in x.split(16):
                    assert torch.equal(model.eval()(batch), model.rest(batch))
            for batch in x.split(16):
                assert torch.equal(model.train()(batch, batch), model.rest(batch))
        assert cache.enabled
        assert cache.hits == (80 if takes_equal_rows else 64)  # a last batch that the copy does not take is not kept


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_rounding_of_half_precision_switches_nothing_off(how: str) -> None:
    blocks = [nn.Sequential(nn.Linear(768, 768), nn.LayerNorm(768), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(768, 2))
    stopped(model, 8 * 4)
    x = torch.randn(130, 768)
    if how == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    plain = copy.deepcopy(model)
    with ForwardCache(model, budget_bytes=10**7) as cache, torch.autocast("cpu", enabled=how == "autocast"):
        for _ in range(3):
            for batch in x.split(64):
                with cache.running():
                    assert torch.equal(model(batch), plain(batch))
        assert (cache.enabled, cache.hits) == (True, 2 * 130)


@pytest.mark.slow
@pytest.mark.thorough
def test_copies_of_the_model_do_not_stay() -> None:
    model = stopped(nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 4)), 2)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one) is nn.Linear for one in gc.get_objects())
        with ForwardCache(model, budget_bytes=10**7) as cache, cache.running():
            for rows in (32, *range(1, 9)):
                model(torch.randn(rows, 512))
        assert sum(type(one) is nn.Linear for one in gc.get_objects()) <= before + 2  # a recorded pass keeps its own
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "modes", rest_thorough([("inference", "inference"), ("inference", "no grad"), ("no grad", "inference")])
)
def test_evaluations_may_be_in_inference_mode(modes: tuple[str, str], model: nn.Module, images: Tensor) -> None:
    plain = copy.deepcopy(model).eval()
    with cache_of(model) as cache, cache.running():
        model(images[:8]).sum().backward()
        for mode in modes:
            with torch.no_grad() if mode == "no grad" else torch.inference_mode():
                for part in (*images[:30].split(8), *images.split(8)):
                    assert torch.equal(model.eval()(part), plain(part))
        assert cache.rows(False) == SAMPLES


def test_gradients_after_the_prefix_are_those_of_the_frozen_model(model: nn.Module, images: Tensor) -> None:
    plain = copy.deepcopy(model)
    with cache_of(model) as cache:
        for epoch in range(2):
            for indices in batches(epoch):
                model.zero_grad()
                with cache.running():
                    loss = model(images[indices]).square().sum()
                loss.backward()
        plain[:6].eval()  # type: ignore[index]
        plain(images[indices]).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not ours.requires_grad), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


# --- what runs


def test_no_kernel_of_the_prefix_runs_on_a_hit(model: nn.Module, images: Tensor) -> None:
    indices = torch.arange(10)
    with cache_of(model) as cache:
        for convolutions in (3, 3, 1):  # computed with the prefix's two, and again for comparison; then read
            with cache.running(), Kernels() as kernels:
                model(images[indices])
            assert kernels.counts["convolution"] == convolutions
        assert "native_batch_norm" not in kernels.counts
        assert cache.last is not None
        assert (cache.last.rows, cache.last.computed) == (10, 0)


def test_norms_in_the_prefix_hold_and_the_others_go_on(images: Tensor) -> None:
    model = stopped(conv_model(), 4).train()  # convolution, norm; the second norm trains
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with cache_of(model) as cache:
        for indices in batches(0):
            with cache.running():
                model(images[indices])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) == name.startswith("1."), name
    assert all(part.training for part in model.modules())


# --- where the chain is cut


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
        ([nn.Dropout(0.5).eval(), nn.ReLU()], 0),
        ([nn.RReLU(), nn.ReLU()], 0),
        ([nn.BatchNorm2d(2, affine=False)], 0),
        ([nn.Upsample(scale_factor=2)], 0),
        ([nn.Flatten(0), nn.ReLU()], 0),
        ([nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1)), nn.Flatten()], 3),
    ],
)
def test_modules_without_parameters_are_added_where_that_is_right(tail: list[nn.Module], through: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), *tail, nn.PReLU())
    model[0].requires_grad_(False)
    cache = cache_of(model)
    cache.update()
    assert cache.cached_through == through
    cache.close()


def test_weights_that_change_under_the_cache_are_noticed(model: nn.Module, images: Tensor) -> None:
    """A checkpoint loaded; the published optimizer, whose momentum moves stopped layers."""
    other = stopped(conv_model(), 7)
    with torch.no_grad():
        other[0].weight.mul_(2)  # type: ignore[index]
    with cache_of(model) as cache, cache_of(other) as fresh:
        with cache.running():
            model(images[:10])
        model.load_state_dict(other.state_dict())
        with cache.running(), fresh.running():
            assert torch.equal(model(images[:10]), other(images[:10]))
        assert cache.hits == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[3].weight.grad = torch.ones_like(model[3].weight)  # type: ignore[index]
        optimizer.step()
        with cache.running():
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
            with cache.running():
                out = model(images[:9])
        assert (cache.cached_through, cache.hits) == (1, 9)
    torch.testing.assert_close(out, model(images[:9]))


# --- evaluation


def test_evaluation_is_that_without_a_cache_bit_for_bit(model: nn.Module, images: Tensor) -> None:
    """Batches of one row and of more, in another order than training's; what changes below the prefix is seen."""
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, cache.running():
        for epoch in range(3):
            model(images[:20])
            with torch.no_grad():
                twin.load_state_dict(model.eval().state_dict())
                for part in images.split((1, 9, 9, 21)):
                    assert torch.equal(model(part), twin.eval()(part))
                    computed = None if cache.last is None else cache.last.computed
                    assert epoch < 2 or len(part) == 1 or computed == 0  # one row rounds otherwise
                model[9].weight.add_(0.1)  # type: ignore[index]
            model.train()
    assert (cache.hits, cache.misses) == (40, 20)  # of training


@pytest.mark.parametrize(("training", "gradients"), [(True, False), (False, True)])
def test_other_passes_stay_untouched(model: nn.Module, images: Tensor, training: bool, gradients: bool) -> None:
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, cache.running(), torch.set_grad_enabled(gradients):
        for _ in range(2):
            assert torch.equal(model.train(training)(images[:10]), twin.train(training)(images[:10]))
        assert (cache.bytes, cache.last) == (0, None)


class Remembers(nn.Module):
    """Returns more in evaluation, or keeps it, or is asked for it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self._how = how

    def forward(self, x: Tensor, *, hidden: bool = False) -> Any:
        y = self.first(x)
        out = self.head(self.second(y))
        if self.training or self._how == "nothing":
            return out
        if self._how == "kept":
            self.last = y
        return (out, y * 2) if hidden or self._how == "returned" else out


@pytest.mark.parametrize("how", ["nothing", "returned", "kept", "asked"])
def test_evaluation_that_reads_more_than_training_computes_it(how: str) -> None:
    torch.manual_seed(0)
    model, x = Remembers(how), torch.randn(6, 4)
    model.first.requires_grad_(False), model.second.requires_grad_(False)
    twin = copy.deepcopy(model).eval()
    asked = {"hidden": True} if how == "asked" else {}
    with cache_of(model, forward=lambda m: m(x).sum()) as cache, cache.running(), torch.no_grad():
        model.eval()
        with nullcontext() if how == "nothing" else one_warning("evaluation runs without it: "):
            for _ in range(3):
                out, expected = model(x, **asked), twin(x, **asked)
                for one, other in zip(tensors_in(out), tensors_in(expected), strict=True):
                    assert torch.equal(one, other)
                assert how != "kept" or torch.equal(model.last, twin.last)  # type: ignore[arg-type]
        assert cache.rows(False) == (6 if how == "nothing" else 0)


def test_objects_that_may_hold_tensors_are_not_inputs(images: Tensor) -> None:
    """A cache of keys and values, say: two passes of equal tensors and other objects are different."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Any) -> Tensor:
            out: Tensor = self.body(x) + state.added
            return out

    model, x = Adds().requires_grad_(False), torch.randn(6, 4)
    with cache_of(model, forward=lambda m: m(x, SimpleNamespace(added=0))) as cache, cache.running():
        for added in (0, 0, 1):
            assert torch.equal(model(x, SimpleNamespace(added=added)), model.body(x) + added)
        assert cache.bytes == 0
