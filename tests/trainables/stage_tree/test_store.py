"""The tree in storage: checksummed files under truncation and failing disks, and what makes runs share a root."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_workload import tiny  # noqa: F401 - a fixture

import trainables.stage_tree.root as root_module
from trainables.config import TrialConfig
from trainables.stage_tree import store
from trainables.stage_tree.root import root_facts, root_id
from trainables.storage import DiskFiles, remove_what_was_read
from trainables.training.recipe.fields import OF_LOADING, RECIPE_FIELDS
from trainables.workloads import build


def write_checked(path: Path, payload: bytes) -> None:
    store.write_checked(DiskFiles(path.parent), path.name, payload)


def read_checked(path: Path) -> bytes | None:
    return store.read_checked(DiskFiles(path.parent), path.name)


@given(payload=st.binary(max_size=300))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, payload: bytes) -> None:
    path = tmp_path_factory.mktemp("framed") / "deeper" / "file"
    write_checked(path, payload)
    assert read_checked(path) == payload
    assert os.listdir(path.parent) == ["file"]


def test_every_truncation_and_every_changed_byte_is_found_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checked(path, b"stage\n\x00state")
    good = path.read_bytes()
    bad = [good[:length] for length in range(len(good))]
    bad += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    bad += [good + b"\n", b"\0" * len(good)]
    for content in bad:
        path.write_bytes(content)
        assert read_checked(path) is None, content
        assert not path.exists(), content


def test_a_bad_file_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bad")
    with path.open("rb") as file:
        write_checked(path, b"good")
        remove_what_was_read(path, os.fstat(file.fileno()))
    assert read_checked(path) == b"good"


# --- what makes runs share training: everything that a run computes depends on, and nothing else ----------------------


def id_of(**changes: Any) -> str:
    config = replace(TrialConfig(workload="tiny", epochs=4, method="none"), **changes)
    return root_id(root_facts(config, build(config.workload)))


@pytest.mark.usefixtures("tiny")
def test_the_method_and_its_settings_are_no_part_of_it() -> None:
    assert len({
        id_of(),
        id_of(method="gradskip"),
        id_of(method="gradskip", CAC_VAR_START_THR=0.97, CAC_BRAKING_DISTANCE=6),
        id_of(method="gradskip", CAC_WATCH=("linear",), CAC_NORM_STATISTICS="hold", CAC_PREFIX_AUTOGRAD=False),
        id_of(method="gradskip", CAC_PREFIX_MODE="eval"),
        id_of(CAC_NORM_STATISTICS="hold_all"),
        id_of(method="gradskip", CAC_LR_FACTOR=1.0),
    }) == 1  # fmt: skip


@pytest.mark.usefixtures("tiny")
def test_what_acts_from_the_first_step_on_is_whatever_else_trains() -> None:
    found = {id_of()}
    for acting in ({"CAC_NORM_STATISTICS": "hold_all"}, {"CAC_LR_FACTOR": 2.0}, {"CAC_LR_FACTOR": 3.0}):
        first, second = (id_of(method=method, **acting) for method in ("gradskip", "gradskip+compression"))
        assert first == second
        found.add(first)
    assert len(found) == 4


RECIPES: dict[str, Any] = {
    "precision": "bfloat16", "clip_grad_norm": 0.5, "activation_checkpointing": "cheap", "channels_last": True,
    "fused_optimizer": True, "compile_mode": "default", "cudnn_benchmark": True, "deterministic": True,
}  # fmt: skip


@pytest.mark.usefixtures("tiny")
def test_the_training_recipe_is_unless_it_is_only_when_a_batch_is_ready() -> None:
    assert {*RECIPES, "batch_size", *OF_LOADING} == {*RECIPE_FIELDS}
    assert len({id_of(), *(id_of(**{name: value}) for name, value in RECIPES.items())}) == 1 + len(RECIPES)
    assert id_of(workload="digits", batch_size=32) != id_of(workload="digits")
    assert id_of(loader_workers=0, pin_memory=False) == id_of()


@pytest.mark.usefixtures("tiny")
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


@pytest.mark.usefixtures("tiny")
def test_digits_are_told_apart_by_data_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainables.workloads.digits as digits

    before = build("digits").fingerprint()
    assert build("digits").fingerprint() == before
    images, labels = digits.digit_splits()["train"]
    changed = {**digits.digit_splits(), "train": (images + 1e-6, labels)}
    monkeypatch.setattr(digits, "digit_splits", lambda: changed)
    assert build("digits").fingerprint() != before
