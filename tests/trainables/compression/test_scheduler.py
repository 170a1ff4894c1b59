"""The scheduler: who is told what in which order, and a user's own loop beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_schedules import EPOCHS, SCHEDULES, ranked, sections, text
from runs import finish
from tiny_workload import Tiny, TinyAdam, tiny  # noqa: F401 - a fixture
from torch import Tensor, nn

from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy
from trainables.compression.policies import DistillationPolicy, Policy, PruningPolicy, Training
from trainables.compression.pruners import build_pruner
from trainables.compression.schedule import read_schedule
from trainables.compression.schedule.configs import SparsityLevelParameterPrunerConfig
from trainables.compression.schedule.timing import Moment
from trainables.compression.scheduler import CompressionScheduler
from trainables.config import TrialConfig
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


def test_looking_ends_with_the_last_active_epoch_and_begins_where_a_run_is_continued() -> None:
    log: list[Any] = []
    scheduler = CompressionScheduler(nn.Linear(1, 1))
    scheduler.add_policy(Told("a", log), epochs=[0])
    scheduler.add_policy(Told("b", log), epochs=[1])
    scheduler.on_minibatch_begin(0, 3, 5)  # in the middle of an epoch
    assert log == ["a looks", "a begins 0.3 of 5"]
    scheduler.on_minibatch_begin(0, 4, 5)
    assert log[2:] == ["a begins 0.4 of 5"]
    scheduler.on_epoch_begin(1)
    assert log[3:] == ["a looks away", "b looks", "b epoch 1"]
    with scheduler.unhooked():
        assert log.pop() == "b looks away"
    assert log.pop() == "b looks"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_pruner_of_two_policies_sees_the_training_of_both(order: tuple[int, int]) -> None:
    """Whichever is listed first: the end of one policy does not blind the other."""
    times = [{"starting_epoch": 1, "ending_epoch": 2}, {"starting_epoch": 3, "ending_epoch": 4}]
    schedule = sections(
        [{"pruner": {"instance_name": "p"}, **times[place]} for place in order],
        pruners={"p": ranked("GradientRankedFilterPruner", weights=["0.weight"])},
    )
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CompressionScheduler.from_schedule(model, optimizer, schedule)
    seen = []
    for epoch in range(5):
        scheduler.on_epoch_begin(epoch)
        scheduler.on_minibatch_begin(epoch, 0, 1)
        model(torch.ones(3, 1, 1, 1)).sum().backward()
        scheduler.on_minibatch_end(epoch, 0, 1)
        scheduler.on_epoch_end(epoch)
        seen.append(bool(scheduler.state_dict()["components"].get("pruners.p", {}).get("sums")))
    # An epoch before the first, in each active one, and between the two.
    assert seen == [True, True, True, True, True]
    scheduler.on_epoch_begin(9)
    assert not model[0].weight._backward_hooks


def test_masks_are_applied_between_policies_and_the_loop() -> None:
    """After a step the masks come first, then the policies; before the forward the policies come first."""
    model = nn.Linear(4, 1, bias=False)
    scheduler = CompressionScheduler(model)
    seen: list[tuple[str, int]] = []

    class Sees(Policy):
        def minibatch_begin(self, training: Training, moment: Moment) -> None:
            seen.append(("begin", int((model.weight == 0).sum())))

        def minibatch_end(self, training: Training, moment: Moment) -> None:
            seen.append(("end", int((model.weight == 0).sum())))

    settings = SparsityLevelParameterPrunerConfig(levels={"weight": 0.5})
    scheduler.add_policy(PruningPolicy(build_pruner("p", settings, model, seed=0)))
    scheduler.add_policy(Sees())
    scheduler.on_epoch_begin(0)
    scheduler.on_minibatch_begin(0, 0, 1)
    assert int((model.weight == 0).sum()) == 2
    with torch.no_grad():
        model.weight += 1.0
    scheduler.on_minibatch_end(0, 0, 1)
    assert seen == [("begin", 0), ("end", 2)]
    with torch.no_grad():
        model.weight += 1.0
    scheduler.apply_masks()
    assert int((model.weight == 0).sum()) == 2


# --- a user's own loop ----------------------------------------------------------------------------------------------


def plain_loop(kind: type[Tiny], file: Path) -> dict[str, Tensor]:
    """Training as a user of the original writes it, with the workload's own learning rates unless the schedule's."""
    workload = kind()
    with isolated(seed=0, threads=1):
        model = workload.make_model()
        optimizer = workload.make_optimizer(model.named_parameters())
        plain = workload.make_scheduler(optimizer, EPOCHS * workload.steps_per_epoch)
        own_rates = "lr_schedulers" in file.read_text()
        scheduler = CompressionScheduler.from_file(
            model, optimizer, file,
            example=lambda model: workload.loss(model, next(iter(workload.train_batches(0, 0)))),
            make_model=workload.make_model,
        )  # fmt: skip
        steps = workload.steps_per_epoch
        for epoch in range(EPOCHS):
            model.train()
            scheduler.on_epoch_begin(epoch)
            total, samples = 0.0, 0
            for minibatch, batch in enumerate(workload.train_batches(epoch, 0)):
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
            model.eval()
            with torch.no_grad():
                accuracy = workload.evaluate(model, "validation", "cpu")
            scheduler.on_epoch_end(epoch, metrics={"min": float(total) / samples, "max": accuracy})
        return model.state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.filterwarnings("ignore:thinning changed")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("agp", Tiny), ("splicing", TinyAdam), ("gradients", Tiny), ("folded norms", Tiny), ("regularizers", TinyAdam),
        ("pact", Tiny), ("learning rates", Tiny), ("thinning", TinyAdam),
    ],
)  # fmt: skip
def test_a_plain_loop_from_a_file_is_our_run_bit_for_bit(name: str, kind: type[Tiny], tmp_path: Path) -> None:
    file = tmp_path / "schedule.yaml"
    file.write_text(text(SCHEDULES[name]))
    weights = plain_loop(kind, file)
    config = TrialConfig(workload=kind.name, epochs=EPOCHS, method="compression", schedule=file.read_text())
    with TrainingRun(config) as run:
        assert run.step == 0
        untrained = [value.clone() for value in run.model.parameters()]
        finish(run)
        ours = run.model.state_dict()
        assert list(ours) == list(weights)
        assert all(torch.equal(value, weights[key]) for key, value in ours.items())
        assert not any(torch.equal(a, b) for a, b in zip(untrained, run.model.parameters(), strict=False))


def test_a_scheduler_from_python_objects() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    teacher = nn.Sequential(nn.Linear(4, 3))
    scheduler = CompressionScheduler(model)
    distillation = KnowledgeDistillationPolicy(model, teacher, 2.0, DistillationLossWeights(1.0, 0.0, 0.0))
    scheduler.add_policy(distillation, starting_epoch=1, ending_epoch=2)
    (scheduled,) = scheduler.policies
    assert isinstance(scheduled.policy, DistillationPolicy)
    x, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for epoch in range(3):
        scheduler.on_epoch_begin(epoch)
        scheduler.on_minibatch_begin(epoch, 0, 1)
        scores = model(x)
        plain = nn.functional.cross_entropy(scores, labels)
        loss = scheduler.before_backward_pass(epoch, 0, 1, plain)
        if epoch == 1:
            p, q = (torch.softmax(found.detach() / 2, 1) for found in (teacher(x), scores))
            expected = 4 * sum(
                float(p[n, c] * (p[n, c].log() - q[n, c].log())) for n in range(5) for c in range(3)
            ) / 5  # fmt: skip
            assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
        else:
            assert loss is plain
        scheduler.on_epoch_end(epoch)
    assert not model._forward_hooks


def test_where_a_schedule_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text(SCHEDULES["agp"]))
    model = Tiny().make_model()
    for given in (SCHEDULES["agp"], file.read_text(), file, str(file), read_schedule(file)):
        scheduler = CompressionScheduler.from_schedule(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
        assert [s.timing.active_epochs() for s in scheduler.policies] == [(1, 2, 3)]
