"""Samples without loss gradient: the gradient of the rest, the unbiased form, and what is spared."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampled_nets import (
    CLASSES,
    MODEL_NAMES,
    cross_entropy,
    gradients_of,
    models,
    noisy_net,
    table,
    table_net,
    trained,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.zero_gradients import SkippingRows, SlicedBackward, SlicedLayers, ZeroGradients
from trainables.runtime.operator_flops import flop_counter

SAMPLES = 8


def norms_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the distances between probabilities and labels."""
    logits = model(batch[0]).detach()
    return (logits.softmax(1) - F.one_hot(batch[1], logits.shape[1])).norm(dim=1)


def method(model: nn.Module, data: tuple[Tensor, ...], **more: object) -> ZeroGradients:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ZeroGradients(model, cross_entropy, data, optimizer, batch_size=SAMPLES, **more)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_gradient_and_step_are_those_of_the_samples_above_the_threshold(name: str) -> None:
    model, shape = models()[name]
    data = table(SAMPLES, shape)
    norms = norms_of(model, data)
    threshold = float(norms.median()) + 1e-9
    found = method(model, data, threshold=threshold)
    losses = F.cross_entropy(model(data[0]), data[1], reduction="none")
    with flop_counter() as plain:
        expected = gradients_of(((norms >= threshold) * losses).mean(), model)
    torch.testing.assert_close(found.gradient(found.draw(found.generator())), expected)
    found.meter.take()
    with flop_counter() as counter:
        loss = found.step()
    with flop_counter() as forwards, torch.no_grad():
        model(data[0])
    forward = forwards.get_total_flops()
    torch.testing.assert_close(loss, losses.mean().detach())
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, expected)
    spared = -found.meter.take().backward_flops
    assert counter.get_total_flops() - forward == plain.get_total_flops() - spared
    assert spared > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_unbiased_form_has_the_mean_gradient_and_the_expected_share() -> None:
    """Over 1000 seeds; five standard errors of the mean, found from the seeds themselves."""
    model, data = table_net(), table(SAMPLES)
    norms, threshold, seeds = norms_of(model, data), 0.9, 1000
    places = list(model.parameters())
    loss = cross_entropy(model, data)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, places)])
    found, kept = [], []
    for seed in range(seeds):
        with SkippingRows(model, SAMPLES, threshold, seed, SlicedLayers(model)) as rows:
            gradients = torch.autograd.grad(cross_entropy(model, data), places)
        found.append(torch.cat([g.flatten() for g in gradients]))
        kept.append(rows.kept)
    samples = torch.stack(found)
    errors = samples.std(0) / seeds**0.5
    assert bool(((samples.mean(0) - expected).abs() <= 5 * errors + 1e-12).all())
    probabilities = (norms / threshold).clamp(max=1)
    deviation = float((probabilities * (1 - probabilities)).sum()) ** 0.5 / seeds**0.5
    assert abs(sum(kept) / seeds - float(probabilities.sum())) < 5 * deviation


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_tiny_threshold_is_plain_training_bit_for_bit(unbiased: bool) -> None:
    data = table(3 * SAMPLES)
    ends = []
    for kind in (GradientMethod, ZeroGradients):
        torch.manual_seed(3)
        model = noisy_net()
        options = {"threshold": 1e-12, "unbiased": unbiased} if kind is ZeroGradients else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trained = kind(model, cross_entropy, data, optimizer, batch_size=SAMPLES, **options)
        for _ in range(10):
            trained.step()
        ends.append(model.state_dict())
        assert trained.meter.take().backward_flops == 0
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
@pytest.mark.thorough
def test_no_graph_outlives_its_step() -> None:
    """A hook that holds its own tensor is a circle that Python cannot see; a training would grow step by step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    data = (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for kind in (ZeroGradients, ImportanceSampling):
        method = kind(model, cross_entropy, data, optimizer, batch_size=6)
        counts = []
        for _ in range(3):
            for _ in range(20):
                method.step()
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert counts[2] - counts[1] < 20, kind


COUNT = 7


def masked(model: nn.Module, x: Tensor, y: Tensor, keep: list[int]) -> Tensor:
    """Return the mean loss of all samples to which only those of `keep` contribute."""
    mask = torch.zeros(len(x), dtype=torch.float64)
    mask[keep] = 1
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (mask.to(losses) * losses).mean()


def sliced(
    model: nn.Module, x: Tensor, y: Tensor, keep: list[int] | None, value: Callable[..., Tensor] = masked
) -> tuple[dict[str, Tensor], int]:
    """Return gradients of the masked loss by a sliced backward pass, and the FLOPs spared."""
    with SlicedBackward(len(x), SlicedLayers(nn.Module())) as mode:
        loss = value(model, x, y, list(range(len(x))) if keep is None else keep)
        mode.keep = None if keep is None else torch.tensor(keep, dtype=torch.int64)
        return gradients_of(loss, model), mode.spared_flops


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_as_always(reentrant: bool) -> None:
    model, (x, y) = table_net(), table(COUNT)
    x.requires_grad_(reentrant)  # which the reentrant form needs

    def value(model: nn.Module, x: Tensor, y: Tensor, keep: list[int]) -> Tensor:
        assert isinstance(model, nn.Sequential)
        whole = [lambda x: checkpoint(model[:2], x, use_reentrant=reentrant), model[2]]
        mask = torch.zeros(COUNT, dtype=torch.float64)
        mask[keep] = 1
        return (mask * F.cross_entropy(whole[1](whole[0](x)), y, reduction="none")).mean()

    expected = gradients_of(masked(model, x, y, [0, 3]), model)
    with SlicedBackward(COUNT, SlicedLayers(nn.Module())) as mode:
        loss = value(model, x, y, [0, 3])
        mode.keep = torch.tensor([0, 3])
        loss.backward()
    for name, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, expected[name])
    assert mode.spared_flops == (COUNT - 2) * 2 * 2 * 6 * CLASSES  # of the last layer alone


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_takes_the_kept_rows_for_its_batch(affine: bool) -> None:
    """Of a batch of equal halves the first one has its statistics: its gradient is that of training on it alone."""
    layers = (nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3, affine=affine), nn.Tanh(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(12, CLASSES)).double()
    x, y = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1])
    found, _ = sliced(model, torch.cat([x, x]), torch.cat([y, y]), [0, 1, 2])
    alone = gradients_of(F.cross_entropy(model(x), y) / 2, model)  # the mean is over twice as many samples
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient)


#: Samples of a batch, as many as features, steps of a sequence and rows of a table.
B = 6
KEEP = torch.tensor([0, 2, 3])


class Net(nn.Module):
    """Two layers with something between them.

    Args:
        between: (hidden (B, B), second layer) -> (B, classes or more).
        second: None: a linear layer.
    """

    def __init__(self, between: Callable[[Tensor, nn.Module], Tensor], second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(B, B)
        self.second = nn.Linear(B, B) if second is None else second
        self.last = nn.Linear(B, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x)), self.second))


class Table(nn.Module):
    """A linear layer on a parameter with as many rows as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(B, B))
        self.linear = nn.Linear(B, B)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.linear(self.rows).tanh()


def time_first(hidden: Tensor, layer: nn.Module) -> Tensor:
    steps = torch.stack([hidden * scale for scale in (0.5, 1.0, 2.0, -1.0, 0.1, 3.0)])  # (T, B, E), T = B
    found = layer(steps)
    return (found[0] if isinstance(found, tuple) else found).mean(0)


def sorted_within(hidden: Tensor, layer: nn.Module) -> Tensor:
    order = hidden[:, 0].argsort(descending=True)
    return torch.tanh(layer(hidden[order]))[order.argsort()]


AWKWARD: dict[str, Callable[[], Net]] = {
    "transformer, time first": lambda: Net(time_first, nn.TransformerEncoderLayer(B, 2, 8, dropout=0.0)),
    "LSTM, time first": lambda: Net(time_first, nn.Sequential(nn.Linear(B, B), nn.LSTM(B, B))),
    "a table of B rows": lambda: Net(lambda hidden, layer: layer(hidden), Table()),
    "sorted and unsorted": lambda: Net(sorted_within),
    "rolled": lambda: Net(lambda hidden, layer: layer(hidden.roll(1, 0)).tanh().roll(-1, 0)),
    "features first": lambda: Net(lambda hidden, layer: layer(hidden.t()).tanh().t()),
    "attention over the batch": lambda: Net(lambda h, layer: torch.softmax(h @ h.t(), 1) @ layer(h).tanh()),
    "centred by the batch": lambda: Net(lambda hidden, layer: layer(hidden).tanh() - layer(hidden).tanh().mean(0)),
    "compared with all others": lambda: Net(lambda hidden, layer: layer(hidden) @ hidden.t()),
    "flipped images": lambda: Net(
        lambda hidden, layer: layer(hidden.flip(0).view(B, 1, 2, 3)).tanh().flip(0).flatten(1), nn.Conv2d(1, 1, 1)
    ),
}
PLAIN: dict[str, Callable[[], Net]] = {
    "linear": lambda: Net(lambda hidden, layer: torch.relu(layer(hidden))),
    "images": lambda: Net(lambda hidden, layer: layer(hidden.view(B, 1, 2, 3)).tanh().flatten(1), nn.Conv2d(1, 1, 1)),
    "transformer, batch first": lambda: Net(
        lambda hidden, layer: layer(torch.stack([hidden, -hidden], 1)).mean(1),
        nn.TransformerEncoderLayer(B, 2, 8, dropout=0.0, batch_first=True),
    ),
}


def gradients(net: Net, x: Tensor, y: Tensor, layers: SlicedLayers | None) -> tuple[list[Tensor], int]:
    """Gradients of the loss of `KEEP` alone, in a plain backward pass or in one through these rows."""
    mode = SlicedBackward(B, layers or SlicedLayers(net))
    with mode if layers is not None else torch.enable_grad():
        output = net(x)
        weights = torch.zeros(B).index_fill_(0, KEEP, 1.0)
        mode.keep = KEEP
        loss = (F.cross_entropy(output, y, reduction="none") * weights).mean()
        found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found], mode.spared_flops


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, B, generator=generator), torch.randint(0, 3, (B,), generator=generator)


@pytest.mark.parametrize("name", [*AWKWARD, *PLAIN])
def test_gradients_of_some_samples_are_the_unsliced_ones(name: str) -> None:
    torch.manual_seed(1)
    net = {**AWKWARD, **PLAIN}[name]()
    layers = SlicedLayers(net)
    for seed in range(3):
        expected, _ = gradients(net, *batch(seed), None)
        found, spared = gradients(net, *batch(seed), layers)
        torch.testing.assert_close(found, expected)
        assert spared > 0  # the last layer, at least
    assert "last" not in layers.whole
    assert bool(layers.whole) == (name in AWKWARD)
    if name in AWKWARD:
        with pytest.warns(UserWarning, match=r"are not those of the batch's samples, or depend on other samples"):
            layers.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.warn()  # each is named once
