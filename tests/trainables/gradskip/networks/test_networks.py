"""Settings by network: against torch.optim and layers switched off by hand, their stage tree, what is refused."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from runs import facts, finish, rows_alone
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import search_spaces
from search_spaces import SpaceContext
from trainables.config import TrialConfig, method_of
from trainables.errors import UserError
from trainables.gradskip.networks.network_optimizers import NetworkOptimizers
from trainables.gradskip.networks.network_settings import canonical_networks, read_networks
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun
from trainables.workloads import build
from trainables.workloads.base import Workload
from tune_cac.tuning.warm_start.baseline import learn

pytestmark = pytest.mark.thorough

OPTIONS = ("width=4",)
#: Numbers are those of each network's own parameters, from 0.
STOPS = {"generator": ((3, 9), (4, 15)), "discriminator": ((2,), (11,))}
TEXTS = tuple(
    f"{network}.{name}={','.join(map(str, values))}"
    for network, lists in STOPS.items()
    for name, values in zip(("CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR"), lists, strict=True)
)


def config(*texts: str, **fields: Any) -> TrialConfig:
    given = {"workload": "gan_digits", "workload_options": OPTIONS, "epochs": 2, "method": "gradskip_by_network"}
    return TrialConfig(**{**given, "network_settings": texts, **fields})


def trained_by_hand(stops: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], epochs: int) -> dict[str, Tensor]:
    """Train with torch.optim; after the step of a stop the first parameters of its network need no gradient."""
    workload = build("gan_digits", OPTIONS)
    torch.manual_seed(0)
    model = workload.make_model().train()
    optimizer = workload.make_optimizer(model.named_parameters())
    schedule = workload.make_scheduler(optimizer, workload.steps_per_epoch * epochs)
    step = 0
    for epoch in range(epochs):
        for batch in workload.train_batches(epoch, 0):
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
            schedule.step()
            for network, (layers, iterations) in stops.items():
                for layer, iteration in zip(layers, iterations, strict=True):
                    if step == iteration:
                        for parameter in list(model.get_submodule(network).parameters())[: layer + 1]:
                            parameter.requires_grad_(False)
                            parameter.grad = None
            step += 1
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("networks", [("generator",), ("discriminator",), ("generator", "discriminator")])
def test_each_network_stops_by_its_own_settings_as_if_switched_off_by_hand(networks: tuple[str, ...]) -> None:
    texts = [text for text in TEXTS if text.split(".")[0] in networks]
    with TrainingRun(config(*texts, CAC_VAR_START_THR=-1.0)) as run:
        rows = finish(run)
        found = {name: value.detach().clone() for name, value in run.model.named_parameters()}
        events = run.method.events()
    expected = trained_by_hand({network: STOPS[network] for network in networks}, epochs=2)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    wanted = sorted((i, network) for network in networks for i in STOPS[network][1])
    assert [(event["iteration"], event["network"]) for event in events] == wanted
    assert all(event["name"].startswith(event["network"]) for event in events)
    names = list(found)
    assert all(names[event["layer"]] == event["name"] for event in events)  # numbered in the whole model
    assert json.loads(rows[-1]["stop_events"]) == events
    assert rows[-1]["stopped_through"] == max(event["layer"] for event in events)
    assert rows[-1]["compute_saved"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_search_over_a_stage_tree_equals_the_trials_alone(tmp_path: Path) -> None:
    space = search_spaces.load("auto_thresholds_by_network")
    workload = build("gan_digits", OPTIONS)
    context = SpaceContext(
        total_steps=2 * workload.steps_per_epoch, networks=workload.networks, start_thr_range=(0.999, 1.0),
        later_thr_range=(0.999, 1.0),
    )  # fmt: skip
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    sharing = Sharing(tree=tmp_path / "tree", trials=20)
    executed, both = [], 0
    with SharedRun(config(method="none"), sharing) as dense:
        finish(dense)
    for _ in range(8):
        found = config(**space.suggest(study.ask(), context))
        with SharedRun(found, sharing) as trial:
            rows = finish(trial)
            executed.append(trial.trained_steps)
        assert facts(rows) == rows_alone(found)
        networks = {event["network"] for event in json.loads(rows[-1]["stop_events"])}
        both += len(networks) == 2
    assert both
    assert sum(executed) < 0.9 * 8 * context.total_steps
    with SharedRun(found, sharing) as again:
        assert facts(finish(again)) == facts(rows)
        assert again.trained_steps == 0


@pytest.mark.slow
def test_what_both_do_in_one_step_is_one_intervention_and_an_earlier_one_comes_first(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=9)
    texts = ["generator.CAC_STOP_LAYER_NUM=3", "generator.CAC_STOP_LAYER_ITR=9"]
    with SharedRun(config(method="none"), sharing) as dense:
        finish(dense)
    for iteration, steps in ((9, 1), (5, 2), (12, 2)):
        more = ["discriminator.CAC_STOP_LAYER_NUM=2", f"discriminator.CAC_STOP_LAYER_ITR={iteration}"]
        found = config(*texts, *more)
        with SharedRun(found, sharing) as trial:
            assert facts(finish(trial)) == rows_alone(found)
            acts = [json.loads(visit.entered_by.action)["networks"] for visit in trial.path.visits if visit.entered_by]
        assert len(acts) == steps
        assert acts[0].keys() == ({"generator", "discriminator"} if steps == 1 else {"generator"} if iteration > 9
                                  else {"discriminator"})  # fmt: skip


def test_settings_of_all_networks_count_where_a_network_has_none_of_its_own() -> None:
    found = config("generator.CAC_VAR_START_THR=0.9", CAC_VAR_START_THR=0.97, CAC_BRAKING_DISTANCE=5)
    generator, discriminator = map(found.settings_of_network, ("generator", "discriminator"))
    assert (generator.start_thr, generator.braking_distance) == (0.9, 5)
    assert (discriminator.start_thr, discriminator.braking_distance) == (0.97, 5)


def test_equal_settings_are_equal_configurations() -> None:
    texts = ["b.CAC_VAR_START_THR=0.90", "a.CAC_STOP_LAYER_NUM= 3, 9", "a.CAC_STOP_LAYER_ITR=1,2"]
    assert canonical_networks(texts) == canonical_networks(reversed(texts))
    assert canonical_networks(texts) == (
        "a.CAC_STOP_LAYER_NUM=3,9", "a.CAC_STOP_LAYER_ITR=1,2", "b.CAC_VAR_START_THR=0.9",
    )  # fmt: skip
    again = TrialConfig.from_mapping(json.loads(json.dumps(config(*TEXTS).to_dict())))
    assert again == config(*reversed(TEXTS))
    assert read_networks(again.network_settings or ())["generator"]["CAC_STOP_LAYER_NUM"] == (3, 9)
    assert method_of(["network_settings"]) == method_of(["generator.CAC_VAR_START_THR"]) == "gradskip_by_network"


@pytest.mark.parametrize(
    ("texts", "fields", "message"),
    [
        (["generator=3"], {}, r"network_settings must be NETWORK.VARIABLE=VALUE, such as .*, got 'generator=3'"),
        (["generator.CAC_VAR_START_TRH=1"], {}, "unknown variable 'CAC_VAR_START_TRH': did you mean 'CAC_VAR_START_"),
        (["generator.CAC_VAR_START_THR=2"], {}, r"CAC_VAR_START_THR must be in \(0, 1\] or -1 \(off\), got '2'|got 2"),
        (["generator.CAC_RULE=gradient_norm"], {}, "CAC_RULE=gradient_norm of network generator needs measurements"),
        (["generator.CAC_PREFIX_AUTOGRAD=0"], {}, "CAC_PREFIX_AUTOGRAD must be 1 with settings by network, got 0"),
        (["generator.CAC_STOP_LAYER_NUM=3"], {"CAC_STOP_LAYER_ITR": (1, 2)}, "must have one entry for each stop"),
        (["generator.CAC_VAR_START_THR=1"], {"method": "gradskip"}, "settings by network need method gradskip_by_netw"),
        ([], {"workers": 2}, "method gradskip_by_network trains in one process, got workers=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_clear_error(texts: list[str], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        config(*texts, **fields)
    assert "\n" not in str(error.value)


def test_a_network_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match="unknown network of workload gan_digits 'generatr': did you mean 'generator'"):
        TrainingRun(config("generatr.CAC_VAR_START_THR=1"))


class Pair(nn.Module):
    """Two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.left(value) + self.right(value)
        return found


def test_groups_of_several_networks_or_of_none_are_refused() -> None:
    model = Pair()
    with pytest.raises(UserError, match="got group 0 of left and right: give the optimizer one group or more for each"):
        NetworkOptimizers(SGD(model.parameters(), 0.1), model, ("left", "right"))
    with pytest.raises(UserError, match="got group 0 of no network"):
        NetworkOptimizers(SGD(model.left.parameters(), 0.1), model, ("right",))
    with pytest.raises(UserError, match="network 'middle' must be a module of the model"):
        NetworkOptimizers(SGD(model.parameters(), 0.1), model, ("middle",))


MODULE = """
import torch
from torch import nn
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.right = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    def forward(self, value):
        return self.left(value) + self.right(value)
def optimizer(named):
    groups = {}
    for name, parameter in named:
        groups.setdefault(name.split(".")[0], []).append(parameter)
    return torch.optim.SGD([{"params": each} for each in groups.values()], lr=0.1)
data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 5
def make(networks="left,right", grouped=True):
    names = networks if networks == "text" else [name for name in networks.split(",") if name]
    parts = {"model": Pair, "train": data, "validation": data, "networks": names}
    return {**parts, "optimizer": optimizer} if grouped else parts
"""


def own_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Workload:
    (tmp_path / "pairs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pairs", raising=False)
    workload = build("pairs:make", options)
    workload.check(0)
    return workload


def test_a_workload_of_the_users_names_its_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_workload(tmp_path, monkeypatch).networks == ("left", "right")
    texts = ("right.CAC_STOP_LAYER_NUM=1", "right.CAC_STOP_LAYER_ITR=3")
    fields = {"workload_options": None, "CAC_WATCH": ("linear",), "CAC_VAR_START_THR": -1.0}
    with TrainingRun(config(*texts, workload="pairs:make", **fields)) as run:
        finish(run)
        (event,) = run.method.events()
    assert (event["network"], event["name"], event["layer"]) == ("right", "right.0.bias", 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["networks=left,middle"], "network 'middle' must be a module of the model, got none of that name"),
        (["grouped=no"], "each parameter group must be of one of the networks left, right, got group 0 of"),
        (["networks=text"], "networks of workload pairs:make must be a list of names of modules, got 'text'"),
    ],
)
def test_networks_that_a_workload_does_not_have_are_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        own_workload(tmp_path, monkeypatch, *options)


@pytest.mark.parametrize("foreach", [False, True])
def test_parts_step_as_the_whole_optimizer_and_share_its_state_after_loading(foreach: bool) -> None:
    def made() -> tuple[Pair, AdamW]:
        torch.manual_seed(1)
        model = Pair()
        groups = [{"params": list(net.parameters()), "lr": lr} for net, lr in ((model.left, 0.1), (model.right, 0.3))]
        return model, AdamW(groups, foreach=foreach)

    def train(model: Pair, optimizer: AdamW, steps: int) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(steps):
            optimizer.zero_grad()
            model(torch.full((4, 3), float(number))).square().mean().backward()
            optimizer.step()
            schedule.step()

    model, optimizer = made()
    train(model, optimizer, 6)
    state, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 3)
    parts_model, parts_optimizer = made()
    parts = NetworkOptimizers(parts_optimizer, parts_model, ("left", "right"))
    train(parts_model, parts_optimizer, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights, parts_model.parameters(), strict=True))
    parts_model, parts_optimizer = made()
    parts = NetworkOptimizers(parts_optimizer, parts_model, ("left", "right"))
    parts_optimizer.load_state_dict(state)
    with torch.no_grad():
        for parameter, value in zip(parts_model.parameters(), weights, strict=True):
            parameter.copy_(value)
    train(parts_model, parts_optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parts_model.parameters(), strict=True))
    assert all(part.state is parts_optimizer.state for part in parts.parts.values())
    with pytest.raises(RuntimeError, match="steps without a closure"):
        parts_optimizer.step(lambda: 0.0)


@pytest.mark.slow
def test_the_baseline_proves_which_settings_do_nothing_and_shows_ranges_of_thresholds(tmp_path: Path) -> None:
    sharing = Sharing(tree=tmp_path / "tree", trials=9)
    base = TrialConfig(workload="gan_digits", workload_options=OPTIONS, epochs=2, method="none")
    with SharedRun(base, sharing) as dense:
        row = finish(dense)[-1]
        root = dense.store.root
    space = search_spaces.load("auto_thresholds_by_network")
    context = SpaceContext(total_steps=int(row["step"]), networks=("generator", "discriminator"))
    learned = learn(space, context, sharing.tree, base=base, hold={}, root=root)
    assert learned.proves_what_acts
    assert not learned.knows_what_acts  # savings are not predicted
    assert learned.context.later_thr_range is not None
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = set()
    for _ in range(12):
        found = config(**space.suggest(study.ask(), learned.context))
        idle = learned.does_nothing(found)
        if idle not in seen:  # one of each is trained
            assert (rows_alone(found)[-1]["stop_events"] == "[]") == idle
        seen.add(idle)
    assert seen == {True, False}
    assert not learned.does_nothing(replace(found, workload_options=("width=6",)))
