"""Outputs and latencies of two models beside each other."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from quantized_nets import settings_of
from tiny_workload import Tiny
from torch import Tensor, nn

from trainables.compression.quantizers import build_quantizer
from trainables.compression.quantizers.quantized_modules import CalibratedRange
from trainables.config import TrialConfig
from trainables.deployment.call import Call
from trainables.deployment.comparison import TOLERANCE, RoundedAlike, call_of, compare, latencies, tolerance
from trainables.deployment.exporting import Deployed, export_model
from trainables.errors import UserError
from trainables.training.run import TrainingRun


class Shifted(nn.Module):
    """Another model's outputs, of one sign more by a tenth."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y + 0.1 * y.square().mean().sqrt()


def test_the_difference_is_a_share_of_the_outputs_size() -> None:
    torch.manual_seed(0)
    workload, metric = Tiny(), Tiny().quality.name
    model = workload.make_model().eval()
    same = compare(model, copy.deepcopy(model), workload, metric)
    assert same.difference == 0
    assert same.samples == sum(len(batch[0]) for batch in workload.evaluation_batches("validation") or ())
    assert same.metrics == workload.metrics_on(model, "validation", torch.device("cpu"), metric)
    assert math.isclose(compare(model, Shifted(model), workload, metric).difference, 0.1, rel_tol=0.02)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_file_may_round_otherwise_but_not_be_of_another_model(bits: int, tmp_path: Path) -> None:
    with TrainingRun(TrialConfig(workload="digits", epochs=6, method="none")) as run:
        while not run.finished:
            run.train_epoch()
        workload, metric, batches = run.workload, run.quality.name, list(run.workload.train_batches(0, 0))[:16]
        trained = run.model

    def quantized(factor: float) -> nn.Module:
        model = copy.deepcopy(trained)
        with torch.no_grad():
            model.get_parameter("conv4.weight").mul_(factor)
            settings = {"bits_parameters": bits, "bits_activations": bits, "bits_accum": 32, "clip_acts": "NONE"}
            quantizer = build_quantizer("q", settings_of("PostTrainLinearQuantizer", clip_n_stds=None, **settings))
            quantizer.prepare(model.eval(), None)
            for module in model.modules():
                module.train(isinstance(module, CalibratedRange))
            for batch in batches:
                workload.loss(model, batch)
            quantizer.finish_epoch(model)
        return model.eval()

    model = quantized(1)
    most, found = tolerance(model, workload, metric), []
    for factor in (1, 1.2):
        exported = export_model(quantized(factor), (batches[0][0],), tmp_path / "net.onnx")
        found.append(compare(model, Deployed(exported, model), workload, metric).difference)
    assert found[0] < most < found[1]
    assert (found[0] > 0.05) == (bits == 4)  # beyond what a file of 8 bits may have
    assert tolerance(trained.eval(), workload, metric) == TOLERANCE
    # Where the model rounds as the file does, nothing is left but the order of sums; a layer off by 2 % is seen.
    for factor in (1, 1.02):
        exported = export_model(quantized(factor), (batches[0][0],), tmp_path / "net.onnx")
        for as_written in (True, False):
            alike = RoundedAlike(model, exported, as_written=as_written)
            apart = compare(alike, Deployed(exported, model, as_written=as_written), workload, metric).difference
            of_quantizers = {name for name, one in model.named_modules() if isinstance(one, CalibratedRange)}
            assert alike.quantizers == of_quantizers if as_written else alike.quantizers <= of_quantizers
            assert (alike.wrong == 0) == (factor == 1)
            if factor == 1:
                assert apart < tolerance(model, workload, metric, alike.quantizers)
    assert tolerance(model, workload, metric, of_quantizers) == TOLERANCE


class Twice(nn.Module):
    """Of two equal calls a file has one, and none that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.relu(5 * x)
        y: Tensor = self.last(self.relu(x)) + self.last(self.relu(x))
        return y


@pytest.mark.thorough
@pytest.mark.slow
def test_quantizers_that_run_more_often_than_in_the_file_are_left_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.rand(8, 4)
    settings = settings_of("PostTrainLinearQuantizer", clip_n_stds=None, clip_acts="NONE")
    quantizer = build_quantizer("q", settings)
    quantizer.prepare(model, None)
    for module in model.modules():
        module.train(isinstance(module, CalibratedRange))
    model(x)
    quantizer.finish_epoch(model)
    alike = RoundedAlike(model.eval(), export_model(model, (x,), tmp_path / "net.onnx"), as_written=True)
    assert torch.allclose(alike(x), model(x))
    assert "first.quantized_output" in alike.quantizers
    assert "relu.quantized_output" not in alike.quantizers
    assert alike.wrong == 0


def test_a_call_is_caught_before_the_model_runs() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, flag: bool) -> Tensor:
            raise AssertionError

    model = Refuses()
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])
    found = call_of(model, lambda: model(x, mask=mask, flag=True))
    assert torch.equal(found.args[0], x)
    again = found.repeated(5)
    assert torch.equal(again.kwargs["mask"], torch.tensor([1, 0, 1, 0, 1]))
    assert again.args[0].shape == (5, 3)
    assert again.kwargs["flag"] is True
    with pytest.raises(
        UserError, match=r"evaluation must call its model .* give the part .* to tune_cac\.export_model"
    ):
        call_of(model, lambda: None)


def test_latencies_are_of_the_calls_in_turns() -> None:
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self) -> None:
            order.append(self.name)

    found = latencies(Named("a"), Named("b"), Call((), {}), rounds=5, round_s=0.0)
    assert "".join(order) == "aaabbb" + 5 * "ab"
    assert found.low <= found.ratio <= found.high
