"""FLOP counts against closed forms and against a count on the real device; savings as the design defines them."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_workload import Tiny
from torch.utils.flop_counter import FlopCounterMode

from trainables.config import TrialConfig
from trainables.registry import WORKLOADS, Entry
from trainables.savings import share_saved
from trainables.training.run import TrainingRun
from trainables.workloads.digits import CONVOLUTIONS, IMAGE_SIZE

SAMPLES = 599


def convolution_flops() -> list[tuple[int, int]]:
    """(FLOPs of the forward pass, input channels) of each convolution, for one sample: 2 * 9 * c_in * c_out * h * w."""
    found = []
    channels, size = 1, IMAGE_SIZE
    for width, stride in CONVOLUTIONS:
        size //= stride
        found.append((2 * 9 * channels * width * size * size, channels))
        channels = width
    return found


def test_dense_flops_are_the_closed_form() -> None:
    convolutions = [flops for flops, _ in convolution_flops()]
    linear = 2 * 32 * 10
    forward = sum(convolutions) + linear
    # Backward: a weight and an input gradient each; the first convolution has no input gradient.
    backward = 2 * sum(convolutions) - convolutions[0] + 2 * linear
    with TrainingRun(TrialConfig(method="none", epochs=1)) as run:
        row = run.train_epoch()
    assert row["forward_flops"] == SAMPLES * forward
    assert row["backward_flops"] == SAMPLES * backward
    assert row["dense_flops"] == row["executed_flops"] == SAMPLES * (forward + backward)
    assert row["compute_saved"] == row["backward_saved"] == 0


@pytest.mark.parametrize(("iteration", "epochs_saved"), [(9, 1), (-1, 2)])
def test_a_stopped_prefix_costs_no_backward_from_the_step_after_its_stop(iteration: int, epochs_saved: int) -> None:
    """Through layer 8 = conv1..norm3 complete: their weight gradients, and the input gradients of conv2..conv4, go."""
    convolutions = [flops for flops, _ in convolution_flops()]
    gone = sum(convolutions[:3]) + sum(convolutions[1:4])
    config = TrialConfig(epochs=2, CAC_STOP_LAYER_NUM=(8,), CAC_STOP_LAYER_ITR=(iteration,))
    with TrainingRun(config) as run:
        first, second = run.train_epoch(), run.train_epoch()
    assert (first["compute_saved"] == 0) == (iteration == 9)  # the step of the stop still had its gradients
    saved = epochs_saved * SAMPLES * gone
    assert second["dense_flops"] - second["executed_flops"] == saved
    assert second["compute_saved"] == saved / second["dense_flops"]
    dense_backward = second["dense_flops"] - second["forward_flops"]
    assert second["backward_saved"] == pytest.approx(saved / dense_backward, rel=1e-12)


def test_a_run_cut_short_saves_nothing_by_that() -> None:
    with TrainingRun(TrialConfig(method="none", epochs=30)) as run:
        row = run.train_epoch()
    assert row["compute_saved"] == 0
    assert row["dense_flops"] == 30 * row["executed_flops"]


def test_bytes_are_those_of_the_live_parameters() -> None:
    config = TrialConfig(epochs=1, CAC_STOP_LAYER_NUM=(2,), CAC_STOP_LAYER_ITR=(3,))
    with TrainingRun(config) as run:
        sizes = [4 * p.numel() for p in run.model.parameters()]
        row = run.train_epoch()
    gradients = 4 * sum(sizes) + 6 * sum(sizes[3:])
    assert row["gradient_bytes"] == gradients
    assert row["optimizer_bytes"] == 3 * gradients  # parameter, gradient and momentum


@pytest.mark.parametrize("computed", [0, 2, 63, 64, 96, 160])
def test_a_prefix_on_some_rows_costs_those_rows_forward(computed: int) -> None:
    """What a forward cache reports: rows read cost nothing before the cut; checks may compute more than the batch."""
    from trainables.gradskip.forward_cache import PassReport

    convolutions = [flops for flops, _ in convolution_flops()]
    with TrainingRun(TrialConfig(method="none", epochs=1)) as run:
        batch = next(iter(run.workload.train_batches(0, 0)))
        names = tuple(name for name, _ in run.model.named_children())[:9]  # three convolutions, norms and ReLUs
        whole = run.cost.step((), batch)
        cost = run.cost.step((), batch, PassReport(modules=names, rows=64, computed=computed))
    assert whole.forward_flops - cost.forward_flops == (64 - computed) * sum(convolutions[:3])
    assert cost.backward_flops == whole.backward_flops


def conv_by_hand(layer: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Forward and backward FLOPs of a convolution: two for each weight and place that meet, counted one by one."""
    out = layer(x)
    places = (x if layer.transposed else out).shape[2:].numel()
    forward = 2 * len(x) * places * layer.weight.numel()
    return forward, 2 * forward


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_grouped_convolutions_cost_what_their_groups_do(kind: type[torch.nn.Module], groups: int) -> None:
    """torch 2.13 counts the weights' gradient ``groups`` times too high; where there is one group they agree."""

    from trainables.runtime.operator_flops import flop_counter, formula_of

    layer = kind(8, 16, 3, stride=2, groups=groups)
    x = torch.rand(2, 8, *[9] * (layer.weight.dim() - 2), requires_grad=True)
    forward, backward = conv_by_hand(layer, x)
    out = layer(x)
    with flop_counter() as counted, FlopCounterMode(display=False) as theirs:
        out.sum().backward()
    assert counted.get_total_flops() == backward
    assert (theirs.get_total_flops() == backward) == (groups == 1)
    formula = formula_of(torch.ops.aten.convolution_backward)
    assert formula is not None
    assert formula(out, x, layer.weight, None, 2, 0, 1, layer.transposed, 0, groups, (True, True, False)) == backward
    assert formula(out, x, layer.weight, None, 2, 0, 1, layer.transposed, 0, groups, (False, True, True)) == forward


def test_products_that_torch_has_no_formula_for_cost_what_their_loops_do() -> None:
    from trainables.runtime.operator_flops import flop_counter

    sparse = torch.eye(6).to_sparse()
    tall, wide = torch.rand(6, 3), torch.rand(6, 2)
    vector = torch.rand(3)
    bilinear = torch.nn.Bilinear(3, 2, 5)
    rows, experts, ends = torch.rand(5, 8), torch.rand(2, 8, 4), torch.tensor([2, 5], dtype=torch.int32)
    for product, flops in (
        (lambda: tall @ vector, 2 * 6 * 3),
        (lambda: torch.addmv(torch.rand(6), tall, vector), 2 * 6 * 3),
        (lambda: vector.dot(vector), 2 * 3),
        (lambda: bilinear(tall, wide), 2 * 6 * 3 * 2 * 5),
        (lambda: torch.cdist(tall, torch.rand(4, 3), p=1), 2 * 6 * 4 * 3),
        (lambda: torch.cdist(torch.rand(30, 3), torch.rand(40, 3)), 2 * 30 * 40 * 3),
        (lambda: sparse @ tall, 2 * 6 * 3),  # six numbers are stored
        (lambda: torch.sparse.mm(sparse.to_sparse_csr(), tall), 2 * 6 * 3),
        (lambda: tall.T @ tall, 2 * 3 * 6 * 3),
        (lambda: torch._grouped_mm(rows, experts, offs=ends), 2 * (2 * 8 * 4 + 3 * 8 * 4)),
        (lambda: torch._grouped_mm(rows.T, rows, offs=ends), 2 * (8 * 2 * 8 + 8 * 3 * 8)),
    ):
        with flop_counter() as counted, torch.no_grad():
            product()
        assert counted.get_total_flops() == flops


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("given", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_recurrent_layers_cost_what_their_products_do(kind: type[torch.nn.Module], given: dict[str, Any]) -> None:
    """oneDNN's, where it runs, and the formulas of cuDNN's, beside torch's own products counted by torch."""
    from trainables.runtime.operator_flops import flop_counter, formula_of

    layers, x = kind(4, 6, **given), torch.rand(5, 3, 4, requires_grad=True)
    state = torch.zeros(layers.num_layers * (1 + layers.bidirectional), 3, 6, requires_grad=True)  # so that all
    states = (state, state.clone()) if kind is torch.nn.LSTM else state  # gradients are computed

    def passes(counter: Any, *, fused: bool) -> list[int]:
        with torch.backends.mkldnn.flags(enabled=fused), counter:
            out = layers(x, states)[0].sum()
            forward = counter.get_total_flops()
            out.backward()
        return [forward, counter.get_total_flops() - forward]

    expected = passes(FlopCounterMode(display=False), fused=False)
    assert passes(flop_counter(), fused=True) == expected
    formulas = [formula_of(op) for op in (torch.ops.aten._cudnn_rnn, torch.ops.aten._cudnn_rnn_backward)]
    counts = [formula(x, list(layers.parameters()), 4, (True, False, False, True)) for formula in formulas if formula]
    assert counts == expected
    asked = (False, False, False, True)  # of an input without a gradient; cuDNN computes that all the same
    assert formulas[1] is not None
    assert formulas[1](x, list(layers.parameters()), 4, asked) == expected[1]


class _Compiled(Tiny):
    """Its model comes compiled from the user's hands."""

    name = "compiled"
    graphs: ClassVar[list[Any]] = []

    def make_model(self) -> torch.nn.Module:
        def backend(graph: Any, inputs: Any) -> Any:
            self.graphs.append(graph)
            return graph

        compiled: torch.nn.Module = torch.compile(super().make_model(), backend=backend)
        return compiled


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradskip", "none"])
def test_a_compiled_model_stays_compiled_and_costs_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    for cls in (Tiny, _Compiled):
        entry = Entry(home=f"{cls.__module__}:{cls.__name__}", default_epochs=2, description="a test's")
        monkeypatch.setitem(WORKLOADS, cls.name, entry)
    monkeypatch.setitem(sys.modules, _Compiled.__module__, sys.modules[__name__])
    rows, seen = [], []
    for name in ("tiny", "compiled"):
        _Compiled.graphs.clear()
        stops = {"CAC_STOP_LAYER_NUM": (2,), "CAC_STOP_LAYER_ITR": (5,)} if method == "gradskip" else {}
        with TrainingRun(TrialConfig(workload=name, method=method, epochs=2, **stops)) as run:
            rows.append([run.train_epoch() for _ in range(2)][-1])
        seen.append(len(_Compiled.graphs))
    assert seen[0] == 0 < seen[1]
    for column in ("forward_flops", "backward_flops", "dense_flops", "compute_saved"):
        assert rows[0][column] == rows[1][column]


def test_by_hand() -> None:
    assert share_saved(25, 100) == 0.75
    assert share_saved(150, 100) == -0.5
    assert share_saved(0, 0) == 0.0
    of_frame = share_saved(pd.Series([25.0, 1.0]), pd.Series([100.0, np.nan]))
    assert of_frame.isna().tolist() == [False, True]
    assert of_frame[0] == 0.75
