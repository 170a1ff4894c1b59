"""The text workload: its sequences repeat, nothing looks ahead, it learns, and every product of matrices is counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainables.gradskip.layers import make_plan
from trainables.workloads import text
from trainables.workloads.text import (
    BATCH_SIZE,
    BLOCKS,
    CHARACTERS,
    CONTEXT,
    STEPS_PER_EPOCH,
    WIDTH,
    Text,
    _splits,
    _text,
    evaluation_windows,
    learning_rate_share,
    words,
)

#: A block's matrices, in the order of their numbers.
MATRICES = ("attention.qkv", "attention.output", "mlp.0", "mlp.2")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Text().make_model()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits in which each character tells its place."""
    splits = {name: torch.arange(size) for name, size in (("train", 5000), ("validation", 20_001), ("test", 1000))}
    monkeypatch.setattr(text, "_splits", lambda: splits)


def test_splits_are_the_text_in_order_and_share_no_paragraph() -> None:
    whole, splits = _text(), _splits()
    lengths = {name: len(part) for name, part in splits.items()}
    assert sum(lengths.values()) == len(whole) > 200_000
    assert lengths["train"] == pytest.approx(0.8 * len(whole), abs=1)
    assert lengths["validation"] == pytest.approx(lengths["test"], abs=1)
    first, second = lengths["train"], lengths["train"] + lengths["validation"]
    parts = [whole[:first], whole[first:second], whole[second:]]
    # What the cuts go through aside, a paragraph is in one split only, however it is wrapped or indented.
    inner = [{words(paragraph) for paragraph in part.split("\n\n")[1:-1]} for part in parts]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert inner[one]
        assert not inner[one] & inner[other]


@pytest.mark.usefixtures("counting")
def test_evaluation_predicts_no_character_twice() -> None:
    for split, count, size in (("validation", 256, 20_001), ("test", 15, 1000)):
        windows = evaluation_windows(split)
        assert windows.shape == (count, CONTEXT + 1)
        assert torch.equal(windows, windows[:, :1] + torch.arange(CONTEXT + 1))
        predicted = windows[:, 1:].flatten()
        assert len(predicted.unique()) == len(predicted)
        assert int(windows[0, 0]) == 0
        assert size - 3 * CONTEXT <= int(predicted.max()) < size


def test_accuracy_is_the_share_of_characters_predicted() -> None:
    """A model that always says one character is right as often as it occurs."""

    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.zeros_like(x), CHARACTERS + 1).float()

    targets = evaluation_windows("validation")[:, 1:]
    share = float((targets == 0).float().mean())
    assert 0.1 < share < 0.5  # the blank
    assert Text().evaluate(Constant(), "validation", "cpu") == pytest.approx(share, abs=1e-6)


def test_nothing_looks_ahead() -> None:
    network = model().eval()
    x = torch.randint(CHARACTERS, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = network(x)
        for place in (1, CONTEXT // 2, CONTEXT - 1):
            changed = x.clone()
            changed[:, place] = (changed[:, place] + 1) % CHARACTERS
            after = network(changed)
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.allclose(after[:, place], before[:, place])


def test_attention_equals_that_of_torch() -> None:
    attention = model().blocks[0].attention
    x = torch.randn(3, 17, WIDTH, generator=torch.Generator().manual_seed(1))
    theirs = torch.nn.MultiheadAttention(WIDTH, text.HEADS, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(attention.qkv.weight)
        theirs.in_proj_bias.copy_(attention.qkv.bias)
        theirs.out_proj.weight.copy_(attention.output.weight)
        theirs.out_proj.bias.copy_(attention.output.bias)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(17)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(attention(x), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_flops_are_those_of_all_matrix_products(device: str) -> None:
    """Backward twice the forward pass: a product for each of its two factors."""
    network = model().to(device)
    batch = tuple(t.to(device) for t in next(iter(Text().train_batches(0, 0))))
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        loss = Text().loss(network, batch)
    with backward:
        loss.backward()
    weights = BLOCKS * (3 + 1 + 4 + 4) * WIDTH**2 + WIDTH * (CHARACTERS + 1)
    attention = BLOCKS * 2 * CONTEXT * WIDTH  # multiply-adds a character: scores, and their mixture of values
    expected = 2 * BATCH_SIZE * CONTEXT * (weights + attention)
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2 * expected


def test_gradient_skip_can_watch_its_linear_layers_and_blocks() -> None:
    network = model()
    names = [name for name, _ in network.named_parameters()]
    matrices = [f"blocks.{n}.{part}.weight" for n in (0, 1) for part in MATRICES]
    first = ["blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"]
    for watch, layers in (("conv", []), ("TransformerBlock", first), ("linear", [*matrices, "head.weight"])):
        plan = make_plan(list(network.parameters()), (watch,), model=network)
        watched = [names[next(n for n in unit.watched if "norm" not in names[n])] for unit in plan.units]
        assert watched == layers


@pytest.mark.parametrize("total_steps", [1, 2, 30, 900])
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(total_steps: int) -> None:
    workload = Text()
    optimizer = workload.make_optimizer(model().named_parameters())
    scheduler = workload.make_scheduler(optimizer, total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rising = max(1, round(0.05 * total_steps))
    assert max(rates) == rates[rising - 1] == pytest.approx(text.LEARNING_RATE)
    assert all(rates[i] == pytest.approx(text.LEARNING_RATE * (i + 1) / rising) for i in range(rising))
    for step in range(rising, total_steps):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - rising) / (total_steps - rising)))
        assert rates[step] == pytest.approx(text.LEARNING_RATE * cosine)
    assert learning_rate_share(total_steps, total_steps) == pytest.approx(0.0 if total_steps > 1 else 1.0)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_short_training_beats_the_most_frequent_character_clearly() -> None:
    workload, network = Text(), model()
    optimizer = workload.make_optimizer(network.named_parameters())
    scheduler = workload.make_scheduler(optimizer, 2 * STEPS_PER_EPOCH)
    for epoch in range(2):
        for batch in workload.train_batches(epoch, 0):
            optimizer.zero_grad()
            workload.loss(network, batch).backward()
            optimizer.step()
            scheduler.step()
    targets = evaluation_windows("validation")[:, 1:].flatten()
    most_frequent = int(torch.bincount(targets).max()) / len(targets)
    with torch.no_grad():
        assert workload.evaluate(network.eval(), "validation", "cpu") > most_frequent + 0.05
