"""Policies against training loops in plain Python that do what the policies' arguments say; folded norms."""

from __future__ import annotations

import itertools
import math
from statistics import stdev
from typing import Any

import pytest
import torch
from masked_lines import line, weights_of
from thorough import rest_thorough
from torch import Tensor, nn

from trainables.compression.masks import Masks
from trainables.compression.policies import (
    PruningPolicy,
    QuantizationPolicy,
    RegularizationPolicy,
    Training,
    batchnorms_after,
)
from trainables.compression.pruners import Pruner, build_pruner
from trainables.compression.regularizers import build_regularizer
from trainables.compression.schedule import PrunerPolicyConfig
from trainables.compression.schedule.configs import PRUNERS, REGULARIZERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.scheduler import CompressionScheduler
from trainables.errors import UserError

START = [0.9, -0.4, 0.3, 1.5, -0.15, 0.6]
#: One input and target a minibatch of an epoch; chosen so that weights cross the thresholds below.
BATCHES = [
    ([1.0, 2.0, -1.0, 0.5, 0.2, 0.4], 0.7),
    ([0.3, -0.7, 1.1, 0.2, -0.9, 0.8], -0.2),
    ([-1.2, 0.4, 0.9, 0.1, 0.5, -0.6], 1.3),
]
EPOCHS, PER_EPOCH = 6, len(BATCHES)
RATE, MOMENTUM = 0.12, 0.9
TIMING: dict[str, Any] = {"starting_epoch": 1, "ending_epoch": 5, "frequency": 2}
ACTIVE, LAST = (1, 3), 3

Trace = list[list[float]]


def pruner_of(class_: str, model: nn.Module, **arguments: Any) -> Pruner:
    return build_pruner("p", PRUNERS[class_](**arguments), model, seed=0)


def trained(scheduler: CompressionScheduler, optimizer: torch.optim.Optimizer, epochs: int = EPOCHS) -> Trace:
    """The weights that each forward and the end of each minibatch and epoch see."""
    model, seen = scheduler.model, []
    for epoch in range(epochs):
        scheduler.on_epoch_begin(epoch)
        for minibatch, (x, y) in enumerate(BATCHES):
            scheduler.on_minibatch_begin(epoch, minibatch, PER_EPOCH)
            seen.append(weights_of(model))
            loss = (model(torch.tensor([x], dtype=torch.float64)) - y).square().sum()
            loss = scheduler.before_backward_pass(epoch, minibatch, PER_EPOCH, loss)
            optimizer.zero_grad()
            loss.backward()
            scheduler.before_parameter_optimization(epoch, minibatch, PER_EPOCH)
            optimizer.step()
            scheduler.on_minibatch_end(epoch, minibatch, PER_EPOCH)
            seen.append(weights_of(model))
        scheduler.on_epoch_end(epoch, metrics={"min": 1.0, "max": 0.5})
        seen.append(weights_of(model))
    return seen


class SlowLoop:
    """Pruning of one weight, element by element. Symbols: w what is trained, m the mask or None."""

    def __init__(self, rule: str, args: PrunerPolicyConfig) -> None:
        self.rule, self.args = rule, args
        self.w, self.speed = list(START), [0.0] * len(START)
        self.m: list[float] | None = None
        self.forward_only = self.double = self.gradients = False
        self.threshold: float | None = None

    def masked(self) -> list[float]:
        return list(self.w) if self.m is None else [m * w for m, w in zip(self.m, self.w, strict=True)]

    def prune(self) -> None:
        if self.rule == "level":  # the two smallest of six go
            smallest = sorted(range(len(self.w)), key=lambda i: abs(self.w[i]))[:2]
            self.m = [0.0 if i in smallest else 1.0 for i in range(len(self.w))]
        else:
            if self.threshold is None:
                self.threshold = 0.6 * stdev(self.w)
            self.m = [1.0 if abs(w) > self.threshold else 0.0 for w in self.w]

    def run(self) -> Trace:
        args, seen = self.args, []
        for epoch in range(EPOCHS):
            active = epoch in ACTIVE
            if active and epoch == ACTIVE[0]:
                self.forward_only, self.double = args.mask_on_forward_only, args.use_double_copies
                self.gradients = args.mask_gradients
            if active and not (args.skip_first_minibatch and epoch == ACTIVE[0]):
                self.prune()
            for minibatch, (x, y) in enumerate(BATCHES):
                step, every = epoch * PER_EPOCH + minibatch, args.mini_batch_pruning_frequency
                if active and every and minibatch and step % every == 0:
                    self.prune()
                if active and args.skip_first_minibatch and step == ACTIVE[0] * PER_EPOCH + 1:
                    self.prune()
                used = self.masked() if active or (self.double and not self.forward_only) else list(self.w)
                if not self.double:
                    self.w = list(used)
                seen.append(used)
                error = sum(u * v for u, v in zip(used, x, strict=True)) - y
                slope = [2 * error * v for v in x]
                if self.gradients and self.m is not None:
                    slope = [m * g for m, g in zip(self.m, slope, strict=True)]
                self.speed = [MOMENTUM * v + g for v, g in zip(self.speed, slope, strict=True)]
                self.w = [w - RATE * v for w, v in zip(self.w, self.speed, strict=True)]
                left = list(self.w) if self.forward_only else self.masked()
                if not self.double:
                    self.w = list(left)
                if active and args.discard_masks_at_minibatch_end:
                    self.m, left = None, list(self.w)
                seen.append(left)
            if epoch == LAST:
                self.gradients = False
                if args.keep_mask and self.m is not None:
                    self.w = left = self.masked()
                if args.keep_mask:
                    self.forward_only = self.double = False
            seen.append(left)
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("rule", rest_thorough(["level", "sensitivity"]))
@pytest.mark.parametrize(
    ("forward_only", "gradients"), rest_thorough([(False, False), (True, False), (True, True)], of_several=True)
)
@pytest.mark.parametrize("double", rest_thorough([False, True]))
def test_every_combination_of_pruning_arguments(rule: str, forward_only: bool, gradients: bool, double: bool) -> None:
    """Each frequency with one kind of copies, and both kinds without one."""
    outcomes = set()
    flags = itertools.product([False, True], [0, 2] if double else [0, 1, 4], [False, True], [False, True])
    for keep, every, discard, skip in flags:
        args = PrunerPolicyConfig(
            keep_mask=keep, mini_batch_pruning_frequency=every, mask_on_forward_only=forward_only,
            mask_gradients=gradients, use_double_copies=double, discard_masks_at_minibatch_end=discard,
            skip_first_minibatch=skip,
        )  # fmt: skip
        model = line(START)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        pruner = (
            pruner_of("SparsityLevelParameterPruner", model, levels={"weight": 0.4})
            if rule == "level"
            else pruner_of("SensitivityPruner", model, sensitivities={"weight": 0.6})
        )
        scheduler = CompressionScheduler(model, optimizer)
        scheduler.add_policy(PruningPolicy(pruner, args), **TIMING)
        fast, slow = trained(scheduler, optimizer), SlowLoop(rule, args).run()
        for place, (mine, reference) in enumerate(zip(fast, slow, strict=True)):
            assert mine == pytest.approx(reference, rel=1e-9, abs=1e-12), (args, place)
        outcomes.add(tuple(round(value, 6) for value in slow[-1]))
    assert len(outcomes) > 4  # the arguments make a difference here


def norm_model() -> nn.Sequential:
    """Filters whose own norms rank 0 < 1 < 2 < 3; scaled by the norm behind them 0 < 3 < 2 < 1."""
    model = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(1.0, 5.0).view(4, 1, 1, 1).expand(4, 2, 1, 1))
        model[1].weight.copy_(torch.tensor([8.0, 3.0, 1.0, 0.1]))  # type: ignore[operator]
        model[1].running_var.copy_(torch.tensor([144.0, 1.0, 1.0, 0.25]))  # type: ignore[operator, union-attr]
    return model


def test_folded_norms_decide_which_filters_go() -> None:
    x = torch.randn(4, 2, 3, 3)
    for fold, expected in ((False, [0, 1]), (True, [0, 3])):
        model = norm_model()
        statistics = model[1].running_mean.clone()  # type: ignore[operator, union-attr]
        scheduler = CompressionScheduler(
            model,
            {
                "version": 1,
                "pruners": {
                    "p": {"class": "L1RankedStructureParameterPruner", "group_type": "Filters",
                          "desired_sparsity": 0.5, "weights": ["0.weight"]}
                },
                "policies": [{"pruner": {"instance_name": "p", "args": {"fold_batchnorm": fold}}, "epochs": [0]}],
            },
            torch.optim.SGD(model.parameters(), lr=0.1),
            example=lambda model: model(x),
        )  # fmt: skip
        state = torch.get_rng_state()
        scheduler.on_epoch_begin(0)
        mask = scheduler.masks.get("0.weight")
        assert mask is not None
        # |W_f| gamma_f / sqrt(v_f + eps), one filter after the other
        gamma, variance = [8.0, 3.0, 1.0, 0.1], [144.0, 1.0, 1.0, 0.25]
        size = [2 * (f + 1) * (gamma[f] / math.sqrt(variance[f] + 1e-5) if fold else 1) for f in range(4)]
        assert sorted(range(4), key=lambda f: size[f])[:2] == sorted(expected, key=lambda f: size[f])
        assert sorted(torch.nonzero(mask.flatten(1).sum(1) == 0).flatten().tolist()) == expected
        # Looking which norm follows has left no trace.
        assert torch.equal(model[1].running_mean, statistics)  # type: ignore[arg-type]
        assert torch.equal(state, torch.get_rng_state())
        assert model.training


def test_folding_without_an_example_says_what_to_give() -> None:
    model = norm_model()
    scheduler = CompressionScheduler(model)
    scheduler.add_policy(
        PruningPolicy(
            pruner_of("MagnitudeParameterPruner", model, thresholds={"0.weight": 1.0}),
            PrunerPolicyConfig(fold_batchnorm=True),
        )
    )
    with pytest.raises(UserError, match="fold_batchnorm must see the model run: give the scheduler example="):
        scheduler.on_epoch_begin(0)


#: Large enough that some weights are below it at the end.
STRENGTH = 0.35

# --- regularizers ---------------------------------------------------------------------------------------------------


def slow_l1(strength: float, *, threshold: bool, keep: bool, active: tuple[int, ...]) -> Trace:
    """Weights trained with lambda sum |w|, what is at most lambda zeroed after each step of an active epoch."""
    w, speed, seen = list(START), [0.0] * len(START), []
    kept: list[float] | None = None
    for epoch in range(EPOCHS):
        for minibatch, (x, y) in enumerate(BATCHES):
            seen.append(list(w))
            error = sum(u * v for u, v in zip(w, x, strict=True)) - y
            slope = [2 * error * v for v in x]
            if epoch in active:
                slope = [g + strength * ((u > 0) - (u < 0)) for g, u in zip(slope, w, strict=True)]
            speed = [MOMENTUM * v + g for v, g in zip(speed, slope, strict=True)]
            w = [u - RATE * v for u, v in zip(w, speed, strict=True)]
            if kept is not None:
                w = [m * u for m, u in zip(kept, w, strict=True)]
            if epoch in active and threshold:
                mask = [1.0 if abs(u) > strength else 0.0 for u in w]
                w = [m * u for m, u in zip(mask, w, strict=True)]
                if keep and epoch == active[-1] and minibatch == PER_EPOCH - 1:
                    kept = mask
            seen.append(list(w))
        seen.append(list(w))
    return seen


@pytest.mark.parametrize("threshold", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_regularizer_adds_its_term_and_zeroes_what_became_small(threshold: bool, keep: bool) -> None:
    model = line(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    criterion = "Max" if threshold else None
    settings = REGULARIZERS["L1Regularizer"](reg_regims={"weight": STRENGTH}, threshold_criteria=criterion)
    policy = RegularizationPolicy(build_regularizer("r", settings, model), keep_mask=keep)
    scheduler = CompressionScheduler(model, optimizer)
    scheduler.add_policy(policy, **TIMING)
    fast, slow = trained(scheduler, optimizer), slow_l1(STRENGTH, threshold=threshold, keep=keep, active=ACTIVE)
    for place, (mine, reference) in enumerate(zip(fast, slow, strict=True)):
        assert mine == pytest.approx(reference, rel=1e-9, abs=1e-12), place
    zeros = sum(value == 0.0 for value in slow[-1])
    assert (zeros > 0) == (threshold and keep)


def test_a_kept_threshold_leaves_what_a_pruner_has_pruned_pruned() -> None:
    """Both mask one weight: the regularizer's lasting mask does not bring back the pruner's zeros."""
    model = nn.Sequential(nn.Conv2d(1, 3, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(
            torch.tensor([[3.0, 0.1, 2.0, 4.0], [0.01, 0.02, 0.03, 0.01], [5.0, 1.0, 1.5, 0.2]]).view(3, 1, 2, 2)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scheduler = CompressionScheduler(model, optimizer)
    scheduler.add_policy(
        PruningPolicy(pruner_of("MagnitudeParameterPruner", model, thresholds={"0.weight": 1.2})), epochs=[0]
    )
    settings = REGULARIZERS["GroupLassoRegularizer"](
        reg_regims={"0.weight": (0.5, "Filters")}, threshold_criteria="Max"
    )
    scheduler.add_policy(RegularizationPolicy(build_regularizer("r", settings, model), keep_mask=True), epochs=[0])
    for epoch in range(3):
        scheduler.on_epoch_begin(epoch)
        scheduler.on_minibatch_begin(epoch, 0, 1)
        loss = scheduler.before_backward_pass(epoch, 0, 1, model(torch.ones(1, 1, 2, 2)).square().sum())
        optimizer.zero_grad()
        loss.backward()
        scheduler.before_parameter_optimization(epoch, 0, 1)
        optimizer.step()
        scheduler.on_minibatch_end(epoch, 0, 1)
        scheduler.on_epoch_end(epoch)
    zero = (model[0].weight == 0).view(3, 4).tolist()
    assert zero == [[False, True, False, False], [True] * 4, [False, True, False, True]]


# --- quantizers, learning rates -------------------------------------------------------------------------------------


def test_learned_clips_join_the_last_group_so_that_schedules_know_their_groups() -> None:
    from trainables.compression.quantizers import build_quantizer
    from trainables.compression.schedule.configs import PACTQuantizerConfig

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    groups = [
        {"params": list(model[0].named_parameters("0"))},
        {"params": list(model[2].named_parameters("2")), "lr": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    policy = QuantizationPolicy(build_quantizer("q", PACTQuantizerConfig(bits_weights=4, bits_activations=4)))
    training = Training(model=model, masks=Masks(model), optimizer=optimizer)
    moment = Moment(epoch=0, timing=Timing())
    policy.epoch_begin(training, moment)
    policy.epoch_begin(training, moment)  # again in the next epoch: nothing more
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    assert [len(group["param_names"]) for group in optimizer.param_groups] == [2, 3]
    in_model = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == in_model
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    plain.step()
    assert optimizer.param_groups[1]["lr"] < 0.01


class Crossed(nn.Module):
    """Modules in another order than that of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_b, self.norm_a = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.a, self.b, self.alone = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.late = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(self.a(x)).relu()
        x = self.norm_b(self.b(x))
        return self.late(self.alone(x).relu())


def test_pairs_follow_the_data_and_nothing_between() -> None:
    model = Crossed()
    assert batchnorms_after(model, lambda m: m(torch.ones(1, 3, 8, 8))) == {"a": "norm_a", "b": "norm_b"}
