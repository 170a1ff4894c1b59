"""What a schedule means in a model: names, structures, and what is left out on request."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from trainables.compression.schedule import ModelFacts, Resolved, ScheduleError, read_schedule, resolve
from trainables.compression.schedule.matching import match_modules
from trainables.errors import UserError

FACTS = ModelFacts(
    parameters={
        "stem.weight": (8, 3, 3, 3),
        "body.0.weight": (16, 8, 3, 3),
        "body.0.bias": (16,),
        "body.1.weight": (16, 16, 1, 1),
        "time.weight": (4, 8, 5),
        "head.weight": (10, 16),
    },
    modules={"stem": "Conv2d", "body": "Sequential", "body.0": "Conv2d", "body.1": "Conv2d", "head": "Linear"},
)


def matched(section: str, arguments: dict[str, Any], *, compatible: bool = False, **policy: Any) -> Resolved:
    """What one component ``x``, used by one policy, means in `FACTS`."""
    kind = section.removesuffix("s")
    mapping = {
        "version": 1,
        section: {"x": arguments},
        "policies": [{kind: {"instance_name": "x", **policy}, "epochs": [0, 1]}],
    }
    return resolve(read_schedule(mapping), FACTS, compatible)


def names(section: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    found = matched(section, arguments)
    return found.of(next(iter(found.schedule.components())))


def ranked(group_type: str, *weights: str, **more: Any) -> dict[str, Any]:
    return {
        "class": "L1RankedStructureParameterPruner", "group_type": group_type, "desired_sparsity": 0.5,
        "weights": list(weights), **more,
    }  # fmt: skip


def test_lists_keep_the_schedules_order_and_maps_the_models() -> None:
    agp = {"class": "AutomatedGradualPruner", "initial_sparsity": 0, "final_sparsity": 1}
    assert names("pruners", {**agp, "weights": ["head.weight", "body.*.weight", "head.weight"]}) == (
        "head.weight", "body.0.weight", "body.1.weight",
    )  # fmt: skip
    sensitivities = {"head.weight": 1, "re:body\\.\\d\\.weight": 2, "*": 3, "module.body.1.weight": 4}
    found = matched("pruners", {"class": "SensitivityPruner", "sensitivities": sensitivities})
    assert found.values["pruners", "x"] == {
        "stem.weight": 3, "body.0.weight": 2, "body.0.bias": 3, "body.1.weight": 4, "time.weight": 3, "head.weight": 1,
    }  # fmt: skip


def test_overrides_name_modules_also_by_regular_expressions_of_the_original() -> None:
    overrides = {"body\\.[01]": {"bits_weights": 2}, "head": {"bits_weights": 3}}
    found = matched("quantizers", {"class": "DorefaQuantizer", "overrides": overrides})
    assert tuple(found.values["quantizers", "x"]) == ("body.0", "body.1", "head")
    assert match_modules("body", ["body", "body.0"]) == ("body",)
    assert match_modules(".*body.*", ["module.body.0", "head"]) == ("module.body.0",)
    with pytest.raises(UserError, match=r"unknown module 'bdoy': did you mean 'body'\? Valid: body"):
        match_modules("bdoy", ["body"])
    with pytest.raises(UserError, match="matches no module"):
        match_modules("*(", ["body"])


def refused(section: str, arguments: dict[str, Any], **policy: Any) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        matched(section, arguments, **policy)
    return list(raised.value.errors)


def test_compatible_leaves_out_what_matches_nothing_with_a_warning_each() -> None:
    arguments = {"class": "SensitivityPruner", "sensitivities": {"nothing": 1, "head.weight": 2, "conv*": 1}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = matched("pruners", arguments, compatible=True)
    assert [str(warning.message).split(": ")[1] for warning in caught] == [
        "pruners.x.sensitivities.nothing", "pruners.x.sensitivities.conv*",
    ]  # fmt: skip
    assert found.schedule.sections["pruners"]["x"].settings.sensitivities == {"head.weight": 2}  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="nothing"):
        found = matched("pruners", ranked("Filters", "nothing"), compatible=True)
    assert (found.schedule.sections["pruners"], found.schedule.policies) == ({}, ())


@pytest.mark.parametrize(
    ("section", "arguments", "message"),
    [
        ("pruners", ranked("Filters", "stem.weight", "head.weight"),
         "weights.1: Filters of head.weight need a convolution's weight, 3 or 4 dimensions, got shape 10x16"),
        ("pruners", ranked("Filters", "body.0.*"),
         "weights.0: Filters of body.0.bias need a convolution's weight, 3 or 4 dimensions, got shape 16"),
        ("pruners", ranked("Channels", "head.weight"),
         "weights.0: Channels of head.weight need a convolution's weight, 3 or 4 dimensions, got shape 10x16"),
        ("pruners", ranked("Rows", "stem.weight"),
         "weights.0: Rows of stem.weight need a matrix, 2 dimensions, got shape 8x3x3x3"),
        ("pruners", ranked("Blocks", "time.weight", kwargs={"block_shape": [1, 1, 1, 1]}),
         "weights.0: Blocks of time.weight need a matrix or a 2D convolution's weight, 2 or 4 dimensions, got shape "
         "4x8x5"),
        ("pruners", ranked("Blocks", "stem.weight", kwargs={"block_shape": [1, 2, 1, 1]}),
         "weights.0: block_shape must divide filters and channels of stem.weight, got [1, 2, 1, 1] for shape "
         "(8, 3, 3, 3)"),
        ("pruners", ranked("Filters", "stem.weight", "body.0.weight", group_dependency="Leader"),
         "weights: must have equally many structures with group_dependency Leader, got stem.weight 8, "
         "body.0.weight 16"),
        ("pruners", ranked("Blocks", "body.0.weight", "head.weight", group_dependency="Leader",
                           kwargs={"block_shape": [2, 2, 1, 1]}),
         "weights: must have equally many structures with group_dependency Leader, got body.0.weight 288, "
         "head.weight 40"),
        ("regularizers", {"class": "GroupLassoRegularizer", "reg_regims": {"stem.weight": [1, "Rows+Cols"]}},
         "reg_regims.stem.weight: Rows+Cols of stem.weight need a matrix, 2 dimensions, got shape 8x3x3x3"),
        ("pruners", {"class": "StructureParameterPruner", "threshold_criteria": "Max",
                     "reg_regims": {"head.weight": [1, "2D"]}},
         "reg_regims.head.weight: 2D of head.weight need a convolution's weight, 3 or 4 dimensions, got shape 10x16"),
    ],
)  # fmt: skip
def test_weights_without_the_structures(section: str, arguments: dict[str, Any], message: str) -> None:
    assert refused(section, arguments) == [f"<schedule>: {section}.x.{message}"]


def test_weights_with_the_structures() -> None:
    for group, weight in (("Filters", "time.weight"), ("3D", "stem.weight"), ("Channels", "stem.weight"),
                          ("Rows", "head.weight")):  # fmt: skip
        assert names("pruners", ranked(group, weight)) == (weight,)
    assert names("pruners", ranked("Blocks", "body.0.weight", kwargs={"block_shape": [4, 2, 1, 1]}))
    assert names("pruners", ranked("Filters", "body.0.weight", "body.1.weight", group_dependency="Leader"))
    assert names("pruners", ranked("Channels", "body.0.weight", "time.weight", group_dependency="Leader"))
