"""The base of methods: directions asked for are those taken, and asking leaves no trace."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampled_nets import cross_entropy, gradients_of, noisy_net, table, table_net
from saved_states import round_trip
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from trainables.errors import UserError
from trainables.gradients.gradient_clustering import GradientClustering
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.kfac import KFAC
from trainables.gradients.svrg import SVRG
from trainables.gradients.zero_gradients import ZeroGradients
from trainables.gradskip import optimizers as gradskip
from trainables.gradskip.settings import Settings
from trainables.runtime.isolation import generators_state

COUNT, SIZE = 16, 4
METHODS: dict[str, Callable[..., GradientMethod]] = {
    "sgd": GradientMethod,
    "svrg": lambda *args, **more: SVRG(*args, snapshot_every=3, **more),
    "kfac": lambda *args, **more: KFAC(*args, factor_every=2, inverse_every=4, **more),
    "clustering": lambda *args, **more: GradientClustering(*args, clusters=3, every=3, iterations=1, **more),
    "online": lambda *args, **more: GradientClustering(*args, clusters=3, mode="online", every=3, **more),
    "loss": lambda *args, **more: ImportanceSampling(*args, update_every=2, **more),
    "output_gradient": lambda *args, **more: ImportanceSampling(*args, by="output_gradient", **more),
    "zero": lambda *args, **more: ZeroGradients(*args, threshold=0.8, **more),
    "zero_unbiased": lambda *args, **more: ZeroGradients(*args, threshold=0.8, unbiased=True, **more),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


class Augmented(Dataset[tuple[Tensor, int]]):
    """Samples with noise from the process's three generators."""

    def __init__(self) -> None:
        self.x, self.y = table(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(5, dtype=torch.float64)
        return self.x[number] + noise, int(self.y[number])


def built(method: str = "sgd", optimizer: str = "nesterov", **more: Any) -> GradientMethod:
    torch.manual_seed(1)
    loader = DataLoader(Augmented(), batch_size=SIZE)
    model = noisy_net()
    return METHODS[method](model, cross_entropy, loader, OPTIMIZERS[optimizer](model.parameters()), **more)


def everything(found: GradientMethod) -> bytes:
    """Return weights, buffers, states, gradients, modes and generators, byte by byte."""
    assert found.optimizer is not None
    saved = io.BytesIO()
    torch.save(
        [
            found.model.state_dict(), found.optimizer.state_dict(), found.state_dict(),
            [p.grad for p in found.model.parameters()], [m.training for m in found.model.modules()],
            generators_state(torch.device("cpu")),
        ],
        saved,
    )  # fmt: skip
    return saved.getvalue()


def random_process() -> None:
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_the_direction_asked_for_is_that_of_the_step(method: str, optimizer: str) -> None:
    """With dropout, batch norm and augmentation."""
    found = built(method, optimizer)
    for step in range(6):
        asked = found.grad()
        before = {n: p.detach().clone() for n, p in found.parameters.items()}
        found.step()
        moved = {n: (before[n] - p.detach()) / 0.1 for n, p in found.parameters.items()}
        if step in (1, 5):  # in the others a method renews its snapshot, factors or probabilities, which only steps do
            torch.testing.assert_close(asked, moved, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_measuring_leaves_no_trace(method: str) -> None:
    ends = []
    for measured in (False, True):
        found = built(method)
        found.model[3].eval()  # a part in a mode of its own
        random_process()
        source = torch.Generator().manual_seed(9)
        for _ in range(7):
            found.step()
            if measured:
                before = everything(found)
                found.grad(source)
                found.grad()
                found.gradient(found.draw(source))
                assert everything(found) == before
        ends.append(everything(found))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", METHODS)
def test_it_resumes_bit_for_bit_through_a_file(method: str) -> None:
    whole, first, second = built(method), built(method), built(method)
    for _ in range(9):
        whole.step()
    for _ in range(5):
        first.step()
    states = [first.state_dict(), first.model.state_dict(), first.optimizer.state_dict()]  # type: ignore[union-attr]
    state, weights, optimizer = round_trip(states)
    second.load_state_dict(state)
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(optimizer)  # type: ignore[union-attr]
    for _ in range(4):
        second.step()
    assert second.iteration == whole.iteration == 9
    for one, other in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_steps_are_those_of_a_plain_loop() -> None:
    """On the same batches; the process's generators stay where they are."""
    data, model = table(COUNT), table_net()
    plain = copy.deepcopy(model)
    found = GradientMethod(model, cross_entropy, data, torch.optim.Adam(model.parameters(), lr=0.1), batch_size=SIZE)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    seen = set()
    state = torch.get_rng_state()
    for step in range(5):
        numbers = found.draw(found.generator()).numbers
        assert numbers is not None
        assert len(numbers.unique()) == SIZE
        seen.add(tuple(numbers.tolist()))
        value = found.step()
        loss = F.cross_entropy(plain(data[0][numbers]), data[1][numbers])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(value, loss.detach())
        assert found.iteration == step + 1
    assert torch.equal(state, torch.get_rng_state())
    assert len(seen) == 5
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_without_an_optimizer_the_direction_is_the_gradient() -> None:
    data, model = table(COUNT), table_net()
    found = GradientMethod(model, cross_entropy, data, batch_size=COUNT)
    torch.testing.assert_close(found.grad(), gradients_of(cross_entropy(model, data), model))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UserError, match=r"a step needs an optimizer, got None: give one, such as torch.optim.SGD"):
        found.step()


def test_parameters_that_a_step_leaves_do_not_move_in_the_direction() -> None:
    """Unused ones, those of no group, and those that Gradient-Skip has stopped, under weight decay and momentum."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused, self.ungrouped = table_net(), nn.Linear(2, 2), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.ungrouped(self.body(x))

    model = Partly()
    given = [*model.body.parameters(), *model.unused.parameters()]
    optimizer = gradskip.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, settings=Settings(start_thr=-1))
    found = GradientMethod(model, cross_entropy, table(COUNT), optimizer, batch_size=SIZE)
    for step in range(4):
        if step == 2:
            model.body[0].requires_grad_(False)  # as a stop does
        asked = found.grad()
        assert set(asked) == set(found.parameters)
        before = {n: p.detach().clone() for n, p in found.parameters.items()}
        found.step()
        moved = {n: (before[n] - p.detach()) / 0.1 for n, p in found.parameters.items()}
        torch.testing.assert_close(asked, moved, rtol=1e-9, atol=1e-11)
    assert not asked["body.0.weight"].any()
    assert not asked["unused.weight"].any()
    assert not asked["ungrouped.weight"].any()
    assert asked["body.2.weight"].any()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (GradientMethod, {"batch_size": 0}, f"batch_size must be in 1..{COUNT}, the samples there are, got 0"),
        (GradientMethod, {"batch_size": COUNT + 1}, f"batch_size must be in 1..{COUNT}, the samples there are, got 17"),
        (SVRG, {"alpha": float("nan")}, "alpha must be in [0, 1], got nan"),
        (SVRG, {"snapshot_every": 2.5}, "snapshot_every must be an integer >= 1, got 2.5"),
        (SVRG, {"alpha_end": 0}, "alpha_end must be an integer >= 1, got 0"),
        (KFAC, {"damping": float("nan")}, "damping must be a number > 0, got nan"),
        (KFAC, {"kl_clip": 0.0}, "kl_clip must be a number > 0, or None for no clip, got 0.0"),
        (KFAC, {"decay": 1.0}, "decay must be in [0, 1), got 1.0"),
        (KFAC, {"factor_every": 0}, "factor_every must be an integer >= 1, got 0"),
        (KFAC, {"inverse_every": 0}, "inverse_every must be an integer >= 1, got 0"),
        (KFAC, {"fisher": "emprical"}, "unknown fisher 'emprical': did you mean 'empirical'"),
        (GradientClustering, {"clusters": COUNT + 1}, f"clusters must be in 1..{COUNT}, the samples there are, got 17"),
        (
            GradientClustering,
            {"mode": "offline"},
            "unknown mode of gradient clustering 'offline': did you mean 'online",
        ),
        (GradientClustering, {"every": 0}, "every must be an integer >= 1, got 0"),
        (GradientClustering, {"iterations": 0}, "iterations must be an integer >= 1, got 0"),
        (GradientClustering, {"decay": 1.0}, "decay must be in [0, 1), got 1.0"),
        (ImportanceSampling, {"by": "los"}, "unknown importance 'los': did you mean 'loss'"),
        (ImportanceSampling, {"uniform": 0.0}, "uniform must be in (0, 1], got 0.0"),
        (ImportanceSampling, {"update_every": 0}, "update_every must be an integer >= 1, got 0"),
        (ZeroGradients, {"threshold": float("nan")}, "threshold must be a number above 0, got nan"),
    ],
)
def test_options_out_of_range(method: type[GradientMethod], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        method(table_net(), cross_entropy, table(COUNT), **{"batch_size": SIZE, **options})
    assert message in str(caught.value)


def test_a_model_without_parameters_to_train_is_refused() -> None:
    data = table(COUNT)
    with pytest.raises(UserError, match="the model has no parameter that requires a gradient"):
        GradientMethod(table_net().requires_grad_(False), cross_entropy, data)
