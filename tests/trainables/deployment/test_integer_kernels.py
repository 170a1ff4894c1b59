"""Graphs rewritten for onnxruntime's integer kernels, beside the models that they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from quantized_nets import relative_difference, settings_of
from torch import Tensor, nn
from torch.optim import SGD

from trainables.compression.quantizers import build_quantizer
from trainables.deployment.exporting import Deployed, executed_products, export_model, quantized_after

pytestmark = pytest.mark.slow  # onnxscript takes seconds to load


class Net(nn.Module):
    """Every order of layers that integer kernels do not take as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU6(),
            nn.Conv2d(32, 32, 3, groups=32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4, 10), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class Residual(nn.Module):
    """Layers whose results are added before they are rounded, or that read what is not: these multiply floats."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        self.conv, self.again, self.last = nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1, bias=False)
        self.after, self.up, self.fc = nn.BatchNorm2d(32), nn.ConvTranspose2d(32, 32, 2), nn.Linear(32, 10)
        self.behind = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.again(self.conv(x) + self.after(self.last(x)))
        scores: Tensor = self.fc(self.behind(self.up(x)).mean((2, 3)))
        return scores


class Added(nn.Module):
    """Wide convolutions of every form whose results are added before they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.start = nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()
        self.kinds = nn.ModuleList([
            nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, (3, 2), padding="same"),
            nn.Conv2d(64, 64, 1, bias=False), nn.Conv2d(64, 64, 3, padding=2, dilation=2),
            nn.Conv2d(64, 64, 3, padding=1, groups=2),
        ])  # fmt: skip
        self.norm, self.relu = nn.BatchNorm2d(64), nn.ReLU()
        self.pool, self.down, self.short = nn.MaxPool2d(2, 1), nn.Conv2d(64, 64, 3, 2, 1), nn.Conv2d(64, 64, 1, 2)
        self.again, self.line, self.narrow = nn.ReLU(), nn.Conv1d(64, 64, 2, padding=1), nn.Conv1d(64, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.stem(x))
        first, *others = self.kinds
        x = self.norm(first(x)) + x
        for kind in others:
            x = x + kind(self.relu(x))
        x = self.pool(self.relu(x))
        x = self.again(self.down(x) + self.short(x)).flatten(2)
        scores: Tensor = self.line(x).mean(2) + self.narrow(x).repeat(1, 4, 1).mean(2)
        return scores


class Pooled(nn.Module):
    """Layers with pooling or another shape between them and what rounds their results or inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32, 10), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class Tokens(nn.Module):
    """An embedding, and linear layers of three dimensions, whose weights the graph has transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.relu = nn.Embedding(64, 32), nn.ReLU()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.second(self.relu(self.first(self.embedding(x[:, 0].abs().mul(9).long()))))
        return scores


def trained(name: str, kind: type[nn.Module] = Net, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    net = kind()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.uniform_(module.bias, -1, 1)
            with torch.no_grad():
                module.weight[3] = 0
    if isinstance(net, Net):
        with torch.no_grad():  # the greatest value is negative: its integer is -128, which has no negative
            net.body[3].weight[:, 0, 0, 0] = -1  # type: ignore[union-attr, operator]
    quantizer = build_quantizer("q", settings_of(name, **changes))
    quantizer.prepare(net, SGD(net.parameters(), 0.1))
    with torch.no_grad():
        for _ in range(20):
            net.train()(torch.randn(8, 3, 8, 8))
    quantizer.finish_epoch(net)
    return net.eval()


def dequantized_at_every_call(file: Path) -> list[str]:
    """Constants that onnxruntime has as integers and multiplies as floats."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(file.with_name("executed.onnx"))
    onnxruntime.InferenceSession(file, options)
    graph = onnx.load(options.optimized_model_filepath).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants]


EIGHT = {"bits_weights": 8, "bits_bias": None, "bits_activations": 8}
TRAINING = "QuantAwareTrainRangeLinearQuantizer"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes", "integers", "most"),
    [
        (TRAINING, {**EIGHT, "mode": "SYMMETRIC"}, 4, 0.01),
        (TRAINING, {**EIGHT, "mode": "ASYMMETRIC_UNSIGNED"}, 4, 0.01),
        (
            TRAINING,
            {**EIGHT, "mode": "SYMMETRIC_RESTRICTED", "per_channel_wts": False, "bits_activations": 5},
            4,
            0.08,
        ),
        # Without its input quantized the first layer multiplies floats.
        ("WRPNQuantizer", EIGHT, 3, 0.01),
        # A bias in steps of coarse weights would move by whole steps of the result.
        (TRAINING, {**EIGHT, "mode": "SYMMETRIC_RESTRICTED", "bits_weights": 3, "bits_activations": 3}, 4, 0.02),
        ("DorefaQuantizer", {**EIGHT, "bits_weights": 1, "bits_activations": 2}, 3, 0.01),
        ("PACTQuantizer", {**EIGHT, "bits_weights": 4, "bits_activations": 6}, 3, 0.01),
        # onnxruntime would round these weights on its own: floats, and those of more values than int8 has.
        (TRAINING, {**EIGHT, "bits_weights": None}, 0, 0.01),
        ("DorefaQuantizer", EIGHT, 0, 0.01),
    ],
)
def test_integers_are_multiplied_and_results_stay(
    name: str, changes: dict[str, Any], integers: int, most: float, tmp_path: Path
) -> None:
    net = trained(name, **changes)
    torch.manual_seed(5)
    x = torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:4],), tmp_path / "net.onnx")
    assert executed_products(exported.file) == (integers, 4 - integers)
    with torch.no_grad():
        expected = net(x)
        for as_written in (True, False):
            # A value between two steps may fall on either: rarely, and then by one.
            found = Deployed(exported, net, as_written=as_written)(x)
            assert relative_difference(expected, found) < most


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "name", "changes", "products"),
    [
        (Residual, TRAINING, EIGHT, (1, 4)),
        (Residual, "DorefaQuantizer", {**EIGHT, "bits_weights": 4, "bits_activations": None}, (0, 5)),
        (Tokens, TRAINING, EIGHT, (1, 1)),
        (Tokens, "WRPNQuantizer", {**EIGHT, "bits_activations": None}, (0, 2)),
    ],
)
def test_layers_of_floats_are_as_fast_as_floats_and_stored_as_integers(
    kind: type[nn.Module], name: str, changes: dict[str, Any], products: tuple[int, int], tmp_path: Path
) -> None:
    net = trained(name, kind, **changes)
    x = torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:4],), tmp_path / "net.onnx")
    assert executed_products(exported.file) == products
    with torch.no_grad():
        assert relative_difference(net(x), Deployed(exported, net)(x)) < 1e-3
    graph = onnx.load(exported.file).graph
    used = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= used
    weights = [parameter.numel() for parameter in net.parameters() if parameter.dim() > 1]
    stored = [tensor for tensor in graph.initializer if len(tensor.raw_data) >= min(weights)]
    assert sum(len(tensor.raw_data) for tensor in stored) == sum(weights)
    assert not dequantized_at_every_call(exported.file)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["SYMMETRIC", "ASYMMETRIC_UNSIGNED"])
def test_wide_layers_multiply_integers_also_where_results_are_added_before_rounding(mode: str, tmp_path: Path) -> None:
    """Their results are not rounded, so that nothing is lost; layers with groups, and narrow ones, multiply floats."""
    net = trained(TRAINING, Added, **EIGHT, mode=mode)
    x = torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:4],), tmp_path / "net.onnx")
    assert executed_products(exported.file) == (8, 2)
    assert not dequantized_at_every_call(exported.file)
    with torch.no_grad():
        for as_written in (True, False):
            assert relative_difference(net(x), Deployed(exported, net, as_written=as_written)(x)) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("times", [1, 3])
def test_sums_of_the_greatest_integers_are_those_of_a_cpu_with_vnni(times: int, tmp_path: Path) -> None:
    """255 * 127 * 2 does not fit into 16 bits; a layer that runs several times has one weight in the model."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.relu = nn.Linear(32, 32), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                x = self.relu(self.layer(x)) / 32
            return x

    net, x = Repeated().eval(), torch.ones(8, 32)
    nn.init.ones_(net.layer.weight)
    nn.init.zeros_(net.layer.bias)
    exported = export_model(net, (x,), tmp_path / "net.onnx")
    assert quantized_after(exported, [((x,), {})])
    assert executed_products(exported.file) == (times, 0)
    torch.testing.assert_close(Deployed(exported, net)(x), x, rtol=0.02, atol=0)


@pytest.mark.thorough
def test_transposed_convolutions_are_as_fast_where_onnxruntime_has_quantized_all(tmp_path: Path) -> None:
    net, x = Residual().eval(), torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:4],), tmp_path / "net.onnx")
    assert quantized_after(exported, [((part,), {}) for part in x.split(16)])
    assert executed_products(exported.file) == (4, 1)
    assert not dequantized_at_every_call(exported.file)
    with torch.no_grad():
        assert relative_difference(net(x), Deployed(exported, net)(x)) < 0.05


@pytest.mark.thorough
def test_rounding_is_found_behind_pooling_and_other_shapes(tmp_path: Path) -> None:
    """A bias that onnxruntime rounds itself has steps of coarse weights."""
    net = trained(TRAINING, Pooled, **EIGHT | {"bits_weights": 3, "bits_activations": 3})
    torch.manual_seed(5)
    x = torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:4],), tmp_path / "net.onnx")
    assert executed_products(exported.file) == (3, 0)
    written, executed = (Deployed(exported, net, as_written=as_written)(x) for as_written in (True, False))
    assert relative_difference(written, executed) < 1e-6
    with torch.no_grad():
        assert relative_difference(net(x), executed) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.thorough
def test_a_norm_that_is_the_output_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    build_quantizer("q", settings_of("DorefaQuantizer")).prepare(net, SGD(net.parameters(), 0.1))
    x = torch.randn(16, 8, dtype=dtype)
    with torch.no_grad():
        net.train()(x)
        exported = export_model(net, (x,), tmp_path / "net.onnx")
        found = Deployed(exported, net, as_written=True)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, net.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_ranges_in_a_row_stay_apart(tmp_path: Path) -> None:
    """onnxruntime joins two ranges in a row, as of a rectifier and of the layer that reads it, unless it is kept."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.relu = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.relu(self.norm(self.layer(x)))
            return x

    torch.manual_seed(0)
    net = Shared()
    eight = {"bits_parameters": 8, "bits_activations": 8, "bits_accum": 32, "clip_acts": "NONE", "clip_n_stds": None}
    quantizer = build_quantizer("q", settings_of("PostTrainLinearQuantizer", **eight))
    quantizer.prepare(net, SGD(net.parameters(), 0.1))
    x = torch.randn(64, 16)
    with torch.no_grad():
        net.train()(x)
        quantizer.finish_epoch(net)
        exported = export_model(net.eval(), (x,), tmp_path / "net.onnx")
        for as_written in (True, False):
            assert relative_difference(net(x), Deployed(exported, net, as_written=as_written)(x)) < 0.02
    assert executed_products(exported.file) == (3, 0)
