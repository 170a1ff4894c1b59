"""Reading schedules: what a file means, and every message with its line."""

from __future__ import annotations

import cProfile
import pickle
import pstats
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainables.compression.schedule import (
    PrunerPolicyConfig,
    RegularizerPolicyConfig,
    Schedule,
    ScheduleError,
    read_schedule,
)
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.document import MOST_BYTES
from trainables.compression.schedule.timing import Timing
from trainables.errors import UserError

GOOD = """
version: 1
pruners:
  p:
    class: SparsityLevelParameterPruner
    levels: {conv.weight: 0.5}
regularizers:
  r:
    class: L1Regularizer
    reg_regims:
      conv.weight: 1e-4
lr_schedulers:
  lr:
    class: StepLR
    step_size: 3
policies:
  - pruner:
      instance_name: p
      args: {keep_mask: true, levels: 0.25}
    epochs: [1, 4]
  - regularizer:
      instance_name: r
      args:
        keep_mask: true
    starting_epoch: 2
    ending_epoch: 9
    frequency: 3
  - lr_scheduler: {instance_name: lr}
    starting_epoch: 0
    ending_epoch: 5
"""


def errors(text: str, **options: Any) -> list[str]:
    """What a text is refused with, without the name of the source."""
    with pytest.raises(ScheduleError) as raised:
        read_schedule(text, source="s", **options)
    return [error.removeprefix("s:") for error in raised.value.errors]


def with_pruner(arguments: str, policy: str = "epochs: [1, 2]") -> str:
    """A schedule whose pruner has its arguments from line 4 on."""
    indented = "".join(f"\n    {line}" for line in arguments.splitlines())
    return f"version: 1\npruners:\n  p:{indented}\npolicies:\n  - pruner: {{instance_name: p}}\n    {policy}\n"


def test_what_a_file_means() -> None:
    schedule = read_schedule(GOOD)
    assert list(schedule.pruners) == ["p"]
    assert schedule.pruners["p"].settings == PRUNERS["SparsityLevelParameterPruner"](levels={"conv.weight": 0.5})
    assert schedule.regularizers["r"].settings.reg_regims == {"conv.weight": 1e-4}  # type: ignore[union-attr]
    assert (schedule.lr_schedulers["lr"].class_name, schedule.lr_schedulers["lr"].arguments) == (
        "StepLR", {"step_size": 3},
    )  # fmt: skip
    assert [policy.kind for policy in schedule.policies] == ["pruner", "regularizer", "lr_scheduler"]
    assert [policy.timing for policy in schedule.policies] == [
        Timing(epochs=(1, 4)),
        Timing(starting_epoch=2, ending_epoch=9, frequency=3),
        Timing(starting_epoch=0, ending_epoch=5, frequency=1),  # frequency may be left out
    ]
    assert [policy.args for policy in schedule.policies] == [
        PrunerPolicyConfig(keep_mask=True, levels=0.25), RegularizerPolicyConfig(keep_mask=True), None,
    ]  # fmt: skip
    assert [policy.line for policy in schedule.policies] == [17, 21, 28]
    assert schedule.component(schedule.policies[1]).name == "r"
    assert list(schedule.policies_of(schedule.pruners["p"])) == [schedule.policies[0]]


def test_a_file_a_text_and_a_mapping_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    flow = (
        "{version: 1, pruners: {p: {class: SparsityLevelParameterPruner, levels: {a: 0.5}}}, "
        "policies: [{pruner: {instance_name: p}, epochs: [1]}]}"
    )
    mapping = {
        "version": 1,
        "pruners": {"p": {"class": "SparsityLevelParameterPruner", "levels": {"a": 0.5}}},
        "policies": ({"pruner": {"instance_name": "p"}, "epochs": (1,)},),
    }
    assert read_schedule(path) == read_schedule(str(path)) == read_schedule(GOOD)
    assert read_schedule(flow) == read_schedule(mapping)


def test_a_schedule_and_its_errors_can_be_sent_to_another_process() -> None:
    schedule = read_schedule(GOOD)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    error = ScheduleError(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errors) == (str(error), ("one", "two"))


LEVEL = "class: SparsityLevelParameterPruner\nlevels: {a: 0.5}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "class: SensitivityPruner\nsensitivites: {a: 1}",
            "5: pruners.p.sensitivites: unknown argument of SensitivityPruner, did you mean 'sensitivities'? "
            "Valid: sensitivities",
        ),
        ("class: SensitivityPruner", "3: pruners.p.sensitivities: is missing: SensitivityPruner needs it"),
        ("class: SensitivityPruner\nsensitivities: {}",
         "5: pruners.p.sensitivities: must have at least 1 entry, got {}"),
        (
            "class: SensitivityPruner\nsensitivities:\n  a: 1\n  b: yes",
            "7: pruners.p.sensitivities.b: must be a number, got True",
        ),
        (
            "class: SensitivityPruner\nsensitivities:\n  a: 1\n  b: -1",
            "7: pruners.p.sensitivities.b: must be >= 0, got -1",
        ),
        (
            "class: SensitivityPruner\nsensitivities:\n  a: .nan",
            "6: pruners.p.sensitivities.a: must be a finite number, got nan",
        ),
        ("class: SensitivityPruner\nsensitivities:\n  '': 1", "6: pruners.p.sensitivities.: must not be empty, got ''"),
        ("class: SensitivityPruner\nsensitivities: [1]", "5: pruners.p.sensitivities: must be a map, got [1]"),
        ("class: SparsityLevelParameterPruner\nlevels: {a: 1.3}", "5: pruners.p.levels.a: must be <= 1, got 1.3"),
        (
            "class: AutomatedGradualPruner\nweights: 3\ninitial_sparsity: 0\nfinal_sparsity: 1",
            "5: pruners.p.weights: must be a list, got 3",
        ),
        (
            "class: AutomatedGradualPruner\nweights: [a]\ninitial_sparsity: 0.5\nfinal_sparsity: 0.4",
            "3: pruners.p: final_sparsity must be above initial_sparsity 0.5, got 0.4",
        ),
        (
            "class: StructureParameterPruner\nthreshold_criteria: Min\nreg_regims: {a: [1, 3D]}",
            "5: pruners.p.threshold_criteria: must be 'Max' or 'Mean_Abs', got 'Min'",
        ),
        (
            "class: StructureParameterPruner\nthreshold_criteria: Max\nreg_regims: {a: [1]}",
            "6: pruners.p.reg_regims.a.1: is missing: the list is too short",
        ),
        (
            "class: StructureParameterPruner\nthreshold_criteria: Max\nreg_regims: {a: [1, 3D, 2]}",
            "6: pruners.p.reg_regims.a: must have at most 2 entries, got [1, '3D', 2]",
        ),
        (
            "class: L1RankedStructureParameterPruner\nweights: [a]\ndesired_sparsity: 0.5\ngroup_type: Filter",
            "7: pruners.p.group_type: must be '3D', 'Filters', 'Channels', 'Rows' or 'Blocks', got 'Filter', did you "
            "mean 'Filters'?",
        ),
        (
            "class: L1RankedStructureParameterPruner\nweights: [a]\ndesired_sparsity: 0.5\ngroup_type: Filters\n"
            "group_size: 1.5",
            "8: pruners.p.group_size: must be an integer, got 1.5",
        ),
        (
            "class: L1RankedStructureParameterPruner\nweights: [3]\ndesired_sparsity: 0.5\ngroup_type: Filters",
            "5: pruners.p.weights.0: must be text, got 3",
        ),
        (
            "class: SplicingPruner\nsensitivities: {a: 1}\nlow_thresh_mult: 0\nhi_thresh_mult: 1",
            "6: pruners.p.low_thresh_mult: must be > 0, got 0",
        ),
        (
            "class: L1Regularizer",
            "4: pruners.p.class: unknown class 'L1Regularizer' of pruners: it belongs under regularizers",
        ),
        (
            "class: SensitivtyPruner",
            "4: pruners.p.class: unknown class 'SensitivtyPruner' of pruners, did you mean 'SensitivityPruner'? "
            f"Valid: {', '.join(PRUNERS)}",
        ),
        ("levels: {a: 1}", f"3: pruners.p: needs a class: {', '.join(PRUNERS)}"),
        ("class: 3", f"3: pruners.p: needs a class: {', '.join(PRUNERS)}, got 3"),
    ],
)  # fmt: skip
def test_messages_of_components(arguments: str, message: str) -> None:
    assert errors(with_pruner(arguments)) == [message]
    assert errors(with_pruner(arguments), compatible=True) == [message]  # they were errors there, too


POLICY_KEYS = (
    "Valid: pruner, regularizer, quantizer, lr_scheduler, extension, distiller, starting_epoch, ending_epoch, "
    "frequency, epochs"
)


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        ("epochs: [2, 1]", "8: policies.0.epochs: must be ascending numbers >= 0, each once, got [2, 1]"),
        ("epochs: []", "8: policies.0.epochs: must be ascending numbers >= 0, each once, got []"),
        ("epochs: 3", "8: policies.0.epochs: must be a list of integers such as [0, 2, 4], got 3"),
        ("epochs: [1.5]", "8: policies.0.epochs: must be a list of integers such as [0, 2, 4], got [1.5]"),
        ("ending_epoch: 3", "7: policies.0: needs starting_epoch, or epochs such as [0, 2, 4]"),
        ("frequency: 3", "7: policies.0: needs starting_epoch and ending_epoch, or epochs such as [0, 2, 4]"),
        ("starting_epoch: 1\n    ending_epoch: yes", "9: policies.0.ending_epoch: must be an integer, got True"),
        (
            "starting_epoch: 3\n    ending_epoch: 3",
            "9: policies.0.ending_epoch: must be above starting_epoch 3 (the end is exclusive), got 3",
        ),
        (
            "starting_epoch: 0\n    ending_epoch: 1000000000000",
            "9: policies.0.ending_epoch: must be at most 1000000, got 1000000000000",
        ),
        ("epochs: [1, 99999999]", "8: policies.0.epochs: must be at most 1000000, got 100000000"),
        ("starting_epoch: -1\n    ending_epoch: 3", "8: policies.0.starting_epoch: must be >= 0, got -1"),
        (
            "starting_epoch: 1\n    ending_epoch: 3\n    frequency: 0",
            "10: policies.0.frequency: must be >= 1, got 0",
        ),
    ],
)
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
        (
            "regularizer: {instance_name: p}",
            "5: policies.0.regularizer.instance_name: unknown regularizer 'p': the schedule has no regularizers",
        ),
        ("pruner: p", "5: policies.0.pruner: needs instance_name, the name of one of pruners, got 'p'"),
        (
            "pruner: {args: {}}",
            "5: policies.0.pruner: needs instance_name, the name of one of pruners, got {'args': {}}",
        ),
        ("pruner: {instance_name: p, args: 3}", "5: policies.0.pruner.args: must be a map, got 3"),
        (
            "pruner: {instance_name: p, args: {levels: {b: 1.3}}}",
            "5: policies.0.pruner.args.levels: levels of b must be in [0, 1], got 1.3",
        ),
        (
            "pruner: {instance_name: p, args: {levels: -1}}",
            "5: policies.0.pruner.args.levels: levels must be in [0, 1], got -1",
        ),
        (
            "pruner: {instance_name: p, args: {levels: {}}}",
            "5: policies.0.pruner.args.levels: levels must name at least one parameter, got none",
        ),
        (
            "pruner: {instance_name: p, args: {mini_batch_pruning_frequency: -1}}",
            "5: policies.0.pruner.args.mini_batch_pruning_frequency: mini_batch_pruning_frequency must be an integer "
            ">= 0, got -1",
        ),
        (
            "pruner: {instance_name: p, args: {mask_gradients: true}}",
            "5: policies.0.pruner.args: mask_gradients needs mask_on_forward_only: set both, or leave mask_gradients "
            "out",
        ),
        (
            "pruner: {instance_name: p, args: {keep_mask: 1}}",
            "5: policies.0.pruner.args.keep_mask: must be true or false, got 1",
        ),
    ],
)  # fmt: skip
def test_messages_of_policies(text: str, message: str) -> None:
    found = errors(policies(text))
    assert found[-1] == message
    assert [error for error in found[:-1] if "is used by no policy" not in error] == []


def test_a_policy_is_a_map_of_one_kind() -> None:
    text = GOOD.replace(
        "  - lr_scheduler: {instance_name: lr}\n", "  - nothing\n  - lr_schedulers: {instance_name: lr}\n"
    )
    kinds = "pruner, regularizer, quantizer, lr_scheduler, extension, distiller"
    assert errors(text) == [
        "13: lr_schedulers.lr: is used by no policy: add one, or leave it out",
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
        read_schedule(text, source="file.yaml")
    assert str(raised.value) == (
        "file.yaml:6: pruners.p.sensitivities.a: must be >= 0, got -1 (and 2 more: `schedule check` lists them)"
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


# --- what the original let pass -------------------------------------------------------------------------------------

SILENT = {
    "unknown section": (
        GOOD + "prunes: 3\n",
        "31: prunes: unknown section, did you mean 'pruners'? Valid: version, pruners, regularizers, quantizers, "
        "lr_schedulers, extensions, distillers, policies",
    ),
    "unknown key of a policy": (
        GOOD + "    until: 3\n", f"31: policies.2.until: unknown key of a policy. {POLICY_KEYS}",
    ),
    "unknown key of args": (
        GOOD.replace("keep_mask: true, ", "keep_mask: true, keep: 1, "),
        "19: policies.0.pruner.args.keep: unknown key of pruner policies, did you mean 'keep_mask'? Valid: levels, "
        "keep_mask, mini_batch_pruning_frequency, mask_on_forward_only, mask_gradients, use_double_copies, "
        "discard_masks_at_minibatch_end, skip_first_minibatch, fold_batchnorm",
    ),
    "unknown key of a pruner's use": (
        GOOD.replace("      instance_name: p\n", "      instance_name: p\n      name: 3\n"),
        "19: policies.0.pruner.name: unknown key of pruner policies. Valid: instance_name, args",
    ),
    "args that nobody reads": (
        GOOD.replace("{instance_name: lr}", "{instance_name: lr, args: {a: 1}}"),
        "28: policies.2.lr_scheduler.args: lr_scheduler policies take no args, got a",
    ),
    "unused component": (
        GOOD.replace("policies:", "  lr2: {class: StepLR}\npolicies:"),
        "16: lr_schedulers.lr2: is used by no policy: add one, or leave it out",
    ),
    "epochs beside a range": (
        GOOD.replace("epochs: [1, 4]", "epochs: [1, 4]\n    starting_epoch: 0"),
        "20: policies.0.epochs: epochs and starting_epoch exclude each other: give one, epochs counts",
    ),
    "a key given twice": (
        GOOD.replace("      conv.weight: 1e-4\n", "      conv.weight: 3\n      conv.weight: 1e-4\n"),
        "12: regularizers.r.reg_regims.conv.weight: is given twice, first in line 11",
    ),
    "two kinds": (
        GOOD.replace("  - pruner:\n", "  - quantizer: {instance_name: q}\n    pruner:\n"),
        "17: policies.0: has pruner and quantizer: write a policy each; only pruner counts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("compatible", [False, True])
def test_a_missing_version_is_a_warning_always(compatible: bool) -> None:
    """Of 79 published schedules 32 have none."""
    with pytest.warns(UserWarning, match=r"^s:3: version is missing: begin the file with version: 1$"):
        schedule = read_schedule(GOOD.replace("version: 1", "#"), source="s", compatible=compatible)
    assert schedule.policies == read_schedule(GOOD).policies


def test_a_single_name_is_a_list_of_one() -> None:
    """As eight published schedules have it."""
    text = "version: 1\npruners:\n  p:\n    class: AutomatedGradualPruner\n    initial_sparsity: 0\n"
    text += "    final_sparsity: 0.5\n    weights: {}\npolicies:\n"
    text += "  - {{pruner: {{instance_name: p}}, starting_epoch: 0, ending_epoch: 3, frequency: 1}}\n"
    alone, listed = (read_schedule(text.format(given)) for given in ("module.fc.weight", "[module.fc.weight]"))
    assert alone.pruners["p"].settings == listed.pruners["p"].settings
    assert alone.pruners["p"].settings.weights == ("module.fc.weight",)  # type: ignore[union-attr]


@pytest.mark.parametrize("case", SILENT)
def test_what_was_silently_accepted_is_refused_or_warned_of(case: str) -> None:
    text, message = SILENT[case]
    assert errors(text) == [message]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = read_schedule(text, source="s", compatible=True)
    assert [warning.category for warning in caught] == [UserWarning]
    assert [str(warning.message) for warning in caught] == [f"s:{message}"]
    assert schedule.policies == read_schedule(GOOD).policies


def baidu(ramp_epoch: int) -> str:
    """Baidu's pruner in the epochs 4 to 19."""
    arguments = f"class: BaiduRNNPruner\nq: 0.1\nramp_epoch: {ramp_epoch}\nramp_slope_mult: 2\nweights: [a]"
    return with_pruner(arguments, "starting_epoch: 4\n    ending_epoch: 20")


def test_the_second_line_of_baidus_rule_begins_in_its_policys_time() -> None:
    message = "6: pruners.p.ramp_epoch: must be in the epochs 4 to 19 of its policy, got 2"
    assert errors(baidu(2)) == [message]
    assert len(errors(baidu(20))) == 1
    assert isinstance(read_schedule(baidu(19)), Schedule)
    with pytest.warns(UserWarning, match="must be in the epochs 4 to 19"):
        read_schedule(baidu(2), compatible=True)


def test_levels_belong_to_the_level_pruner() -> None:
    text = with_pruner("class: SensitivityPruner\nsensitivities: {a: 1}").replace("p}", "p, args: {levels: 0.5}}")
    message = (
        "7: policies.0.pruner.args.levels: has no effect on SensitivityPruner: only SparsityLevelParameterPruner has "
        "levels"
    )
    assert errors(text) == [message]


def test_a_good_schedule_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_schedule(GOOD, compatible=True)


# --- files ----------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, folder = tmp_path / "no.yaml", tmp_path / "folder"
    folder.mkdir()
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"version: 1\n# caf\xe9\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MOST_BYTES + 1))
    cases = {
        missing: f"cannot read schedule {missing}: No such file or directory",
        folder: f"cannot read schedule {folder}: Is a directory",
        latin: f"{latin}:2: must be UTF-8 text, got byte 0xe9",
        large: f"{large}: a schedule must not be larger than 10 MB",
    }
    for path, message in cases.items():
        with pytest.raises(ScheduleError) as raised:
            read_schedule(path)
        assert str(raised.value) == message
    with pytest.raises(ScheduleError, match=r"cannot read schedule 'a.x00': embedded null"):
        read_schedule("a\0")


def test_reading_loads_no_torch() -> None:
    code = (
        "import sys; from trainables.compression.schedule import read_schedule; "
        f"read_schedule({GOOD!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def work(layers: int) -> int:
    """Calls of Python functions that reading a schedule with so many named layers takes."""
    names = "".join(f"\n      layer{i}.weight: 0.{i % 9 + 1}" for i in range(layers))
    text = with_pruner(f"class: SensitivityPruner\nsensitivities:{names}".replace("\n    ", "\n"))
    profile = cProfile.Profile()
    profile.enable()
    schedule = read_schedule(text)
    profile.disable()
    assert len(schedule.pruners["p"].settings.sensitivities) == layers  # type: ignore[union-attr]
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_the_work_grows_with_the_layers_and_not_faster() -> None:
    read_schedule(GOOD)  # imports
    assert work(1000) < 12 * work(100)


@pytest.mark.parametrize(
    ("section", "component", "rule"),
    [
        (
            "pruners",
            {"class": "RandomLevelStructureParameterPruner", "group_type": "Blocks", "sparsity_range": [0.1, 0.2],
             "weights": ["w"]},
            "Blocks needs it, got group_type Blocks without kwargs",
        ),
        (
            "pruners",
            {"class": "StructureParameterPruner", "reg_regims": {"w": [0.1, "Blocks"]}, "threshold_criteria": "Max"},
            "Blocks",
        ),
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
