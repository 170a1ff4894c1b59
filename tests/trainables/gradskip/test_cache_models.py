"""Models that a forward cache leaves as they were, sees through or refuses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from conv_models import conv_model
from prefix_caches import SAMPLES, batches, cache_of, one_warning
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip.data_parallel import DistributedDataParallel
from trainables.gradskip.optimizers import SGD

# --- the model stays as it is


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


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (None, r"forward or chain must be given for a model that is no nn.Sequential, got Residual: give a function"),
        ([nn.ReLU()], r"chain must hold modules of the model, got ReLU\(\)"),
        (["stem"], "chain must hold modules of the model, got 'stem'"),
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
    with cache_of(model, chain=[getattr(model, name) for name in chain]) as cache:
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
