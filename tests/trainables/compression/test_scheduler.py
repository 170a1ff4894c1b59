"""The scheduler: who is told what in which order, a user's own loop, what a schedule becomes, and its state."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_schedules import EPOCHS, SCHEDULES, ranked, sections, span, text
from runs import finish
from thorough import rest_thorough
from tiny_workload import Tiny, TinyAdam, tiny  # noqa: F401 - a fixture
from torch import Tensor, nn

from trainables.compression.policies import (
    Policy,
    PruningPolicy,
    Training,
)
from trainables.compression.schedule.timing import Moment
from trainables.compression.scheduler import CompressionScheduler, check_on_model
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.runtime.isolation import isolated
from trainables.training.run import TrainingRun


class Told(Policy):
    """Writes down what it is told; its part of the loss shows the order."""

    def __init__(self, name: str, log: list[Any], factor: float = 1.0, epochs_before: int = 0) -> None:
        self.name, self.log, self.factor, self.epochs_before = name, log, factor, epochs_before

    def look(self, training: Training) -> None:
        self.log.append(f"{self.name} looks")

    def look_away(self) -> None:
        self.log.append(f"{self.name} looks away")

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        self.log.append(f"{self.name} epoch {moment.epoch}")

    def minibatch_begin(self, training: Training, moment: Moment) -> None:
        self.log.append(f"{self.name} begins {moment.epoch}.{moment.minibatch} of {moment.minibatches_per_epoch}")

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        self.log.append(f"{self.name} loss {float(loss.detach()):g}")
        return loss * self.factor

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        self.log.append(f"{self.name} ends {moment.epoch}.{moment.minibatch}")

    def epoch_end(self, training: Training, moment: Moment, metrics: Mapping[str, Any]) -> None:
        self.log.append(f"{self.name} epoch ends {dict(metrics)}")


def test_everyone_is_told_in_the_schedules_order() -> None:
    log: list[Any] = []
    model = nn.Linear(1, 1)
    scheduler = CompressionScheduler(model)
    scheduler.add_policy(Told("a", log, 2.0), starting_epoch=1, ending_epoch=4, frequency=2)  # 1 and 3
    scheduler.add_policy(Told("b", log, 5.0, epochs_before=1), epochs=[2, 3])
    scheduler.add_policy(Told("c", log), epochs=[9])
    for epoch in range(4):
        log.append(f"-- {epoch}")
        scheduler.on_epoch_begin(epoch)
        for minibatch in range(2):
            scheduler.on_minibatch_begin(epoch, minibatch, 2)
            loss = scheduler.before_backward_pass(epoch, minibatch, 2, torch.tensor(1.0))
            scheduler.before_parameter_optimization(epoch, minibatch, 2)
            scheduler.on_minibatch_end(epoch, minibatch, 2)
        scheduler.on_epoch_end(epoch, metrics={"min": epoch})
    assert float(loss) == 10.0

    def epoch(number: int, *names: tuple[str, float]) -> list[str]:
        found = [f"{name} epoch {number}" for name, _ in names]
        for minibatch in range(2):
            found += [f"{name} begins {number}.{minibatch} of 2" for name, _ in names]
            found += [f"{name} loss {loss:g}" for name, loss in names]
            found += [f"{name} ends {number}.{minibatch}" for name, _ in names]
        return [*found, *(f"{name} epoch ends {{'min': {number}}}" for name, _ in names)]

    assert log == [
        "-- 0",
        "-- 1", "a looks", "b looks", *epoch(1, ("a", 1)), "a looks away", "b looks away",
        "-- 2", "a looks", "b looks", *epoch(2, ("b", 1)), "a looks away", "b looks away",
        "-- 3", "a looks", "b looks", *epoch(3, ("a", 1), ("b", 2)), "a looks away", "b looks away",
    ]  # fmt: skip
    assert [scheduled.has_acted for scheduled in scheduler.policies] == [True, True, False]


# --- a user's own loop ----------------------------------------------------------------------------------------------


def plain_loop(kind: type[Tiny], file: Path, *, in_three_lines: bool) -> dict[str, Tensor]:
    """Training as a user of the original writes it, or shorter; learning rates are the workload's or the schedule's."""
    workload = kind()
    with isolated(seed=0, threads=1):
        model = workload.make_model()
        optimizer = workload.make_optimizer(model.named_parameters())
        plain = workload.make_scheduler(optimizer, EPOCHS * workload.steps_per_epoch)
        own_rates = "lr_schedulers" in file.read_text()
        scheduler = CompressionScheduler(
            model, file, optimizer,
            example=lambda model: workload.loss(model, next(iter(workload.train_batches(0, 0)))),
            make_model=workload.make_model,
        )  # fmt: skip
        steps = workload.steps_per_epoch

        def metrics() -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                accuracy = workload.evaluate(model, "validation", "cpu")
            return {"min": float(total) / samples, "max": accuracy}

        for epoch in range(EPOCHS):
            model.train()
            total, samples = torch.zeros(()), 0
            batches = list(workload.train_batches(epoch, 0))
            if in_three_lines:
                for batch in scheduler.batches(epoch, batches, metrics):
                    loss = workload.loss(model, batch)
                    total, samples = total + len(batch[0]) * loss.detach(), samples + len(batch[0])
                    loss = scheduler.loss(loss)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if not own_rates:
                        plain.step()
                continue
            scheduler.on_epoch_begin(epoch)
            for minibatch, batch in enumerate(batches):
                scheduler.on_minibatch_begin(epoch, minibatch, steps)
                loss = workload.loss(model, batch)
                total, samples = total + len(batch[0]) * loss.detach(), samples + len(batch[0])
                loss = scheduler.before_backward_pass(epoch, minibatch, steps, loss)
                optimizer.zero_grad()
                loss.backward()
                scheduler.before_parameter_optimization(epoch, minibatch, steps)
                optimizer.step()
                if not own_rates:
                    plain.step()
                scheduler.on_minibatch_end(epoch, minibatch, steps)
            scheduler.on_epoch_end(epoch, metrics=metrics())
        return model.state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.filterwarnings("ignore:thinning changed")
@pytest.mark.parametrize("in_three_lines", rest_thorough([False, True]))
@pytest.mark.parametrize(
    ("name", "kind"),
    rest_thorough([
        ("agp", Tiny), ("splicing", TinyAdam), ("gradients", Tiny), ("folded norms", Tiny), ("regularizers", TinyAdam),
        ("pact", Tiny), ("learning rates", Tiny), ("thinning", TinyAdam),
    ], of_several=True),
)  # fmt: skip
def test_a_plain_loop_from_a_file_is_our_run_bit_for_bit(
    name: str, kind: type[Tiny], in_three_lines: bool, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.yaml"
    file.write_text(text(SCHEDULES[name]))
    weights = plain_loop(kind, file, in_three_lines=in_three_lines)
    config = TrialConfig(workload=kind.name, epochs=EPOCHS, method="compression", schedule=file.read_text())
    with TrainingRun(config) as run:
        assert run.step == 0
        untrained = [value.clone() for value in run.model.parameters()]
        finish(run)
        ours = run.model.state_dict()
        assert list(ours) == list(weights)
        assert all(torch.equal(value, weights[key]) for key, value in ours.items())
        assert not any(torch.equal(a, b) for a, b in zip(untrained, run.model.parameters(), strict=False))


def small() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        )


def scheduler_of(schedule: dict[str, Any], model: nn.Module | None = None, **more: Any) -> CompressionScheduler:
    model = small() if model is None else model
    return CompressionScheduler(model, schedule, torch.optim.SGD(model.parameters(), lr=0.5), **more)


def test_a_short_loop_needs_its_batches_and_an_optimizer_where_parameters_change() -> None:
    quantized = {
        "version": 1,
        "quantizers": {"q": {"class": "PACTQuantizer", "bits_weights": 4}},
        "policies": [{"quantizer": {"instance_name": "q"}, "epochs": [0]}],
    }
    scheduler = CompressionScheduler(small(), quantized)
    with pytest.raises(UserError, match="batches needs the optimizer, whose parameters quantizers and extensions"):
        next(scheduler.batches(0, [1]))
    with pytest.raises(UserError, match="loss belongs to a batch"):
        scheduler.loss(torch.zeros(()))


DOUBLED = {
    "version": 1,
    "pruners": {"half": {"class": "SparsityLevelParameterPruner", "levels": {"0.weight": 0.5}}},
    "policies": [{"pruner": {"instance_name": "half", "args": {"use_double_copies": True}}, "epochs": [0, 1]}],
}


def test_a_short_loop_finds_steps_of_an_optimizer_that_it_was_not_given() -> None:
    found = []
    for given in (False, True):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = CompressionScheduler(model, DOUBLED, optimizer if given else None)
        for _ in scheduler.batches(0, range(3)):
            optimizer.zero_grad()
            scheduler.loss(model(torch.ones(2, 2, 1, 1)).square().sum()).backward()
            optimizer.step()
        scheduler.masks.restore()
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("short", [False, True])
def test_unmasked_copies_outlive_batches_without_a_step(short: bool) -> None:
    """As with accumulated gradients, or a step that a gradient scaler skips."""
    scheduler = scheduler_of(DOUBLED)
    model, optimizer = scheduler.model, scheduler.training.optimizer
    assert optimizer is not None
    whole = model[0].weight.detach().clone()  # type: ignore[index]

    def batch(number: int) -> None:
        model(torch.ones(2, 2, 1, 1)).sum().backward()
        if number == 3:
            if not short:
                scheduler.before_parameter_optimization(0, number, 4)
                torch.testing.assert_close(model[0].weight, whole)  # type: ignore[index]
            optimizer.step()

    if short:
        for number in scheduler.batches(0, range(4)):
            batch(number)
    else:
        scheduler.on_epoch_begin(0)
        for number in range(4):
            scheduler.on_minibatch_begin(0, number, 4)
            batch(number)
            scheduler.on_minibatch_end(0, number, 4)
    stepped = whole - 0.5 * model[0].weight.grad  # type: ignore[index]
    scheduler.masks.restore()
    torch.testing.assert_close(model[0].weight, stepped)  # type: ignore[index]


def test_a_loop_that_is_left_ends_the_epoch() -> None:
    schedule = {
        **DOUBLED,
        "policies": [{"pruner": {"instance_name": "half"}, "epochs": [0]}],
        "lr_schedulers": {"lr": {"class": "StepLR", "step_size": 1, "gamma": 0.1}},
    }
    schedule["policies"] = [*schedule["policies"], {"lr_scheduler": {"instance_name": "lr"}, "epochs": [0]}]
    scheduler = scheduler_of(schedule)
    for _ in scheduler.batches(0, range(4)):
        break
    assert int((scheduler.model[0].weight == 0).sum()) == 8  # type: ignore[index]
    assert scheduler.training.optimizer is not None
    assert scheduler.training.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_loaders_that_do_not_say_how_long_they_are() -> None:
    class Longer(list[int]):
        def __len__(self) -> int:
            return 9

    scheduler = scheduler_of(DOUBLED)
    with pytest.raises(UserError, match="must have a length, got generator"):
        next(scheduler.batches(0, (n for n in range(3))))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be that of its batches, got 9 for 2"):
        list(scheduler.batches(0, Longer([1, 2])))
    outer = scheduler.batches(0, range(3))
    next(outer)
    with pytest.raises(UserError, match="must not be nested"):
        next(scheduler.batches(0, range(3)))
    with pytest.raises(UserError, match="a policy must be one, or a pruner, regularizer or quantizer, got str"):
        scheduler.add_policy("nothing")  # type: ignore[arg-type]


def test_policies_of_one_component_share_its_memory() -> None:
    sensitivity = {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}}
    schedule = sections([span("pruner", "p", 0, 1), span("pruner", "p", 2, 3)], pruners={"p": sensitivity})
    first, second = (scheduled.policy for scheduled in scheduler_of(schedule).policies)
    assert isinstance(first, PruningPolicy)
    assert isinstance(second, PruningPolicy)
    assert first.pruner is second.pruner


def test_levels_of_a_policy_are_its_own() -> None:
    levels = {"class": "SparsityLevelParameterPruner", "levels": {"0.weight": 0.25, "2.weight": 0.25}}
    schedule = sections(
        [
            span("pruner", "p", 0, 1),
            span("pruner", "p", 1, 2, levels=0.5),
            span("pruner", "p", 2, 3, levels={"2.weight": 0.75}),
        ],
        pruners={"p": levels},
    )
    scheduler = scheduler_of(schedule)
    shares = []
    for epoch in range(3):
        scheduler.on_epoch_begin(epoch)
        scheduler.on_minibatch_begin(epoch, 0, 1)
        weights = [scheduler.model.get_parameter(name) for name in ("0.weight", "2.weight")]
        shares.append([float((w == 0).float().mean()) for w in weights])
    assert shares == [[0.25, 0.25], [0.5, 0.5], [0.5, 0.75]]


def drawn(seed: int, name: str = "p") -> list[bool]:
    """Which filters a random pruner leaves."""
    schedule = sections(
        [span("pruner", name, 0, 1)], pruners={name: ranked("RandomRankedFilterPruner", weights=["2.weight"])}
    )
    scheduler = scheduler_of(schedule, seed=seed)
    torch.manual_seed(random.randrange(10**6))  # nobody looks at the global generators
    state = torch.get_rng_state()
    scheduler.on_epoch_begin(0)
    assert torch.equal(state, torch.get_rng_state())
    mask = scheduler.masks.get("2.weight")
    assert mask is not None
    return [bool(kept) for kept in mask.flatten(1).any(1)]


def test_what_is_drawn_depends_on_seed_and_name_alone() -> None:
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed, name)) for seed in (0, 1, 2) for name in "pq"}) > 3


def test_rates_begin_from_those_given() -> None:
    schedule = sections(
        [span("lr_scheduler", "l", 0, 2)], lr_schedulers={"l": {"class": "ExponentialLR", "gamma": 0.5}}
    )
    for base, expected in ((None, 0.25), ([8.0], 4.0)):
        scheduler = scheduler_of(schedule, base_lrs=base)
        assert scheduler.training.optimizer is not None
        scheduler.on_epoch_begin(0)
        assert scheduler.training.optimizer.param_groups[0]["lr"] == 2 * expected
        scheduler.on_epoch_end(0)
        assert scheduler.training.optimizer.param_groups[0]["lr"] == expected


def test_a_teacher_is_built_in_its_first_epoch_and_draws_nothing_from_the_run(tmp_path: Path) -> None:
    torch.save(small().state_dict(), tmp_path / "t.pt")
    built = []

    def make_model() -> nn.Module:
        built.append(torch.rand(3))
        return small()

    schedule = sections(
        [span("distiller", "d", 1, 3)],
        distillers={"d": {"class": "KnowledgeDistillation", "checkpoint": str(tmp_path / "t.pt")}},
    )
    scheduler = scheduler_of(schedule, make_model=make_model)
    scheduler.on_epoch_begin(0)
    assert not built
    state = torch.get_rng_state()
    for epoch in (1, 2):
        scheduler.on_epoch_begin(epoch)
        scheduler.on_epoch_end(epoch)
    assert len(built) == 1
    assert torch.equal(state, torch.get_rng_state())
    again = scheduler_of(schedule, make_model=make_model)
    torch.manual_seed(5)
    again.on_epoch_begin(1)
    assert torch.equal(built[0], built[1])  # a run that is continued has the same one


# --- on the model of a run ------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_model_is_told() -> None:
    policies = [span("pruner", "p", 1, 2), span("distiller", "d", 7, 9), span("quantizer", "q", 1, 2)]
    parts: dict[str, Any] = {
        "pruners": {"p": ranked("L1RankedStructureParameterPruner", weights=["conv2.weight"])},
        "distillers": {"d": {"class": "KnowledgeDistillation", "checkpoint": "/no/such/file.pt"}},
        "quantizers": {"q": {"class": "DorefaQuantizer", "bits_weights": 4, "overrides": {"convv": {}}}},
    }
    for message, kept in (
        ("unknown module 'convv'", 3),
        ("/no/such/file.pt: there is no such file", 2),
        ("Filters of classifier.weight need a convolution", 1),
    ):
        if kept == 1:
            parts["pruners"]["p"]["weights"] = ["classifier.weight"]
        sections_of = dict(list(parts.items())[:kept])
        with pytest.raises(UserError, match=message):
            check_on_model(sections(policies[:kept], **sections_of), TrialConfig(method="none"))


def step(scheduler: CompressionScheduler, epoch: int, minibatch: int, per_epoch: int = 3) -> None:
    model, optimizer = scheduler.model, scheduler.training.optimizer
    assert optimizer is not None
    if minibatch == 0:
        scheduler.on_epoch_begin(epoch)
    scheduler.on_minibatch_begin(epoch, minibatch, per_epoch)
    x = torch.sin(torch.arange(4 * 2 * 3 * 3) * (1.0 + epoch * per_epoch + minibatch)).view(4, 2, 3, 3)
    loss = scheduler.before_backward_pass(epoch, minibatch, per_epoch, model(x).square().mean())
    optimizer.zero_grad()
    loss.backward()
    scheduler.before_parameter_optimization(epoch, minibatch, per_epoch)
    optimizer.step()
    scheduler.on_minibatch_end(epoch, minibatch, per_epoch)
    if minibatch == per_epoch - 1:
        scheduler.on_epoch_end(epoch, metrics={"min": 1.0 / (epoch + 1), "max": 0.5})


def seeded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
        )
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


EVERYTHING = sections(
    [
        span("pruner", "s", 0, 3, use_double_copies=True, mini_batch_pruning_frequency=2),
        span("pruner", "g", 1, 3),
        span("regularizer", "r", 0, 2),
        span("lr_scheduler", "l", 0, 4),
        span("extension", "x", 1, 2),
        span("quantizer", "q", 2, 4),
    ],
    pruners={
        "s": {"class": "SplicingPruner", "sensitivities": {"5.weight": 0.1}, "low_thresh_mult": 0.5,
              "hi_thresh_mult": 0.8},
        "g": ranked("RandomRankedFilterPruner", weights=["0.weight"]),
    },
    regularizers={"r": {"class": "L1Regularizer", "reg_regims": {"2.weight": 0.02}, "threshold_criteria": "Max"}},
    lr_schedulers={"l": {"class": "ReduceLROnPlateau", "patience": 0}},
    extensions={"x": {"class": "FilterRemover"}},
    quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:thinning changed")
@pytest.mark.parametrize("cut", range(1, 12))
def test_a_loop_of_the_users_goes_on_from_any_step(cut: int) -> None:
    """Model, optimizer and scheduler through a file, in a process with another seed's model."""
    model, optimizer = seeded(0)
    scheduler = CompressionScheduler(model, EVERYTHING, optimizer)
    file = io.BytesIO()
    for number in range(12):
        if number == cut:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "scheduler": scheduler.state_dict()}, file)
        step(scheduler, number // 3, number % 3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, again_optimizer = seeded(1)
    other = CompressionScheduler(again, EVERYTHING, again_optimizer)
    other.prepare_structure(state["scheduler"])
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    other.load_state_dict(state["scheduler"])
    for number in range(cut, 12):
        step(other, number // 3, number % 3)
    assert isinstance(again, nn.Sequential)
    assert again[0].out_channels == 2  # thinned
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in again_optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:thinning changed")
def test_what_is_left_of_a_thinned_weight_stays_pruned() -> None:
    """Masks and unmasked copies are cut as their weights are, and outlive that, too."""
    for args in ({}, {"use_double_copies": True}):
        model, optimizer = seeded(0)
        with torch.no_grad():  # half of each filter and channel is seeded
            small_ones = (torch.arange(4).view(4, 1) + torch.arange(4)) % 2
            model.get_parameter("2.weight").copy_((0.9 * small_ones + 0.1).view(4, 4, 1, 1))
        schedule = sections(
            [span("pruner", "e", 0, 1, **args), span("pruner", "f", 1, 2), span("extension", "x", 1, 2)],
            pruners={
                "e": {"class": "SparsityLevelParameterPruner", "levels": {"2.weight": 0.5}},
                "f": ranked("L1RankedStructureParameterPruner", weights=["0.weight"]),
            },
            extensions={"x": {"class": "FilterRemover"}},
        )
        scheduler = CompressionScheduler(model, schedule, optimizer)
        for minibatch in range(3):
            step(scheduler, 0, minibatch)
        before = scheduler.masks.get("2.weight")
        assert before is not None
        assert int((before == 0).sum()) == 8
        scheduler.on_epoch_begin(1)
        kept = scheduler.masks.get("0.weight").flatten(1).any(1)  # type: ignore[union-attr]
        assert int(kept.sum()) == 2
        for number in range(3, 12):
            step(scheduler, number // 3, number % 3)
        weight = model.get_parameter("2.weight")
        assert weight.shape == (4, 2, 1, 1)
        assert torch.equal(weight == 0, before[:, kept] == 0)


def test_what_has_not_acted_has_no_state() -> None:
    """Schedules that differ in what comes later go on from one state, other classes included."""
    early = span("pruner", "s", 0, 1)
    first = sections(
        [early, span("pruner", "b", 2, 3)],
        pruners={"s": {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}},
                 "b": ranked("BernoulliFilterPruner", weights=["2.weight"])},
    )  # fmt: skip
    second = sections(
        [early, span("quantizer", "q", 2, 3)],
        pruners={"s": {"class": "SensitivityPruner", "sensitivities": {"0.weight": 0.5}}},
        quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
    )
    model, optimizer = seeded(0)
    writer = CompressionScheduler(model, first, optimizer)
    for number in range(6):
        step(writer, number // 3, number % 3)
    state = writer.state_dict()
    assert set(state["components"]) == {"pruners.s"}
    assert set(state["policies"]) == {"0"}
    reader = CompressionScheduler(copy.deepcopy(model), second, optimizer)
    reader.prepare_structure(state)
    reader.load_state_dict(state)
    assert any(scheduled.has_acted for scheduled in reader.policies)
    assert torch.equal(reader.masks.get("0.weight"), writer.masks.get("0.weight"))  # type: ignore[arg-type]


def test_before_change_comes_before_the_first_change_and_model_changed_after_each() -> None:
    log: list[Any] = []
    model, optimizer = seeded(0)
    schedule = sections(
        [span("pruner", "g", 1, 2), span("quantizer", "q", 2, 3)],
        pruners={"g": ranked("GradientRankedFilterPruner", weights=["0.weight"])},
        quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
    )
    scheduler = CompressionScheduler(
        model,
        schedule,
        optimizer,
        before_change=lambda: log.append(("before", bool(model[0].weight._backward_hooks))),
        model_changed=lambda: log.append(("changed", [type(m).__name__ for m in model])),
    )
    for number in range(12):
        step(scheduler, number // 3, number % 3)
        if number == 0:
            assert log == [("before", False)]  # in the epoch before the first that prunes it looks already
    assert [what for what, _ in log] == ["before", "changed"]
    assert log[1][1] == [type(m).__name__ for m in model]
