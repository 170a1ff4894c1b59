"""Reading schedules: what a file means, what the original let pass, and files."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
from schedule_texts import GOOD, errors, with_pruner

from trainables.compression.schedule import (
    PrunerPolicyConfig,
    RegularizerPolicyConfig,
    Schedule,
    ScheduleError,
    read_schedule,
)
from trainables.compression.schedule.configs import CLASSES, PRUNERS
from trainables.compression.schedule.timing import Timing


def test_what_a_file_means() -> None:
    schedule = read_schedule(GOOD)
    assert list(schedule.sections["pruners"]) == ["p"]
    assert schedule.sections["pruners"]["p"].settings == PRUNERS["SparsityLevelParameterPruner"](
        levels={"conv.weight": 0.5}
    )
    assert schedule.sections["regularizers"]["r"].settings.reg_regims == {"conv.weight": 1e-4}  # type: ignore[union-attr]
    rates = schedule.sections["lr_schedulers"]["lr"]
    assert (rates.class_name, rates.arguments) == ("StepLR", {"step_size": 3})
    assert [policy.kind for policy in schedule.policies] == ["pruner", "regularizer", "lr_scheduler"]
    assert [policy.timing for policy in schedule.policies] == [
        Timing(epochs=(1, 4)),
        Timing(starting_epoch=2, ending_epoch=9, frequency=3),
        Timing(starting_epoch=0, ending_epoch=5, frequency=1),  # frequency may be left out
    ]
    assert [policy.args for policy in schedule.policies] == [
        PrunerPolicyConfig(keep_mask=True, levels=0.25), RegularizerPolicyConfig(keep_mask=True), None,
    ]  # fmt: skip
    assert [schedule.lines["policies", place] for place in range(3)] == [17, 21, 28]
    assert schedule.component(schedule.policies[1]).name == "r"


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
    for model in (model for models in CLASSES.values() for model in models.values()):  # those of settings
        assert pickle.loads(pickle.dumps(model)) is model
    error = ScheduleError(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errors) == (str(error), ("one", "two"))


POLICY_KEYS = (
    "Valid: pruner, regularizer, quantizer, lr_scheduler, extension, distiller, starting_epoch, ending_epoch, "
    "frequency, epochs"
)


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
    with pytest.warns(UserWarning, match=r"^<schedule>:3: version is missing: begin the file with version: 1$"):
        schedule = read_schedule(GOOD.replace("version: 1", "#"), compatible=compatible)
    assert schedule.policies == read_schedule(GOOD).policies


@pytest.mark.parametrize("compatible", [False, True])
def test_a_component_without_a_policy_is_a_warning_always(compatible: bool) -> None:
    """Of 79 published schedules 8 have one, and the original runs them."""
    text = GOOD.replace("policies:", "  lr2: {class: StepLR}\npolicies:")
    with pytest.warns(
        UserWarning, match=r"^<schedule>:16: lr_schedulers\.lr2: is used by no policy: add one, or leave it out$"
    ):
        schedule = read_schedule(text, compatible=compatible)
    assert schedule.policies == read_schedule(GOOD).policies


@pytest.mark.parametrize("case", SILENT)
def test_what_was_silently_accepted_is_refused_or_warned_of(case: str) -> None:
    text, message = SILENT[case]
    assert errors(text) == [message]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = read_schedule(text, compatible=True)
    assert [warning.category for warning in caught] == [UserWarning]
    assert [str(warning.message) for warning in caught] == [f"<schedule>:{message}"]
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


# --- files ----------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, folder = tmp_path / "no.yaml", tmp_path / "folder"
    folder.mkdir()
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"version: 1\n# caf\xe9\n")
    cases = {
        missing: f"cannot read schedule {missing}: No such file or directory",
        folder: f"cannot read schedule {folder}: Is a directory",
        latin: f"{latin}:2: must be UTF-8 text, got byte 0xe9",
    }
    for path, message in cases.items():
        with pytest.raises(ScheduleError) as raised:
            read_schedule(path)
        assert str(raised.value) == message
    with pytest.raises(ScheduleError, match=r"^cannot read schedule a\x00: embedded null"):
        read_schedule("a\0")
