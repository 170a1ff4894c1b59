"""What makes runs share training: everything that a run computes depends on, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_workload
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture

import trainables.stage_tree.root as root_module
from trainables.config import TrialConfig
from trainables.stage_tree.root import root_facts, root_id
from trainables.training.recipe.fields import OF_LOADING, RECIPE_FIELDS
from trainables.workloads import build

pytestmark = pytest.mark.usefixtures("tiny")


def id_of(**changes: Any) -> str:
    config = replace(TrialConfig(workload="tiny", epochs=4, method="none"), **changes)
    return root_id(root_facts(config, build(config.workload)))


def test_the_method_and_its_settings_are_no_part_of_it() -> None:
    assert len({
        id_of(),
        id_of(method="gradskip"),
        id_of(method="gradskip", CAC_VAR_START_THR=0.97, CAC_BRAKING_DISTANCE=6),
        id_of(method="gradskip", CAC_WATCH=("linear",), CAC_NORM_STATISTICS="hold", CAC_PREFIX_AUTOGRAD=False),
    }) == 1  # fmt: skip


RECIPES: dict[str, Any] = {
    "precision": "bfloat16", "clip_grad_norm": 0.5, "activation_checkpointing": "cheap", "channels_last": True,
    "fused_optimizer": True, "compile_mode": "default", "cudnn_benchmark": True, "deterministic": True,
}  # fmt: skip


def test_the_training_recipe_is_unless_it_is_only_when_a_batch_is_ready() -> None:
    assert {*RECIPES, "batch_size", *OF_LOADING} == {*RECIPE_FIELDS}
    assert len({id_of(), *(id_of(**{name: value}) for name, value in RECIPES.items())}) == 1 + len(RECIPES)
    assert id_of(workload="digits", batch_size=32) != id_of(workload="digits")
    assert id_of(loader_workers=0, pin_memory=False) == id_of()


def test_data_code_versions_and_the_device_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {id_of()}
    with monkeypatch.context() as patch:
        patch.setattr(tiny_workload.Tiny, "fingerprint", lambda _: "other data")
        found.add(id_of())
    with monkeypatch.context() as patch:
        patch.setattr(root_module, "code_fingerprint", lambda: "other code")
        found.add(id_of())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        found.add(id_of())
    with monkeypatch.context() as patch:
        patch.setattr(root_module, "device_kind", lambda _: "another processor")
        found.add(id_of())
    assert len(found) == 5
    assert id_of() in found


def test_digits_are_told_apart_by_data_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainables.workloads.digits as digits

    before = build("digits").fingerprint()
    assert build("digits").fingerprint() == before
    images, labels = digits.digit_splits()["train"]
    changed = {**digits.digit_splits(), "train": (images + 1e-6, labels)}
    monkeypatch.setattr(digits, "digit_splits", lambda: changed)
    assert build("digits").fingerprint() != before
