"""From a schedule to policies: their order, whose memory is whose, what is drawn, and what does not fit the model."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_schedules import ranked, sections, span
from torch import nn

from trainables.compression.policies import (
    DistillationPolicy,
    LRPolicy,
    PruningPolicy,
    QuantizationPolicy,
    RegularizationPolicy,
    ThinningPolicy,
)
from trainables.compression.scheduler import CompressionScheduler, check_on_model
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.workloads import build


def small() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        )


def scheduler_of(schedule: dict[str, Any], model: nn.Module | None = None, **more: Any) -> CompressionScheduler:
    model = small() if model is None else model
    return CompressionScheduler.from_schedule(model, torch.optim.SGD(model.parameters(), lr=0.5), schedule, **more)


def test_policies_come_in_the_schedules_order_with_its_times() -> None:
    schedule = sections(
        [
            span("extension", "x", 5, 6),
            span("quantizer", "q", 4, 9),
            {"lr_scheduler": {"instance_name": "l"}, "epochs": [0, 7]},
            span("pruner", "p", 1, 8, 3, keep_mask=True),
            span("regularizer", "r", 0, 2, keep_mask=True),
            span("distiller", "d", 2, 3),
        ],
        pruners={"p": {"class": "MagnitudeParameterPruner", "thresholds": {"*weight": 0.1}}},
        regularizers={"r": {"class": "L1Regularizer", "reg_regims": {"0.*": 0.1}}},
        quantizers={"q": {"class": "DorefaQuantizer", "bits_weights": 4, "bits_activations": 4}},
        lr_schedulers={"l": {"class": "StepLR", "step_size": 3}},
        extensions={"x": {"class": "ChannelRemover", "round_to": 4}},
        distillers={"d": {"class": "KnowledgeDistillation", "teacher": "resnet20"}},
    )
    found = scheduler_of(schedule).policies
    assert [type(scheduled.policy) for scheduled in found] == [
        ThinningPolicy, QuantizationPolicy, LRPolicy, PruningPolicy, RegularizationPolicy, DistillationPolicy,
    ]  # fmt: skip
    assert [scheduled.timing.active_epochs() for scheduled in found] == [
        (5,), (4, 5, 6, 7, 8), (0, 7), (1, 4, 7), (0, 1), (2,),
    ]  # fmt: skip
    thinning, _, _, pruning, regularization, _ = (scheduled.policy for scheduled in found)
    assert isinstance(thinning, ThinningPolicy)
    assert (thinning.kind, thinning.round_to) == ("channels", 4)
    assert isinstance(pruning, PruningPolicy)
    assert pruning.args.keep_mask
    assert pruning.pruner.targets == ("0.weight", "2.weight", "5.weight")
    assert isinstance(regularization, RegularizationPolicy)
    assert (regularization.keep_mask, regularization.regularizer.targets) == (True, ("0.weight", "0.bias"))


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


def test_a_missing_extra_is_said_when_the_schedule_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, in the epoch that thins."""
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    schedule = sections([span("extension", "x", 5, 6)], extensions={"x": {"class": "FilterRemover"}})
    with pytest.raises(UserError, match=r"needs torch_pruning, which is not installed: pip install 'tune-cac\[thin\]'"):
        scheduler_of(schedule)


def test_rates_begin_from_those_given() -> None:
    schedule = sections(
        [span("lr_scheduler", "l", 0, 2)], lr_schedulers={"l": {"class": "ExponentialLR", "gamma": 0.5}}
    )
    for base, expected in ((None, 0.25), ([8.0], 4.0)):
        scheduler = scheduler_of(schedule, base_lrs=base)
        assert scheduler.optimizer is not None
        scheduler.on_epoch_begin(0)
        assert scheduler.optimizer.param_groups[0]["lr"] == 2 * expected
        scheduler.on_epoch_end(0)
        assert scheduler.optimizer.param_groups[0]["lr"] == expected


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


def test_checking_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.save(build("digits").make_model().state_dict(), tmp_path / "t.pt")
    schedule = sections(
        [span("pruner", "p", 1, 2), span("distiller", "d", 1, 2)],
        pruners={"p": {"class": "SensitivityPruner", "sensitivities": {"conv?.weight": 0.3}}},
        distillers={"d": {"class": "KnowledgeDistillation", "checkpoint": str(tmp_path / "t.pt")}},
    )
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_on_model(schedule, TrialConfig(method="none"))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def changed(section: str, **more: Any) -> dict[str, Any]:
    """A right schedule for digits with something wrong in it."""
    schedule = sections(
        [span("pruner", "p", 1, 2)],
        pruners={"p": ranked("L1RankedStructureParameterPruner", weights=["conv2.weight"])},
    )
    if section == "policies":
        schedule["policies"] += [more]
    else:
        schedule.setdefault(section, {}).setdefault(next(iter(more)), {}).update(next(iter(more.values())))
    return schedule


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (changed("pruners", p={"weights": ["conv9.weight"]}), r"conv9\.weight.*conv\d\.weight"),
        (changed("pruners", p={"weights": ["classifier.weight"]}), "Filters of classifier.weight need a convolution"),
        (changed("pruners", p={"class": "L3Ranked"}), "L3Ranked"),
        (changed("policies", quantizer={"instance_name": "q"}, epochs=[1]), "q"),
        (
            {
                **changed("distillers", d={"class": "KnowledgeDistillation", "checkpoint": "/no/such/file.pt"}),
                "policies": [span("pruner", "p", 1, 2), span("distiller", "d", 7, 9)],
            },
            "/no/such/file.pt: there is no such file",
        ),
        (
            {
                **changed("quantizers", q={"class": "DorefaQuantizer", "bits_weights": 4, "bits_activations": 4,
                                           "overrides": {"convv": {"bits_weights": 2}}}),
                "policies": [span("pruner", "p", 1, 2), span("quantizer", "q", 1, 2)],
            },
            "convv",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_told(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_on_model(schedule, TrialConfig(method="none"))
