"""Post-training quantization as Distiller's files describe it: statistics, modes by kind, inputs of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from trainables.compression.quantizers import build_quantizer
from trainables.compression.quantizers.quantized_modules import INPUT, OUTPUT
from trainables.compression.schedule import read_schedule
from trainables.errors import UserError

FILE = """
quantizers:
  post_train_quantizer:
    class: PostTrainLinearQuantizer
    bits_activations: 8
    bits_parameters: 6
    bits_accum: 32
    mode: {activations: ASYMMETRIC_UNSIGNED, weights: SYMMETRIC}
    model_activation_stats: stats.yaml
    per_channel_wts: false
    clip_acts: AVG
    inputs_quant_auto_fallback: true
    overrides:
      first:
        input_overrides:
          0: {from_output: true}
      relu:
        clip_acts: NONE
      last:
        clip_acts: NONE
        input_overrides:
          0: {clip_acts: N_STD, clip_n_stds: 2, bits_activations: 5, mode: SYMMETRIC}
"""


def found(low: float, high: float) -> dict[str, Any]:
    """Return the statistics of an activation as Distiller writes them."""
    return {"min": low, "max": high, "avg_min": 0.8 * low, "avg_max": 0.7 * high, "mean": 0.1, "std": 0.5, "b": 1.0}


STATS = {
    "first": {"inputs": {0: found(-2.0, 3.0)}, "output": found(-4.0, 5.0)},
    "relu": {"inputs": {0: found(-4.0, 5.0)}, "output": found(0.0, 5.0)},
    "last": {"inputs": {0: found(0.0, 6.0)}, "output": found(-7.0, 8.0)},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.relu(self.first(x)))
        return y


def on_grid(x: Tensor, low: float, high: float, bits: int, *, symmetric: bool) -> Tensor:
    """The formula of the manual, in double precision."""
    x, low, high = x.double(), *torch.tensor([low, high]).tolist()  # ranges are single precision
    if symmetric:
        scale = (2**bits - 1) / 2 / max(-low, high)
        return (x * scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) / scale
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (2**bits - 1) / (high - low)
    zero = round(-low * scale)
    return ((x * scale + zero).round().clamp(0, 2**bits - 1) - zero) / scale


def quantized(folder: Path, text: str = FILE) -> Net:
    (folder / "stats.yaml").write_text(yaml.safe_dump(STATS))
    (component,) = read_schedule(text.replace("stats.yaml", str(folder / "stats.yaml"))).components()
    assert component.settings is not None
    torch.manual_seed(0)
    net = Net()
    build_quantizer(component.name, component.settings, net).prepare(net, None)
    return net.eval()


@pytest.mark.filterwarnings("ignore:.*is missing")
def test_a_file_with_statistics_needs_no_epoch(tmp_path: Path) -> None:
    net = quantized(tmp_path).double()
    torch.manual_seed(0)
    plain = Net()
    x = 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    weights = [w.weight.detach() for w in (plain.first, plain.last)]
    first, last = (on_grid(w, float(w.min()), float(w.max()), 6, symmetric=True) for w in weights)
    y = on_grid(x, -1.6, 2.1, 8, symmetric=False) @ first.T + plain.first.bias.double()
    y = on_grid(y, -3.2, 3.5, 8, symmetric=False).relu()
    y = on_grid(y, 0.0, 5.0, 8, symmetric=False)
    y = on_grid(y, max(0.0, 0.1 - 1.0), min(6.0, 0.1 + 1.0), 5, symmetric=True) @ last.T + plain.last.bias.double()
    torch.testing.assert_close(net(x.double()), on_grid(y, -7.0, 8.0, 8, symmetric=False), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is missing")
def test_inputs_that_are_left_out(tmp_path: Path) -> None:
    net = quantized(
        tmp_path, FILE.replace("input_overrides:\n          0: {from_output: true}", "quantize_inputs: false")
    )
    assert INPUT not in net.first._modules
    assert OUTPUT in net.first._modules
    assert INPUT in net.last._modules


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"first": {"inputs": {0: {"min": "a", "max": 1}}, "output": found(0, 1)}},
            r"first\.inputs\.0\.min: Input should",
        ),
        ({"first": {"output": None}}, r"first\.output: Input should be"),
        ({"frist": STATS["first"]}, r"unknown layer in .*stats\.yaml 'frist': did you mean 'first'"),
        ({}, r"unknown layer in .*stats\.yaml ''"),
        ({"first": {"output": {"min": 0, "max": 1}}}, r"stats\.yaml lacks avg_min of first"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is missing")
def test_statistics_that_are_none(wrong: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(f"{__name__}.STATS", wrong)
    with pytest.raises(UserError, match=message):
        quantized(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is missing")
def test_deviations_inherit() -> None:
    text = FILE.replace("    model_activation_stats: stats.yaml\n", "").replace(
        "clip_acts: AVG\n", "clip_acts: N_STD\n    clip_n_stds: 3\n"
    ).replace("      relu:\n        clip_acts: NONE", "      relu:\n        clip_n_stds: 1")  # fmt: skip
    (component,) = read_schedule(text).components()
    assert component.settings is not None
    net = Net()
    build_quantizer("q", component.settings, net).prepare(net, None)
    deviations = {name: module.deviations for name, module in net.named_modules() if hasattr(module, "deviations")}
    assert deviations == {
        "first.quantized_output": 3, "first.quantized_input": 3, "relu.quantized_output": 1,
        "last.quantized_output": None, "last.quantized_input": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("clip_acts: N_STD, clip_n_stds: 2", "clip_acts: N_STD", "clip_acts N_STD of last needs clip_n_stds"),
        ("0: {from_output: true}", "1: {from_output: true}", "must be '0', got '1'"),
        ("bits_activations: 5, mode: SYMMETRIC", "bits_activations: 1", "must be at least 2, got 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is missing")
def test_settings_that_cannot_be(before: str, after: str, message: str, tmp_path: Path) -> None:
    text = FILE.replace(before, after).replace("activations: ASYMMETRIC_UNSIGNED", "activations: SYMMETRIC")
    with pytest.raises(UserError, match=message):
        quantized(tmp_path, text)


def test_without_policies_nothing_acts_while_a_model_trains() -> None:
    with pytest.warns(UserWarning, match=r"nothing acts while a model trains: .* export-model --quantize FILE"):
        assert read_schedule(f"version: 1{FILE}").policies == ()
