"""Models as files of ONNX and torch.export, run beside the models themselves."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_nets import relative_difference
from torch import Tensor, nn

import tune_cac as cac
from trainables.deployment.call import Call
from trainables.deployment.exporting import Deployed, _macs, executed_products, export_model, quantized_after
from trainables.errors import UserError


def tokens(size: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(0, 90, (size, length), generator=generator), "attention_mask": mask}


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model: nn.Module = transformers.BertForSequenceClassification(config).eval()
    return model


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_transformer_runs_at_any_batch_size_and_length(ending: str, bert: nn.Module, tmp_path: Path) -> None:
    exported = export_model(bert, (), tmp_path / f"bert.{ending}", kwargs=tokens(4, 12))
    deployed = Deployed(exported, bert)
    for size, length in ((4, 12), (1, 5), (7, 20)):
        with torch.no_grad():
            expected, found = bert(**tokens(size, length)), deployed(**tokens(size, length))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    # Per token: 4 projections and the MLP a layer, and attention to 12 tokens; once a sample, the pooler and the head.
    assert exported.macs == 12 * 2 * (4 * 32 * 32 + 2 * 32 * 64 + 2 * 12 * 32) + 32 * 32 + 32 * 2


@pytest.mark.slow
@pytest.mark.thorough
def test_onnxruntime_quantizes_weights_and_leaves_attention(bert: nn.Module, tmp_path: Path) -> None:
    exported = export_model(bert, (), tmp_path / "bert.onnx", kwargs=tokens(4, 12))
    size = exported.bytes
    assert not quantized_after(exported, [])
    assert exported.bytes < size
    assert executed_products(exported.file) == (14, 0)  # six a layer, the pooler and the head
    with torch.no_grad():
        expected, found = bert(**tokens(9, 12)).logits, Deployed(exported, bert)(**tokens(9, 12)).logits
    assert relative_difference(expected, found) < 0.05


@pytest.mark.slow
def test_a_convolutional_network_gets_ranges_from_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 4),
    ).eval()  # fmt: skip
    x = torch.randn(64, 3, 8, 8)
    exported = export_model(net, (x[:2],), tmp_path / "net.onnx")
    assert quantized_after(exported, [((part,), {}) for part in x.split(16)])
    assert executed_products(exported.file) == (3, 0)
    with torch.no_grad():
        assert relative_difference(net(x), Deployed(exported, net)(x)) < 0.05


def test_the_name_says_the_format_and_tune_cac_has_the_function(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    exported = cac.export_model(net.train(), (torch.randn(2, 3),), tmp_path / "net.pt2")
    assert exported.macs == 12
    assert net.training
    x = torch.randn(5, 3)
    assert torch.equal(Deployed(exported, net)(x), net.eval()(x))
    with pytest.raises(UserError, match=r"unknown format 'onx': did you mean 'onnx'"):
        export_model(net, (x,), tmp_path / "net.pt2", to="onx")


def test_a_forward_pass_that_looks_at_values_is_refused(tmp_path: Path) -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(UserError, match=r"cannot export the forward pass of Looks .*: it must not depend on values"):
        export_model(Looks(), (torch.ones(2, 3),), tmp_path / "net.pt2")


@pytest.mark.slow
def test_what_onnx_has_not_is_named(tmp_path: Path) -> None:
    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.special.bessel_j0(x)
            return y

    with pytest.raises(
        UserError, match=r"Bessel \(DispatchError: .*bessel_j0.*: use operators that ONNX has, or a file"
    ):
        export_model(Bessel(), (torch.ones(2, 3),), tmp_path / "net.onnx")


class Weighs(nn.Module):
    """Arguments of every kind."""

    def forward(self, x: Tensor, *more: Tensor, scale: Tensor, less: Tensor, **named: Tensor) -> Tensor:
        y = x.mul_(2)
        for other in more:
            y = y + other
        return y * scale - less


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_arguments_of_every_kind_in_any_order(ending: str, tmp_path: Path) -> None:
    x, more, scale, less = (torch.randn(1, 3) for _ in range(4))
    before = x.clone()
    model = Weighs()
    exported = export_model(model, (x, more), tmp_path / f"m.{ending}", kwargs={"less": less, "scale": scale})
    assert torch.equal(x, before)
    deployed = Deployed(exported, model)
    for size in (1, 5):
        x, more, scale, less = (torch.randn(size, 3) for _ in range(4))
        expected = (2 * x + more) * scale - less
        torch.testing.assert_close(deployed(x.clone(), more, scale=scale, less=less), expected)


def test_arguments_without_a_name_in_the_signature_are_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(UserError, match=r"must name its argument most, not take it as \*\*"):
        export_model(Weighs(), (x,), tmp_path / "m.pt2", kwargs={"scale": x, "less": x, "most": x})


def test_a_file_has_nothing_of_the_example(tmp_path: Path) -> None:
    export_model(nn.Linear(8, 8), (torch.randn(100, 8),), tmp_path / "m.pt2")
    assert torch.export.load(tmp_path / "m.pt2").example_inputs is None


@pytest.mark.slow
@pytest.mark.thorough
def test_recurrent_layers_count(tmp_path: Path) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 12, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.lstm(x)[0]
            return y[:, -1]

    assert _macs(Last().eval(), Call((torch.randn(3, 6, 8),), {})) == 6 * 4 * 12 * (8 + 12)
    exported = export_model(Last(), (torch.randn(3, 6, 8),), tmp_path / "m.onnx")
    quantized_after(exported, [((torch.randn(3, 6, 8),), {})])
    assert executed_products(exported.file) == (0, 1)


def test_a_batch_size_that_is_written_into_the_model_is_refused(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, 4)

    with pytest.raises(UserError, match=r"of Fixed takes batches of 4 alone: it must take their size from its inputs"):
        export_model(Fixed(), (torch.randn(4, 2, 2),), tmp_path / "m.pt2")


def test_the_sizes_that_the_message_names_vary_and_len_does_not(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = eval(self.code)
            return y

    with pytest.raises(UserError, match=r"len\(x\) is a number when it is exported") as raised:
        export_model(Sized("x.reshape(len(x), -1)"), (torch.randn(4, 2, 2),), tmp_path / "m.pt2")
    advised = re.findall(r"x\.\w+\((?:[^()]|\[.*?\])*\)", str(raised.value))
    assert len(advised) == 2
    for code in advised:
        exported = export_model(Sized(code), (torch.randn(4, 2, 2),), tmp_path / "m.pt2")
        assert Deployed(exported, nn.Identity())(torch.randn(7, 2, 2)).shape == (7, 4)


def test_a_module_that_keeps_an_output_is_copied(tmp_path: Path) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    net = Keeps(3, 2)
    net(torch.randn(4, 3))
    x = torch.randn(2, 3)
    exported = export_model(torch.nn.DataParallel(net), x, tmp_path / "m.pt2")
    torch.testing.assert_close(Deployed(exported, net)(x), net(x))


@pytest.mark.parametrize(
    ("file", "args", "message"),
    [
        ("m.pth", (torch.randn(2, 3),), r"must end in \.onnx or \.pt2, or to= must name the format, got .*m\.pth"),
        (".", (torch.randn(2, 3),), r"must end in \.onnx or \.pt2, .*got "),
        ("m.pt2", {"input": torch.randn(2, 3)}, "inputs by name are kwargs"),
        ("absent/m.pt2", (torch.randn(2, 3),), "must be a file in a folder that can be written"),
        ("m.pt2", (torch.randn(0, 3),), "must have at least one sample"),
        ("m.pt2", (1, 2, 3), r"cannot export the forward pass of Linear \(TypeError: too many positional"),
    ],
)
def test_what_cannot_be_exported(file: str, args: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        export_model(nn.Linear(3, 2), args, tmp_path / file)


def test_bfloat16_is_for_torch_alone(tmp_path: Path) -> None:
    net, x = nn.Linear(3, 2).bfloat16(), torch.randn(2, 3).bfloat16()
    export_model(net, (x,), tmp_path / "m.pt2")
    with pytest.raises(UserError, match="computes nothing in bfloat16"):
        export_model(net, (x,), tmp_path / "m.onnx")


def test_onnx_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "onnxscript", absent)
    with pytest.raises(UserError, match=r"pip install 'tune-cac\[export\]'"):
        export_model(nn.Linear(1, 1), (torch.ones(1, 1),), tmp_path / "net.onnx")
