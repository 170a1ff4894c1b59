"""Reading schedules: every message with its line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from schedule_texts import GOOD, errors, with_pruner

from trainables.compression.schedule import ScheduleError, read_schedule
from trainables.compression.schedule.configs import PRUNERS
from trainables.errors import UserError

LEVEL = "class: SparsityLevelParameterPruner\nlevels: {a: 0.5}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("class: SensitivityPruner\nsensitivites: {a: 1}",
         "5: pruners.p.sensitivites: unknown argument of SensitivityPruner, did you mean 'sensitivities'? "
         "Valid: sensitivities"),
        ("class: SensitivityPruner", "3: pruners.p.sensitivities: is missing: SensitivityPruner needs it"),
        ("class: SensitivityPruner\nsensitivities: {}",
         "5: pruners.p.sensitivities: must have at least 1 entry, got {}"),
        ("class: SensitivityPruner\nsensitivities:\n  a: 1\n  b: yes",
         "7: pruners.p.sensitivities.b: must be a number, got True"),
        ("class: SensitivityPruner\nsensitivities:\n  a: .nan",
         "6: pruners.p.sensitivities.a: must be a finite number, got nan"),
        ("class: SensitivityPruner\nsensitivities:\n  '': 1", "6: pruners.p.sensitivities.: must not be empty, got ''"),
        ("class: SensitivityPruner\nsensitivities: [1]", "5: pruners.p.sensitivities: must be a map, got [1]"),
        ("class: SparsityLevelParameterPruner\nlevels: {a: 1.3}", "5: pruners.p.levels.a: must be <= 1, got 1.3"),
        ("class: AutomatedGradualPruner\nweights: 3\ninitial_sparsity: 0\nfinal_sparsity: 1",
         "5: pruners.p.weights: must be a list, got 3"),
        ("class: AutomatedGradualPruner\nweights: [a]\ninitial_sparsity: 0.5\nfinal_sparsity: 0.4",
         "3: pruners.p: final_sparsity must be above initial_sparsity 0.5, got 0.4"),
        ("class: StructureParameterPruner\nthreshold_criteria: Max\nreg_regims: {a: [1]}",
         "6: pruners.p.reg_regims.a.1: is missing: the list is too short"),
        ("class: StructureParameterPruner\nthreshold_criteria: Max\nreg_regims: {a: [1, 3D, 2]}",
         "6: pruners.p.reg_regims.a: must have at most 2 entries, got [1, '3D', 2]"),
        ("class: L1RankedStructureParameterPruner\nweights: [a]\ndesired_sparsity: 0.5\ngroup_type: Filter",
         "7: pruners.p.group_type: must be '3D', 'Filters', 'Channels', 'Rows' or 'Blocks', got 'Filter', did you "
         "mean 'Filters'?"),
        ("class: L1RankedStructureParameterPruner\nweights: [a]\ndesired_sparsity: 0.5\ngroup_type: Filters\n"
         "group_size: 1.5",
         "8: pruners.p.group_size: must be an integer, got 1.5"),
        ("class: L1RankedStructureParameterPruner\nweights: [3]\ndesired_sparsity: 0.5\ngroup_type: Filters",
         "5: pruners.p.weights.0: must be text, got 3"),
        ("class: SplicingPruner\nsensitivities: {a: 1}\nlow_thresh_mult: 0\nhi_thresh_mult: 1",
         "6: pruners.p.low_thresh_mult: must be > 0, got 0"),
        ("class: L1Regularizer",
         "4: pruners.p.class: unknown class 'L1Regularizer' of pruners: it belongs under regularizers"),
        ("class: SensitivtyPruner",
         "4: pruners.p.class: unknown class 'SensitivtyPruner' of pruners, did you mean 'SensitivityPruner'? "
         f"Valid: {', '.join(PRUNERS)}"),
        ("class: 3", f"3: pruners.p: needs a class: {', '.join(PRUNERS)}, got 3"),
    ],
)  # fmt: skip
def test_messages_of_components(arguments: str, message: str) -> None:
    assert errors(with_pruner(arguments)) == [message]
    assert errors(with_pruner(arguments), compatible=True) == [message]  # they were errors there, too


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        ("epochs: [2, 1]", "8: policies.0.epochs: must be ascending numbers >= 0, each once, got [2, 1]"),
        ("epochs: 3", "8: policies.0.epochs: must be a list of integers such as [0, 2, 4], got 3"),
        ("ending_epoch: 3", "7: policies.0: needs starting_epoch, or epochs such as [0, 2, 4]"),
        ("starting_epoch: 1\n    ending_epoch: yes", "9: policies.0.ending_epoch: must be an integer, got True"),
        ("starting_epoch: 3\n    ending_epoch: 3",
         "9: policies.0.ending_epoch: must be above starting_epoch 3 (the end is exclusive), got 3"),
        ("starting_epoch: 0\n    ending_epoch: 1000000000000",
         "9: policies.0.ending_epoch: must be at most 1000000, got 1000000000000"),
        ("epochs: [1, 99999999]", "8: policies.0.epochs: must be at most 1000000, got 100000000"),
        ("starting_epoch: -1\n    ending_epoch: 3", "8: policies.0.starting_epoch: must be >= 0, got -1"),
        ("starting_epoch: 1\n    ending_epoch: 3\n    frequency: 0", "10: policies.0.frequency: must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_messages_of_timings(timing: str, message: str) -> None:
    assert errors(with_pruner(LEVEL, timing)) == [message]


def test_an_agp_pruner_needs_two_epochs() -> None:
    agp = "class: AutomatedGradualPruner\nweights: [a]\ninitial_sparsity: 0\nfinal_sparsity: 1"
    assert errors(with_pruner(agp, "epochs: [3]")) == [
        "9: policies.0: AutomatedGradualPruner 'p' rises over its active epochs, so it needs at least two, got 3"
    ]


def policies(text: str) -> str:
    """A schedule with one pruner ``p``, whose policies begin in line 5."""
    return (
        "version: 1\npruners:\n  p: {class: SparsityLevelParameterPruner, levels: {a: 0.5}}\npolicies:\n"
        f"  - {text}\n    epochs: [1]\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pruner: {instance_name: q}", "5: policies.0.pruner.instance_name: unknown pruner 'q'. Valid: p"),
        ("regularizer: {instance_name: p}",
         "5: policies.0.regularizer.instance_name: unknown regularizer 'p': the schedule has no regularizers"),
        ("pruner: p", "5: policies.0.pruner: needs instance_name, the name of one of pruners, got 'p'"),
        ("pruner: {instance_name: p, args: 3}", "5: policies.0.pruner.args: must be a map, got 3"),
        ("pruner: {instance_name: p, args: {levels: {b: 1.3}}}",
         "5: policies.0.pruner.args.levels: levels of b must be in [0, 1], got 1.3"),
        ("pruner: {instance_name: p, args: {levels: {}}}",
         "5: policies.0.pruner.args.levels: levels must name at least one parameter, got none"),
        ("pruner: {instance_name: p, args: {mask_gradients: true}}",
         "5: policies.0.pruner.args: mask_gradients needs mask_on_forward_only: set both, or leave mask_gradients "
         "out"),
        ("pruner: {instance_name: p, args: {keep_mask: 1}}",
         "5: policies.0.pruner.args.keep_mask: must be true or false, got 1"),
    ],
)  # fmt: skip
def test_messages_of_policies(text: str, message: str) -> None:
    assert errors(policies(text)) == [message]


def test_a_policy_is_a_map_of_one_kind() -> None:
    text = GOOD.replace(
        "  - lr_scheduler: {instance_name: lr}\n", "  - nothing\n  - lr_schedulers: {instance_name: lr}\n"
    )
    kinds = "pruner, regularizer, quantizer, lr_scheduler, extension, distiller"
    assert errors(text) == [
        f"28: policies.2: must be a map with one of {kinds}, got 'nothing'",
        f"29: policies.3: must be a map with one of {kinds}, got "
        "{'lr_schedulers': {'instance_name': 'lr'}, 'starting_epoch':...",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("version: 2\npolicies: []",
         ["1: version: must be 1, got 2",
          "2: policies: must be a list of what acts when, with at least one entry; got []"]),
        ("version: 1\n", ["1: policies: must be a list of what acts when, with at least one entry; is missing"]),
        ("\n- 1", ["2: a schedule must be a map with version and policies, got [1]"]),
        ("version: 1\npruners: [1]\npolicies: {a: 1}\n",
         ["2: pruners: must be a map from names to components, got [1]",
          "3: policies: must be a list of what acts when, with at least one entry; got {'a': 1}"]),
        ("version: 1\npruners:\n  p: 3\npolicies: []\n",
         ["3: pruners.p: must be a map of class and its arguments, got 3",
          "4: policies: must be a list of what acts when, with at least one entry; got []"]),
        ("version: 1\npolicies:\n  - !search {low: 1, high: 2}\n",
         ["3: policies.0: is a range to search (!search), which a search fills: give a value to train with it"]),
    ],
)  # fmt: skip
def test_messages_of_the_whole(text: str, found: list[str]) -> None:
    assert errors(text) == found


def test_one_quantizer_at_most() -> None:
    text = (
        "version: 1\nquantizers:\n  a: {class: DorefaQuantizer}\n  b: {class: WRPNQuantizer}\npolicies:\n"
        "  - quantizer: {instance_name: a}\n    epochs: [0]\n  - quantizer: {instance_name: b}\n    epochs: [0]\n"
    )
    assert errors(text) == ["2: quantizers: must hold one quantizer at most, got a, b"]


def test_overrides_of_quantizers_name_their_valid_keys() -> None:
    text = (
        "version: 1\nquantizers:\n  q:\n    class: DorefaQuantizer\n    overrides:\n      conv1:\n"
        "        bits_weight: 3\n      conv2: 3\npolicies:\n  - quantizer: {instance_name: q}\n    epochs: [0]\n"
    )
    assert errors(text) == [
        "7: quantizers.q.overrides.conv1.bits_weight: unknown argument of conv1, did you mean 'bits_weights'? "
        "Valid: bits_activations, bits_weights, bits_bias",
        "8: quantizers.q.overrides.conv2: must be a map, got 3",
    ]


def test_all_errors_are_collected_and_the_first_is_the_message() -> None:
    text = with_pruner("class: SensitivityPruner\nsensitivities:\n  a: -1\n  b: x\n  c: 0\n  d: [1]")
    with pytest.raises(UserError) as raised:
        read_schedule(text)
    assert str(raised.value) == (
        "<schedule>:6: pruners.p.sensitivities.a: must be >= 0, got -1 (and 2 more: `schedule check` lists them)"
    )
    mapping = {"version": 1, "pruners": {"p": {"class": "SensitivityPruner", "sensitivities": {"a": -1}}},
               "policies": [{"pruner": {"instance_name": "p"}, "epochs": [0]}]}  # fmt: skip
    with pytest.raises(ScheduleError, match=r"^<schedule>: pruners\.p\.sensitivities\.a: must be >= 0, got -1$"):
        read_schedule(mapping)


def test_learning_rate_schedulers_are_checked_by_whoever_knows_them() -> None:
    seen = []

    def check(class_name: str, arguments: Mapping[str, Any]) -> None:
        seen.append((class_name, dict(arguments)))
        if class_name == "StepLR":
            raise UserError("StepLR is not for us")

    assert errors(GOOD, check_lr=check) == ["13: lr_schedulers.lr: StepLR is not for us"]
    assert seen == [("StepLR", {"step_size": 3})]


@pytest.mark.parametrize(
    ("section", "component", "rule"),
    [
        ("pruners", {"class": "RandomLevelStructureParameterPruner", "group_type": "Blocks", "weights": ["w"],
                     "sparsity_range": [0.1, 0.2]}, "Blocks needs it, got group_type Blocks without kwargs"),
        ("quantizers", {"class": "PostTrainLinearQuantizer", "clip_acts": "N_STD"}, "N_STD needs it"),
        ("quantizers", {"class": "PostTrainLinearQuantizer", "clip_n_stds": 2.0}, "clip_acts NONE with clip_n_stds"),
    ],
)  # fmt: skip
def test_arguments_that_need_each_other(section: str, component: dict[str, object], rule: str) -> None:
    kind = section.removesuffix("s")
    policy = {kind: {"instance_name": "it"}, "starting_epoch": 0, "ending_epoch": 1}
    with pytest.raises(UserError) as caught:
        read_schedule({"version": 1, section: {"it": component}, "policies": [policy]})
    assert rule in str(caught.value)
