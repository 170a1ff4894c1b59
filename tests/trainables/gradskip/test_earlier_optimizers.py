"""One model, several optimizers in turn: folds, federated rounds, a notebook's cell that is run again."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import EAGER, OFF, SHRINKING, equal, train, weights
from thorough import rest_thorough

from trainables.gradskip import SGD, Adam, Settings, wrap
from trainables.gradskip.stops import Reason

STOP = Settings(stop_layer_num=(4,), stop_layer_itr=(1,))
FOLDS = [
    Settings(**EAGER),
    Settings(stop_layer_num=(10,), stop_layer_itr=(1,), prefix_autograd=False),
    Settings(stop_layer_num=(4,), stop_layer_itr=(1,), norm_statistics="hold", prefix_autograd=False),
    Settings(rule="freezeout", rule_end_itr=6, whole_units=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "collected"), rest_thorough([*((one, False) for one in FOLDS), (FOLDS[2], True)], of_several=True)
)
@pytest.mark.usefixtures("quiet")
def test_every_fold_trains_as_the_first_one(settings: Settings, collected: bool) -> None:
    """Also where norms were held and outputs detached, whose hooks would outlive an optimizer that is collected."""
    model: Any = conv_model()
    begin = copy.deepcopy(model.state_dict())
    ends, events = [], []
    for _ in range(3):
        model.load_state_dict(begin)
        optimizer = SGD(model.parameters(), **SHRINKING, settings=settings, model=model)
        train(model, optimizer, 8)
        ends.append(weights(model) + [b.clone() for b in model.buffers()])
        events.append(optimizer.gradskip.events)
        if collected:
            del optimizer
            gc.collect()
    assert events[0] == events[1] == events[2] != []
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])


def test_a_later_optimizer_without_a_model_undoes_held_norms_and_cut_outputs() -> None:
    model: Any = conv_model()
    settings = Settings(stop_layer_num=(4,), stop_layer_itr=(1,), norm_statistics="hold", prefix_autograd=False)
    train(model, SGD(model.parameters(), lr=0.1, settings=settings, model=model), 3)
    gc.collect()
    optimizer = SGD(model.parameters(), lr=0.1, settings=OFF)
    before, statistics = weights(model), model[1].running_mean.clone()
    with pytest.warns(UserWarning, match="stopped by an earlier"):
        train(model, optimizer, 1)
    assert all(not torch.equal(a, b) for a, b in list(zip(before, weights(model), strict=True))[:1])
    assert not torch.equal(model[1].running_mean, statistics)
    assert all(module.training for module in model.modules())


def test_what_the_user_has_switched_off_stays_off() -> None:
    """Before and after the stop of the first optimizer, and after the second was built."""
    model: Any = conv_model()
    model[0].weight.requires_grad_(False)
    train(model, SGD(model.parameters(), lr=0.1, settings=STOP, model=model), 3)
    model[9].bias.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, settings=OFF, model=model)
    model[1].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"^0.bias, 1.weight, 1.bias, 3.weight: stopped by an earlier"):
        train(model, optimizer, 1)
    assert [n for n, p in enumerate(model.parameters()) if not p.requires_grad] == [0, 2, 3, 10]


class TestNothingChanges:
    """And nothing is said."""

    @pytest.fixture(autouse=True)
    def silent(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_for_copies(self) -> None:
        """A copy of the optimizer is torch's, and that of a model stays as it is; wrapped and loaded it goes on."""
        model: Any = conv_model()
        optimizer = SGD(model.parameters(), lr=0.1, settings=STOP, model=model)
        train(model, optimizer, 3)
        twin_model, twin = copy.deepcopy((model, optimizer))
        assert [p.requires_grad for p in twin_model.parameters()] == [False] * 5 + [True] * 6
        assert not hasattr(twin, "gradskip")
        wrap(twin, STOP, model=twin_model).load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for own, optim in ((twin_model, twin), (model, optimizer)):
            before = weights(own)
            train(own, optim, 2, start=3)
            assert equal(before[:5], weights(own)[:5])
            assert optim.gradskip.stopped == (0, 1, 2, 3, 4)
        assert equal(weights(model), weights(twin_model))

    def test_for_an_optimizer_that_is_still_used_after_another_one_was_tried(self) -> None:
        """A learning-rate finder amid a run: its optimizer trains everything; then the first one stops it again."""
        model: Any = conv_model()
        settings = Settings(stop_layer_num=(4,), stop_layer_itr=(1,), norm_statistics="hold", prefix_autograd=False)
        first = SGD(model.parameters(), lr=0.1, settings=settings, model=model)
        train(model, first, 3)
        kept = copy.deepcopy(model.state_dict())
        finder = Adam(model.parameters(), lr=0.1, settings=OFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, finder, 2)
        assert finder.gradskip.stops.of(Reason.USER) == ()
        model.load_state_dict(kept)
        before, statistics = weights(model), model[1].running_mean.clone()
        train(model, first, 2, start=3)
        assert equal(before[:5], weights(model)[:5])
        assert first.gradskip.stopped == (0, 1, 2, 3, 4)
        assert not model[:4](next(conv_batches(1))[0]).requires_grad
        model.load_state_dict(kept)
        train(model, first, 2, start=5)
        assert torch.equal(model[1].running_mean, statistics)
