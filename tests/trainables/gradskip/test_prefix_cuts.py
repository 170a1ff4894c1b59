"""Cuts of models that nobody wrote for this project, and of awkward ones, found in a recorded forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thorough import rest_thorough
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainables.errors import UserError
from trainables.gradskip.forward_cache import ForwardCache
from trainables.gradskip.prefix_cuts import Cut, recorded_cuts

ROWS = 6
Inputs = dict[str, Tensor]


def loss(model: nn.Module, batch: Inputs) -> Tensor:
    outputs = model(**batch)
    return outputs.mean() if isinstance(outputs, Tensor) else outputs.loss


def assert_kept_outputs_are_computed_ones(model: nn.Module, batch: Inputs, cut: Cut) -> int:
    """Against the frozen part in evaluation mode by hand; rows are read in another order than they were computed.

    Return how many of an evaluation are kept.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for parameter in (*cut.parameters, *(p for module in cut.modules for p in module.parameters())):
        parameter.requires_grad_(False)
    by_hand = copy.deepcopy(model)
    numbers = torch.arange(ROWS).flip(0)
    again = {name: value[numbers] for name, value in batch.items()}
    with ForwardCache(model, samples=ROWS, budget_bytes=10**8, forward=lambda m: loss(m, batch)) as cache:
        cache.update()
        kept_at = cache.cuts[cache.cached_through]
        for name in kept_at.names:
            by_hand.get_submodule(name).eval()
        for rows in (batch, again, again):
            torch.manual_seed(1)
            with cache.running():
                kept = loss(model, rows)
            torch.manual_seed(1)
            expected = loss(by_hand, rows)
            assert torch.equal(kept, expected), cut.names[-1]
        assert cache.last is not None
        assert (cache.last.rows, cache.last.computed) == (ROWS, 0)
        model.eval(), by_hand.eval()
        with cache.running(), torch.no_grad():
            for rows in (batch, batch, again):
                assert torch.equal(loss(model, rows), loss(by_hand, rows)), cut.names[-1]
        model.train()
        return cache.rows(False)


def transformer(name: str) -> tuple[nn.Module, Inputs]:
    import transformers as t

    torch.manual_seed(0)
    common = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    text: Inputs = {
        "input_ids": torch.randint(5, 90, (ROWS, 8)), "attention_mask": torch.ones(ROWS, 8, dtype=torch.int64),
        "labels": torch.arange(ROWS) % 2,
    }  # fmt: skip
    text["attention_mask"][2:, 6:] = 0
    image: Inputs = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS) % 2}
    if name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(vocab_size=100, **common)), text
    if name == "gpt2":
        tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        config: Any = t.GPT2Config(n_embd=16, n_layer=3, n_head=2, **tokens)
        return t.GPT2ForSequenceClassification(config), text
    if name == "vit":
        return t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **common)), image
    if name == "swin":
        config = t.SwinConfig(image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
        return t.SwinForImageClassification(config), image
    config = t.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 2, 1, 1], drop_path_rate=0.2)
    return t.ConvNextForImageClassification(config), image


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("bert", ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler"]),
        pytest.param("gpt2", ["transformer.h.0", "transformer.h.2", "transformer.ln_f"], marks=pytest.mark.thorough),
        pytest.param("vit", ["vit.embeddings", "vit.layers.0", "vit.layers.2"], marks=pytest.mark.thorough),
        pytest.param("swin", ["swin.encoder.layers.0.downsample", "swin.layernorm"], marks=pytest.mark.thorough),
        pytest.param(
            "convnext",
            ["convnext.embeddings", "convnext.encoder.stages.1.layers.0", "convnext.encoder.stages.3"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_blocks_of_transformers_models_are_cuts(name: str, some: list[str]) -> None:
    model, batch = transformer(name)
    cuts = {cut.names[-1]: cut for cut in recorded_cuts(model, lambda m: loss(m, batch))}
    assert set(some) <= set(cuts)
    for part in some:
        # What GPT-2 returns holds the keys and values of all blocks.
        assert assert_kept_outputs_are_computed_ones(model, batch, cuts[part]) == (0 if name == "gpt2" else ROWS)


class Awkward(nn.Module):
    """Three layers of width 4 and a head, run as a function of the user's says."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.act, self.idle = nn.ReLU(inplace=True), nn.Identity()
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def _branching(m: Any, x: Tensor) -> Tensor:
    x = m.b(m.a(x))
    return m.head(m.c(x) if x.mean() > -1e9 else x)


#: How it runs, and the names of the last modules of its cuts. Behind numbers that decide there is none.
AWKWARD: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "functions between": (lambda m, x: m.head(torch.tanh(m.b(F.relu(m.a(x)) * 2) + 1)), ["a", "b", "head"]),
    "a connection past b": (lambda m, x: m.head(m.c((y := m.a(x)) + m.b(y))), ["a", "c", "head"]),
    "a connection past all": (lambda m, x: m.head((y := m.a(x)) + m.c(m.b(y))), ["a", "head"]),
    "the input again": (lambda m, x: m.head(m.b(m.a(x)) + x), ["a", "b", "head"]),
    "a layer three times": (lambda m, x: m.head(m.a(m.a(m.a(x)))), ["a", "a", "a", "head"]),
    "in place": (lambda m, x: m.head(m.b(m.act(m.a(x)))), ["a", "act", "b", "head"]),
    "numbers decide": (_branching, ["a", "b"]),
    "shapes decide": (lambda m, x: m.head(m.b(y) if len(y := m.a(x)) < 99 else y), ["a", "b", "head"]),
    "an operation of one's own": (lambda m, x: m.head(Twice.apply(m.b(m.a(x)))), ["a", "b", "head"]),
    "a parameter beside modules": (lambda m, x: m.head(m.b(m.a(x) * m.scale)), ["a", "b", "head"]),
    "a function in place": (lambda m, x: m.head(m.b(F.relu(m.a(x), inplace=True))), ["a", "b", "head"]),
    "a shortcut that returns its input": (lambda m, x: m.head(m.idle(y := m.a(x)) + m.b(y)), ["a", "head"]),
    "the same after what it goes past": (lambda m, x: m.head(m.b(y := m.a(x)) + m.idle(y)), ["a", "head"]),
    "in place, and the old name again": (lambda m, x: m.head(m.b(m.act(y := m.a(x))) + y), ["a", "head"]),
    "in place, the result ignored": (lambda m, x: m.head(m.b((y := m.a(x), m.act(y))[0])), ["a", "b", "head"]),
    "a view of what is written into": (lambda m, x: _through_a_view(m, x), ["a", "head"]),
    "something before the input": (lambda m, x: m.head(m.b(m.c(torch.ones(ROWS, 4)) + m.a(x))), ["b", "head"]),
    "columns before rows": (lambda m, x: m.head(m.b(m.a(x).repeat(2, 1))[:ROWS]), ["a", "head"]),
    "computed again": (
        lambda m, x: m.head(m.c(checkpoint(lambda t: m.b(m.a(t)), x, use_reentrant=False))),
        ["c", "head"],
    ),
    "written into": (lambda m, x: m.head(_zeroed(m.b(m.a(x)))), ["a", "b", "head"]),
}


def _through_a_view(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(ROWS, 4)
    view = buffer.view(-1)
    buffer[:] = m.a(x)
    return m.head(m.b(x) + view.view(ROWS, 4))


def _zeroed(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return x


@pytest.mark.parametrize("how", rest_thorough(AWKWARD))
def test_awkward_models_have_the_cuts_that_are_right(how: str) -> None:
    run, expected = AWKWARD[how]
    torch.manual_seed(0)
    model, batch = Awkward(run), {"x": torch.randn(ROWS, 4)}
    cuts = recorded_cuts(model, lambda m: loss(m, batch))
    assert [cut.names[-1] for cut in cuts] == expected
    for cut in cuts:
        if cut.names[-1] == "head":  # nothing is left to train
            continue
        assert_kept_outputs_are_computed_ones(model, batch, cut)
    if how == "a parameter beside modules":
        assert [[id(p) for p in cut.parameters if p is model.scale] for cut in cuts] == [[], *[[id(model.scale)]] * 2]


def test_a_hook_that_reads_what_its_module_got_is_seen() -> None:
    model, batch = Awkward(lambda m, x: m.head(m.b(m.a(x)))), {"x": torch.randn(ROWS, 4)}
    model.b.register_forward_hook(lambda _, args, output: output + args[0])
    cuts = recorded_cuts(model, lambda m: loss(m, batch))
    assert [cut.names[-1] for cut in cuts] == ["a", "head"]
    assert_kept_outputs_are_computed_ones(model, batch, cuts[0])


def test_a_parameter_beside_modules_that_trains_ends_the_prefix() -> None:
    model = Awkward(AWKWARD["a parameter beside modules"][0])
    for module in (model.a, model.b):
        module.requires_grad_(False)
    x = torch.randn(ROWS, 4)
    with ForwardCache(model, samples=ROWS, budget_bytes=10**6, forward=lambda m: m(x)) as cache:
        cache.update()
        assert cache.cuts[cache.cached_through].names[-1] == "a"
        model.scale.requires_grad_(False)
        cache.update()
        assert cache.cuts[cache.cached_through].names[-1] == "b"


def test_what_runs_twice_or_keeps_nothing_is_refused() -> None:
    model = Awkward(lambda m, x: m.head(m.a(x)))
    with pytest.raises(UserError, match="forward must run the model once, got 2 calls of Awkward"):
        recorded_cuts(model, lambda m: m(torch.randn(2, 4)) + m(torch.randn(2, 4)))
    with pytest.raises(UserError, match=r"a copy of Awkward .* could not be run: ZeroDivisionError: "):
        recorded_cuts(Awkward(lambda m, x: m.a(x) / (1 // 0)), lambda m: m(torch.randn(2, 4)))
    with pytest.raises(UserError, match="no output of a module of Awkward can be kept"):
        recorded_cuts(Awkward(lambda m, x: F.linear(x, m.head.weight)), lambda m: m(torch.randn(2, 4)))


def test_another_order_in_a_later_step_switches_off() -> None:
    model = Awkward(lambda m, x: m.head(m.b(m.a(x)) if m.training_order else m.a(m.b(x))))
    model.training_order = True
    for module in (model.a, model.b):
        module.requires_grad_(False)
    x = torch.randn(ROWS, 4)
    with ForwardCache(model, budget_bytes=10**6, forward=lambda m: m(x)) as cache, cache.running():
        for _ in range(3):
            model(x)
        model.training_order = False
        with pytest.warns(UserWarning, match="must run its modules in the same order in each pass, but it ran 'b'"):
            out = model(x)
    assert torch.equal(out, model(x))
