"""Schedules built as Distiller's published ones, in words of our own: trained, exported, executed by both engines.

Filters that are removed, training with quantization, and a file for a trained model, on the ResNet of CIFAR whose
layers those schedules name.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import write_folder
from onnxruntime import InferenceSession, SessionOptions
from quantized_nets import relative_difference

from trainables.deployment.exporting import EXACT_SUMS
from tune_cac.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FILTERS = """
version: 1
lr_schedulers:
  decay: {class: ExponentialLR, gamma: 0.9}
pruners:
  first_of_blocks:
    class: L1RankedStructureParameterPruner_AGP
    initial_sparsity: 0.1
    final_sparsity: 0.5
    group_type: Filters
    weights: [module.layer1.0.conv1.weight, module.layer1.1.conv1.weight, module.layer1.2.conv1.weight]
  once:
    class: L1RankedStructureParameterPruner
    group_type: Filters
    desired_sparsity: 0.25
    weights: [module.layer3.1.conv1.weight]
extensions:
  remover: {class: FilterRemover, thinning_func_str: remove_filters, arch: resnet20_cifar, dataset: cifar10}
policies:
  - pruner: {instance_name: first_of_blocks}
    starting_epoch: 0
    ending_epoch: 3
    frequency: 1
  - pruner: {instance_name: once}
    epochs: [1]
  - extension: {instance_name: remover}
    epochs: [2]
  - lr_scheduler: {instance_name: decay}
    starting_epoch: 1
    ending_epoch: 3
    frequency: 1
"""
QUANTIZED = """
quantizers:
  in_training:
    class: QuantAwareTrainRangeLinearQuantizer
    bits_activations: 8
    bits_weights: 8
    mode: ASYMMETRIC_UNSIGNED
    ema_decay: 0.99
    per_channel_wts: true
    overrides:
      fc: {bits_weights: 8, bits_activations: null}
policies:
  - quantizer: {instance_name: in_training}
    starting_epoch: 0
    ending_epoch: 3
    frequency: 1
"""
AFTERWARDS = """
quantizers:
  afterwards:
    class: PostTrainLinearQuantizer
    bits_activations: 8
    bits_parameters: 8
    bits_accum: 32
    mode: {activations: ASYMMETRIC_UNSIGNED, weights: SYMMETRIC_RESTRICTED}
    clip_acts: NONE
    per_channel_wts: true
    overrides:
      fc: {clip_acts: N_STD, clip_n_stds: 3}
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes, each of one colour with noise, as a network of a few steps can learn."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    colours = random.integers(0, 200, (10, 3))
    for split, count in (("train", 12), ("val", 4)):
        names = [f"class{number}" for number in range(10) for _ in range(count)]
        pixels = [colours[int(name[-1])] + random.integers(0, 56, (16, 16, 3)) for name in names]
        write_folder(folder / split, [image.astype(np.uint8) for image in pixels], names)
    return folder


@pytest.mark.filterwarnings("ignore:.*is missing")
@pytest.mark.parametrize(
    ("schedule", "in_training", "removed", "said", "most"),
    [
        # Half of the filters of three blocks of 16 channels, and the weights that read them; a quarter of one of 64.
        (FILTERS, True, 3 * 16 * 16 * 9 * 16**2 + 64 * 64 * 9 * 4**2 // 2, r"tolerance 0\.001\)", 1e-3),
        (QUANTIZED, True, 0, r" 0 are rounded otherwise\n(.*\n)*onnxruntime multiplies integers in \d+ of", 0.1),
        (AFTERWARDS, False, 0, r" 0 are rounded otherwise\n(.*\n)*onnxruntime multiplies integers in \d+ of", 0.1),
    ],
)
def test_it_is_trained_exported_and_executed(
    schedule: str, in_training: bool, removed: int, said: str, most: float, photos: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(schedule)
    trial = ["trial", "--workload", "images", "--data", str(photos), "--model", "resnet20_cifar", "--epochs", "3",
             "--save", "trained.pt"]  # fmt: skip
    how = ["--schedule", "s.yaml"]
    assert main([*trial, *(how if in_training else ["--method", "none"])]) == 0
    more = [] if in_training else ["--quantize", "s.yaml"]
    for to in ("onnx", "torch"):
        capsys.readouterr()
        assert main(["export-model", "trained.pt", "--to", to, *more]) == 0
        found = capsys.readouterr().out
        (macs,) = re.findall(r"multiply-adds a sample +(\S+) +(\S+)", found)
        before, after = (int(number.replace(",", "")) for number in macs)
        assert before - after == removed
        assert to == "torch" or re.search(said, found), found
    # Two engines that know nothing of each other, nor of tune_cac.
    images, options = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0)), SessionOptions()
    options.add_session_config_entry(*EXACT_SUMS)
    session = InferenceSession("model.onnx", options)
    theirs = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
    assert relative_difference(torch.export.load("model.pt2").module()(images), theirs) < most
