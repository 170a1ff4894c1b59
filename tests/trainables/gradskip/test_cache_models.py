"""Models that a forward cache leaves as they were, sees through or refuses."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conv_models import conv_model
from prefix_caches import SAMPLES, batches, cache_of, stopped
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import prefix_cuts
from trainables.gradskip.data_parallel import DistributedDataParallel
from trainables.gradskip.forward_cache import ForwardCache
from trainables.gradskip.optimizers import SGD
from trainables.gradskip.settings import Settings

# --- the model stays as it is


def test_the_model_copies_pickles_and_saves_as_ever(model: nn.Module, images: Tensor) -> None:
    state = copy.deepcopy(model.state_dict())
    keys = list(state)
    mine = model[2].forward = model[2].forward  # type: ignore[union-attr, index]  # a forward of the user's own
    with cache_of(model) as cache:
        for _ in range(2):
            with cache.running():
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


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("fullness", ["all", "part"])
def test_compiled_models_are_seen_through(model: nn.Module, images: Tensor, fullness: str) -> None:
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    with cache_of(compiled) as cache, cache_of(plain) as theirs:
        for epoch in range(3):
            for indices in [*batches(epoch)][: None if fullness == "all" else 4]:
                with cache.running(), theirs.running():
                    torch.testing.assert_close(compiled(images[indices]), plain(images[indices]))
        assert cache.hits == theirs.hits > 0


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("how", ["afterwards", "in place", "its parts", "with what calls it"])
def test_models_may_be_compiled_in_any_way(model: Any, images: Tensor, how: str) -> None:
    """The cache was given the model itself; of a function that is compiled with the model in it nothing is kept."""
    twin, called = copy.deepcopy(model), model
    twin[:6].train(how == "with what calls it")
    with cache_of(model) as cache:
        if how == "in place":
            model.compile(backend="eager")
        elif how == "its parts":
            model[3].compile(backend="eager"), model[6].compile(backend="eager")
        else:
            called = torch.compile(model if how == "afterwards" else lambda x: model(x), backend="eager")
        for _ in range(3):
            with cache.running():
                assert torch.equal(called(images[:9]), twin(images[:9]))
        assert cache.hits == (0 if how == "with what calls it" else 18)


@pytest.mark.slow
@pytest.mark.thorough
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
                    with cache.running(), theirs.running():
                        loss, expected = wrapped(images[indices]).sum(), plain(images[indices]).sum()
                    loss.backward(), expected.backward()
            assert cache.hits == theirs.hits == SAMPLES
        assert torch.equal(model[9].weight.grad, plain[9].weight.grad)  # type: ignore[index]
    finally:
        torch.distributed.destroy_process_group()


def test_autocast_has_rows_of_its_own(model: nn.Module, images: Tensor) -> None:
    twin = copy.deepcopy(model)
    twin[:6].eval()  # type: ignore[index]
    with cache_of(model) as cache, cache.running():
        for enabled in (True, False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                assert torch.equal(model(images[:9]), twin(images[:9]))
        assert cache.hits == 18


def test_copies_inside_the_block_are_models_of_their_own(model: nn.Module, images: Tensor) -> None:
    with cache_of(model) as cache, cache.running():
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for _ in range(2):
            model(images[:9])
    for twin in twins:
        assert torch.equal(twin(images[:9]), copy.deepcopy(model)(images[:9]))
        twin[0].weight.data.zero_()
        assert not torch.equal(twin(images[:9]), model(images[:9]))


# --- models of other kinds


def test_a_model_that_is_called_in_parts_runs_without(model: nn.Module, images: Tensor) -> None:
    twin = copy.deepcopy(model)
    with cache_of(model) as cache, cache.running():
        for _ in range(2):
            assert torch.equal(model[1](model[0](images[:9])), twin[1](twin[0](images[:9])))  # type: ignore[operator, index]
        assert (cache.misses, cache.last) == (0, None)


class PastAll(nn.Module):
    """Adds what its first layer returns behind its second one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.drop, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.head(self.drop(self.second(y) + y)), x > 0


@pytest.mark.parametrize("finds", [True, False])
def test_a_read_that_no_recording_shows_switches_it_off(monkeypatch: pytest.MonkeyPatch, finds: bool) -> None:
    if not finds:
        monkeypatch.setattr(prefix_cuts, "_is_cut", lambda recorder, call: call.name == "second")
    model, x = stopped(PastAll(), 2 if finds else 4), torch.randn(9, 4)
    with ForwardCache(model, budget_bytes=10**6) as cache, cache.running():
        for _ in range(2):
            model(x)
        torch.manual_seed(1)
        with nullcontext() if finds else pytest.warns(UserWarning, match="computed before 'second' than its output"):
            read, _ = model(x)
        assert cache.enabled == finds
    torch.manual_seed(1)
    assert torch.equal(read, model(x)[0])


class DroppedTwice(nn.Module):
    """One dropout in front of the first layer, behind the second and behind the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.layers = nn.Dropout(), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, head = self.layers
        x = self.drop(second(first(self.drop(x))))
        return head(self.drop(third(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [2, 3])
def test_a_dropout_of_both_parts_goes_on_dropping(layers: int) -> None:
    """Nothing behind its first call is kept; plain training is the reference."""
    found = []
    for cached in (False, True):
        model, x = DroppedTwice(), torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
        settings = Settings(stop_layer_num=(2 * layers - 1,), stop_layer_itr=(-1,), prefix_mode="eval")
        optimizer = SGD(model.parameters(), lr=0.1, model=model, settings=settings)
        with cache_of(model, forward=None) if cached else nullcontext() as cache:
            for step in range(3):
                torch.manual_seed(step)
                with cache.running() if cache else nullcontext():
                    model(x).square().sum().backward()
                optimizer.step()
        found.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(found[0].values(), found[1].values(), strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 0}, "samples must be an integer >= 1, got 0"),
        ({"budget_bytes": -1}, "budget_bytes must be an integer >= 0, got -1"),
        ({"budget_bytes": 1.5}, r"budget_bytes must be an integer >= 0, got 1\.5"),
        ({"folder": "/no/such/folder"}, "folder must be a folder that exists, got '/no/such/folder': create it"),
    ],
)
def test_arguments_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cache_of(conv_model(), **given)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(UserError, match=r"must not be in DataParallel.*use DistributedDataParallel"):
        cache_of(nn.DataParallel(conv_model()))
