"""`CAC_PREFIX_MODE=eval`, against plain torch loops that call ``eval()`` on the stopped blocks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_models import conv_batches
from loops import equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings


class Block(nn.Module):
    """What differs between the modes: two kinds of norm, dropout, and code that reads ``training`` itself."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, outside, 3), nn.BatchNorm2d(outside)
        self.rest = nn.ModuleList([nn.BatchNorm2d(outside, affine=False), nn.Sequential(nn.ReLU(), nn.Dropout(0.2))])

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.conv(x)), 0.1, self.training)
        for part in self.rest:
            x = part(x)
        return x


class Net(nn.Module):
    """Two blocks of 4 parameters each in a list that is never called, with a dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(1, 3), nn.Dropout(0.3), Block(3, 4)])
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def whole(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    before: Callable[[int], None] = lambda _: None,
) -> None:
    """Train as a script does that evaluates after every step; ``before(step)`` follows ``model.train()``."""
    for step, (x, y) in enumerate(conv_batches(start + steps)):
        if step < start:
            continue
        model.train()
        before(step)
        torch.manual_seed(step)  # of dropout
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(x)


def built(*, layers: tuple[int, ...] = (3, 7), at: tuple[int, ...] = (1, 4), **more: Any) -> tuple[Net, SGD]:
    """Stops through the first block after step 1, and through the second after step 4."""
    model = Net()
    settings = Settings(stop_layer_num=layers, stop_layer_itr=at, **{"prefix_mode": "eval", **more})
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, model=model, settings=settings)


@pytest.mark.parametrize("more", [{}, {"prefix_autograd": False}, {"norm_statistics": "hold_all"}])
def test_it_is_a_loop_that_freezes_the_blocks_and_calls_eval_on_them(more: dict[str, Any]) -> None:
    model, optimizer = built(**more)
    plain: Any = Net()

    def freeze(step: int) -> None:
        for number, stopped in ((0, step > 1), (2, step > 4), (1, step > 4)):  # the dropout stands alone until then
            if stopped:
                plain.blocks[number].requires_grad_(False).eval()
        for norm in plain.modules():
            if more.get("norm_statistics") and isinstance(norm, nn.BatchNorm2d):
                norm.eval()

    train(model, optimizer, 8)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 8, before=freeze)
    assert equal(whole(model), whole(plain))


def test_train_is_the_default_and_trains_otherwise() -> None:
    default, model = Net(), Net()
    given = Settings(stop_layer_num=(3,), stop_layer_itr=(1,))
    assert given.prefix_mode == "train"
    train(default, SGD(default.parameters(), lr=0.1, momentum=0.9, model=default, settings=given), 8)
    assert not any(m._forward_pre_hooks for m in default.modules())
    model, optimizer = built(layers=(3,), at=(1,))
    train(model, optimizer, 8)
    assert not equal(whole(default), whole(model))


def test_a_block_counts_once_nothing_trains_in_or_before_it() -> None:
    """The second block's parameters are registered, and stop, first."""
    model: Any = nn.Sequential(Block(3, 4), Block(1, 3))
    model.forward = lambda x: model[0](model[1](x)).flatten(1)[:, :5]
    settings = Settings(stop_layer_num=(3, 5, 7), stop_layer_itr=(1, 3, 5), prefix_mode="eval")
    optimizer = SGD(model.parameters(), lr=0.1, model=model, settings=settings)
    modes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            model.train()
            x, y = next(conv_batches(1))
            F.cross_entropy(model(x), y).backward()
            modes.append([model[1].conv.training, model[1].training, model[0].training])
            optimizer.step()
            optimizer.zero_grad()
            assert model.training, step  # the model's own mode is the script's
    assert modes == 4 * [[True, True, True]] + 2 * [[False, True, True]] + 2 * [[False, False, False]]


class Adapted(Block):
    """A block whose weights the user has frozen, with adapters that train."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.requires_grad_(False)
        self.adapter = nn.ModuleDict({"drop": nn.Dropout(0.2), "down": nn.Conv2d(inside, outside, 3)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter["down"](self.adapter["drop"](x))


class Towers(nn.Module):
    """Dropouts within no block: of the stopped part, of the part that trains, between them, and one of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.own, self.between = nn.Dropout(0.3), nn.Dropout(0.3), nn.Dropout(0.3)
        self.plain, self.twice = nn.BatchNorm2d(1, affine=False), nn.Dropout(0.3)
        self.block, self.side, self.head = Block(1, 3), nn.Conv2d(1, 3, 3), nn.Linear(108, 5)

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(self.own(x))
        y = self.block(self.first(self.plain(self.twice(x))))
        return self.head(self.twice(self.between(y + side)).flatten(1))


@pytest.mark.parametrize("at", [-1, 1])
def test_a_dropout_that_stands_alone_counts_where_a_stopped_layer_reads_it(at: int) -> None:
    """From the first step on, before which nothing has run; norms without weights, too."""
    model, plain = Towers(), Towers()
    settings = Settings(stop_layer_num=(3,), stop_layer_itr=(at,), prefix_mode="eval")

    def freeze(step: int) -> None:
        if step > at:
            plain.block.requires_grad_(False).eval()
            plain.first.eval(), plain.plain.eval()

    train(model, SGD(model.parameters(), lr=0.1, momentum=0.9, model=model, settings=settings), 6)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 6, before=freeze)
    assert equal(whole(model), whole(plain))


@pytest.mark.parametrize("at", [-1, 2])
@pytest.mark.parametrize("given", ["what trains", "everything"])
def test_what_the_user_has_frozen_is_part_of_the_prefix(given: str, at: int) -> None:
    """As with LoRA: whether the optimizer has the frozen weights or not, in front of the first stop, too."""

    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(Block(1, 2).requires_grad_(False), Adapted(2, 3), nn.Flatten(), nn.Linear(48, 5))

    model, plain = build(), build()
    weights = [p for p in model.parameters() if p.requires_grad or given == "everything"]
    last = next(n for n, p in enumerate(weights) if p is model[1].adapter["down"].bias)
    settings = Settings(stop_layer_num=(last,), stop_layer_itr=(at,), prefix_mode="eval")

    def freeze(step: int) -> None:
        if step > at:
            plain[:2].requires_grad_(False).eval()

    train(model, SGD(weights, lr=0.1, momentum=0.9, model=model, settings=settings), 6)
    trained = [p for p in plain.parameters() if p.requires_grad]
    train(plain, torch.optim.SGD(trained, lr=0.1, momentum=0.9), 6, before=freeze)
    assert equal(whole(model), whole(plain))


def test_what_trains_in_reentrant_checkpoints_comes_before_what_follows_there() -> None:
    """Autograd records nothing inside of them; behind adapters that train is a norm that the user has frozen."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]

    model: Any = nn.Sequential(Adapted(1, 2), Checkpointed(Adapted(2, 3), nn.BatchNorm2d(3).requires_grad_(False)))
    weights = [p for p in model.parameters() if p.requires_grad]
    settings = Settings(stop_layer_num=(1,), stop_layer_itr=(0,), prefix_mode="eval")
    optimizer = SGD(weights, lr=0.1, model=model, settings=settings)
    for _ in range(2):
        model.train()(torch.randn(2, 1, 8, 8, requires_grad=True)).sum().backward()
        optimizer.step()
    assert [model[0].training, model[1][0].training, model[1][1].training] == [False, True, True]


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, optimizer = built()
    train(model, optimizer, 3)
    resumed, other = built()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (resumed, other)):
        train(each, its, 5, start=3)
    assert equal(whole(model), whole(resumed))


@pytest.mark.parametrize("undo", ["an earlier state", "another optimizer"])
def test_the_modes_come_back(undo: str) -> None:
    def modes() -> list[bool]:
        model(next(conv_batches(1))[0])
        return [m.training for m in model.modules()]

    model, optimizer = built()
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3)
    model.train()
    assert modes().count(False) == 7  # a block and all that is called in it
    if undo == "an earlier state":
        optimizer.load_state_dict(early)
    else:
        SGD(model.parameters(), lr=0.1, settings=Settings(start_thr=-1))
    assert all(m.training for m in model.modules())
    assert all(modes())


def test_a_mode_of_the_users_own_stays() -> None:
    model: Any
    model, optimizer = built()
    early = copy.deepcopy(optimizer.state_dict())
    dropout = model.blocks[0].rest[1][1]
    train(model, optimizer, 3, before=lambda _: dropout.eval())
    optimizer.load_state_dict(early)
    assert not dropout.training


def test_copies_are_untouched() -> None:
    model, optimizer = built()
    train(model, optimizer, 3)
    copied: Any = copy.deepcopy(model).train()
    copied(next(conv_batches(1))[0])
    assert all(m.training for m in copied.modules())


def test_statistics_that_are_collected_anew_are_collected() -> None:
    model, optimizer = built()
    train(model, optimizer, 3)
    plain: Any = Net()
    plain.load_state_dict(model.state_dict())
    plain.blocks[0].rest[1][1].p = 0.0
    plain.blocks[0].forward = lambda x: plain.blocks[0].rest[1](
        plain.blocks[0].rest[0](plain.blocks[0].norm(plain.blocks[0].conv(x)))
    )
    for each in (model, plain):
        torch.manual_seed(0)
        torch.optim.swa_utils.update_bn([x for x, _ in conv_batches(4)], each.eval())
    assert equal(whole(model), whole(plain))
    model.train()(next(conv_batches(1))[0])
    assert equal(whole(model)[2:4], whole(plain)[2:4])  # held again


@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_attention_drops_nothing_in_a_stopped_block(cls: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"first": cls(8, 2, 16, dropout=0.5, batch_first=True), "head": nn.Linear(8, 3)})
    last = len(list(model["first"].parameters())) - 1
    settings = Settings(stop_layer_num=(last,), stop_layer_itr=(0,), prefix_mode="eval")
    optimizer = SGD(model.parameters(), lr=0.1, model=model, settings=settings)
    x = torch.randn(4, 5, 8)
    inputs = (x,) if cls is nn.TransformerEncoderLayer else (x, x)
    outputs = []
    for _ in range(3):
        model.train()
        hidden = model["first"](*inputs)
        outputs.append(hidden.detach())
        model["head"](hidden).square().mean().backward()
        optimizer.step()
    assert not torch.allclose(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    torch.testing.assert_close(outputs[2], copy.deepcopy(model["first"]).eval()(*inputs))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_compiled_model_trains_as_the_uncompiled_one() -> None:
    results = []
    for compiles in (False, True):
        model = Net()
        optimizer = SGD(
            model.parameters(), lr=0.1, model=model, example_inputs=next(conv_batches(1))[0],
            settings=Settings(stop_layer_num=(3,), stop_layer_itr=(1,), prefix_mode="eval"),
        )  # fmt: skip
        called: Any = torch.compile(model, backend="eager") if compiles else model
        train(called, optimizer, 6)
        results.append(whole(model))
    assert equal(*results)


def test_another_value_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^CAC_PREFIX_MODE must be train or eval, got 'x'$"):
        Settings.from_environment({"CAC_PREFIX_MODE": "x"})
    with pytest.raises(UserError, match=r"^CAC_PREFIX_MODE=eval looks into the model: give model=$"):
        SGD(Net().parameters(), lr=0.1, settings=Settings(prefix_mode="eval"))
