"""Pruning together with quantization on one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compression_schedules import CONVOLUTIONS, EPOCHS, sections, span, text
from thorough import rest_thorough
from tiny_workload import tiny  # noqa: F401 - a fixture
from torch import Tensor

from trainables.compression.masks import parameters_as_built
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun


def dorefa_levels(w: Tensor, k: int = 3) -> Tensor:
    """(2 i - n) / n, i = 0 .. n, and 0 for what is pruned."""
    n = 2**k - 1
    return torch.tensor([0.0, *((2 * i - n) / n for i in range(n + 1))])


def wrpn_levels(w: Tensor, k: int = 4) -> Tensor:
    m = 2 ** (k - 1) - 1
    return torch.tensor([i / m for i in range(-m, m + 1)])


def symmetric_levels(w: Tensor, k: int = 4) -> Tensor:
    """i s, s = 2 max|w| / (2^k - 1)."""
    s = 2 * float(w.abs().max()) / (2**k - 1)
    return torch.tensor([i * s for i in range(-(2 ** (k - 1)), 2 ** (k - 1))])


QUANTIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "dorefa": ({"class": "DorefaQuantizer", "bits_weights": 3, "bits_activations": 4}, dorefa_levels),
    "wrpn": ({"class": "WRPNQuantizer", "bits_weights": 4, "bits_activations": 8}, wrpn_levels),
    "pact": ({"class": "PACTQuantizer", "bits_weights": 3, "bits_activations": 4}, dorefa_levels),
    "linear": ({"class": "QuantAwareTrainRangeLinearQuantizer", "bits_weights": 4}, symmetric_levels),
    "post-training": ({"class": "PostTrainLinearQuantizer", "bits_parameters": 4}, symmetric_levels),
}


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("order", rest_thorough(["pruned first", "quantized first"]))
@pytest.mark.parametrize("name", rest_thorough(QUANTIZERS))
def test_what_is_pruned_stays_zero_on_a_quantized_layer(name: str, order: str) -> None:
    quantizer, levels_of = QUANTIZERS[name]
    if name == "post-training" and order == "quantized first":
        times = (1, 3)  # frozen at the end of epoch 1; a pruner still acts afterwards
    else:
        times = (2, 1) if order == "pruned first" else (0, 2)
    schedule = sections(
        [span("quantizer", "q", times[0], EPOCHS), span("pruner", "p", times[1], EPOCHS)],
        pruners={"p": {"class": "SparsityLevelParameterPruner", "levels": dict.fromkeys(CONVOLUTIONS, 0.75)}},
        quantizers={"q": quantizer},
    )
    config = TrialConfig(workload="tiny", epochs=EPOCHS, method="compression", schedule=text(schedule))
    with TrainingRun(config) as run:
        frozen: dict[str, Tensor] = {}
        while not run.finished:
            row = run.train_epoch()
            if name == "post-training" and run.epoch == times[0] + 1:  # its grid is that of the weights here
                frozen = {n: p.detach().clone() for n, p in parameters_as_built(run.model).items()}
        run.model.eval()
        for weight in CONVOLUTIONS:
            layer: Any = run.model.get_submodule(weight.removesuffix(".weight"))
            behind, computed = layer.parametrizations.weight.original.detach(), layer.weight.detach()
            zero = behind == 0
            assert int(zero.sum()) == int(0.75 * behind.numel())
            assert bool((computed[zero] == 0).all())  # what is computed with, too
            levels = levels_of(frozen.get(weight, behind))
            distance = (computed.flatten().unsqueeze(1) - levels).abs().amin(1)
            assert float(distance.max()) < 1e-5
            assert computed.unique().numel() > 2
        assert row["sparsity"] == pytest.approx(sum(int(0.75 * n) for n in (36, 144, 216, 324)) / (720 + 18))
