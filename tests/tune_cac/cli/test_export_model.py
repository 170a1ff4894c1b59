"""The command ``export-model`` on trained digits, whose files onnxruntime and torch run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from runs import rows_alone
from studies import result_row, write_study
from thorough import rest_thorough

from trainables.config import TrialConfig
from tune_cac.cli.main import main

pytestmark = pytest.mark.slow

THINNED = """
version: 1
pruners:
  filters:
    class: L2RankedStructureParameterPruner
    group_type: Filters
    desired_sparsity: 0.5
    weights: ['conv[3-6].weight']
  fine:
    class: SparsityLevelParameterPruner
    levels: {classifier.weight: 0.5}
extensions:
  thin: {class: FilterRemover}
policies:
  - pruner: {instance_name: filters}
    epochs: [0]
  - extension: {instance_name: thin}
    epochs: [1]
  - pruner: {instance_name: fine}
    epochs: [1]
"""
TO_8_BITS = """
version: 1
quantizers:
  eight: {class: QuantAwareTrainRangeLinearQuantizer, bits_weights: 8, bits_activations: 8, quantize_inputs: true}
policies:
  - quantizer: {instance_name: eight}
    starting_epoch: 0
    ending_epoch: 2
"""
WEIGHTS_ALONE = TO_8_BITS.replace("QuantAwareTrainRangeLinearQuantizer, bits_weights: 8, bits_activations: 8, "
                                  "quantize_inputs: true", "DorefaQuantizer, bits_weights: 4")  # fmt: skip


def table(out: str, number: int = 0) -> dict[str, list[str]]:
    """Rows of a printed table by name: as built, of the file, ratio."""
    lines = out.split("\n\n")[number].splitlines()[1:]
    return {(parts := re.split(r" {2,}", line))[0]: parts[1:] for line in lines}


@pytest.mark.parametrize(
    ("schedule", "more", "expected"),
    rest_thorough(
        [
            (THINNED, ["--int8"], r"integers in 7 of 7 layers\non x86 .* has session\.x64quantprecision=1"),
            (THINNED, [], r"% of the weights are zero: no kernel here skips them, they save zipped bytes alone"),
            (
                TO_8_BITS,
                [],
                r"in torch takes \S+ ms for a batch of 32, the file \S+ of that\nonnxruntime .* [67] of 7 layers",
            ),
            (
                WEIGHTS_ALONE,
                [],
                r"tolerance 0\.001\)(.|\n)*simulated only: onnxruntime multiplies floats in all 7 layers",
            ),
            (
                TO_8_BITS,
                ["--to", "torch"],
                r"simulated only: int8 weights are multiplied as floats here",
            ),
        ],
        of_several=True,
    ),
)
def test_a_trained_file(
    schedule: str, more: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(schedule)
    assert main(["trial", "--epochs", "2", "--schedule", "s.yaml", "--save", "trained.pt"]) == 0
    trained = re.search(r"validation accuracy (\S+),", capsys.readouterr().out)
    assert trained is not None
    assert main(["export-model", "trained.pt", *more]) == 0
    out = capsys.readouterr().out
    assert re.search(expected, out), out
    assert f"accuracy on 599 samples of validation: {trained[1]}, of the file" in out
    found = table(out)
    size = Path("model.pt2" if "torch" in more else "model.onnx").stat().st_size
    assert found["bytes"][1] == f"{size:,}"
    ratio = float(found["multiply-adds a sample"][2])
    assert ratio < 0.75 if schedule is THINNED else ratio == 1
    if "torch" not in more:
        session = onnxruntime.InferenceSession("model.onnx")
        for samples in (1, 5):  # of a caller that has neither torch nor tune_cac
            images = np.zeros((samples, 1, 16, 16), np.float32)
            assert session.run(None, {session.get_inputs()[0].name: images})[0].shape == (samples, 10)


def test_a_trial_of_a_study_is_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrialConfig(method="gradskip", epochs=2, CAC_STOP_LAYER_NUM=(3,), CAC_STOP_LAYER_ITR=(8,))
    row = result_row() | rows_alone(config)[-1]
    write_study(tmp_path / "results" / "mine", [{"row": result_row()}, {"row": row, "config": config.to_dict()}])
    assert main(["export-model", "mine", "--trial", "1", "--to", "torch", "--output", "mine.pt2"]) == 0
    captured = capsys.readouterr()
    assert "training trial 1 again: 2 epochs" in captured.err
    assert "warning" not in captured.err  # it ends with the accuracy that the study has
    assert torch.export.load("mine.pt2").module()(torch.zeros(3, 1, 16, 16)).shape == (3, 10)


@pytest.mark.thorough
def test_a_post_training_file_quantizes_a_trained_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without policies, as published: nothing acts while a model trains."""
    monkeypatch.chdir(tmp_path)
    Path("q.yaml").write_text(
        "version: 1\nquantizers:\n  q:\n    class: PostTrainLinearQuantizer\n    per_channel_wts: true\n"
        "    mode: {activations: ASYMMETRIC_UNSIGNED, weights: SYMMETRIC}\n"
    )
    assert main(["trial", "--epochs", "2", "--schedule", "q.yaml"]) == 2
    assert "q.yaml is for a trained model: export-model --quantize q.yaml" in capsys.readouterr().err
    assert main(["trial", "--epochs", "3", "--method", "none", "--save", "trained.pt"]) == 0
    capsys.readouterr()
    assert main(["export-model", "trained.pt", "--quantize", "q.yaml"]) == 0
    out = capsys.readouterr().out
    assert ", as in the model here; 0 are rounded otherwise" in out
    assert main(["export-model", "trained.pt", "--int8"]) == 0
    for quantized in (out, capsys.readouterr().out):  # by our quantizer, and by onnxruntime's own
        assert "onnxruntime multiplies integers in 7 of 7 layers" in quantized
        values = [float(value) for value in re.findall(r"0\.\d{3,}", quantized.split("samples of validation")[1])[:2]]
        assert abs(values[0] - values[1]) < 0.03
    # A student is exported without its teacher.
    assert main(["trial", "--epochs", "1", "--kd-resume", "trained.pt", "--save", "student.pt"]) == 0
    assert main(["export-model", "student.pt", "--to", "torch"]) == 0
    program = torch.export.load("model.pt2")
    assert sum(tensor.numel() for tensor in program.state_dict.values()) < 20_000
    capsys.readouterr()
    assert main(["trial", "--epochs", "1", "--kd-teacher", "resnet20_cifar", "--save", "student.pt"]) == 0
    assert main(["export-model", "student.pt", "--to", "torch"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n +teacher resnet20_cifar +model.pt2 +ratio\n", out)
    numbers = [int(table(out, number)["bytes"][0].replace(",", "")) for number in (-2, -3)]
    assert numbers[0] > 1_000_000 > numbers[1]  # 4 bytes for each of 270,000 parameters
    Path("no.yaml").write_text(THINNED)
    assert main(["export-model", "trained.pt", "--quantize", "no.yaml"]) == 2
    assert "must have a PostTrainLinearQuantizer and nothing else" in capsys.readouterr().err
