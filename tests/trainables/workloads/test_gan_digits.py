"""The workload `gan_digits`: each network's gradient, the order in a block, the distance, stops, collapse."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from trainables.workloads.digits import digit_splits
from trainables.workloads.gan_digits import GAN, GanDigits, _components, frechet_distance

RECIPE = Path(__file__).parents[3] / "docs" / "recipe.md"


def config(**fields: Any) -> TrialConfig:
    options = fields.pop("options", ("width=8",))
    return TrialConfig(workload="gan_digits", workload_options=options, **{"method": "none", "epochs": 2, **fields})


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_each_network_gets_the_gradient_of_its_own_loss(first: str) -> None:
    torch.manual_seed(0)
    model = GAN(first, 4).double()
    model.get_submodule("discriminator").eval()  # its power iteration would go on from pass to pass
    images, noise = torch.rand(6, 1, 16, 16).double(), torch.randn(6, 32).double()
    sum(model(images, noise)).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    generator, discriminator = twin.get_submodule("generator"), twin.get_submodule("discriminator")
    samples = generator(noise)
    own = torch.autograd.grad(-discriminator(samples).mean(), list(generator.parameters()), retain_graph=True)
    hinge = F.relu(1 - discriminator(images)).mean() + F.relu(1 + discriminator(samples)).mean()
    others = torch.autograd.grad(hinge, list(discriminator.parameters()))
    found = [*model.get_submodule("generator").parameters(), *model.get_submodule("discriminator").parameters()]
    for parameter, expected in zip(found, (*own, *others), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_every_layer_of_the_discriminator_has_spectral_norm_one() -> None:
    torch.manual_seed(0)
    discriminator = GAN("generator", 8).get_submodule("discriminator").train()
    with torch.no_grad():
        for _ in range(60):  # power iterations
            discriminator(torch.rand(2, 1, 16, 16))
    discriminator.eval()
    layers = [m for m in discriminator.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 7
    for layer in layers:
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(1, abs=1e-3)


def test_the_distance_is_the_formula_in_the_images_principal_components() -> None:
    images = digit_splits()["validation"][0]
    assert frechet_distance(images, images) == pytest.approx(0, abs=1e-9)
    mean, directions = _components()
    assert directions.shape == (256, 32)
    shifted = images.double() + 2.5 * directions[:, 3].view(1, 1, 16, 16)
    assert frechet_distance(shifted, images) == pytest.approx(2.5**2, rel=1e-9)
    others = torch.rand(200, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    moments = []
    for part in (others, images):
        features = (part.double().flatten(1) - mean) @ directions
        moments.append((features.mean(0), torch.cov(features.T)))
    (m1, c1), (m2, c2) = moments
    root = torch.tensor(sqrtm((c1 @ c2).numpy()).real)
    expected = (m1 - m2).square().sum() + (c1 + c2 - 2 * root).trace()
    assert frechet_distance(others, images) == pytest.approx(float(expected), rel=1e-6)


def stopped(first: str, through: int, **more: Any) -> tuple[TrainingRun, dict[str, Tensor]]:
    """A run with a manual stop before step 3, and its weights then."""
    found = config(options=(f"first={first}", "width=8"), method="gradskip", CAC_STOP_LAYER_NUM=(through,),
                   CAC_STOP_LAYER_ITR=(3,), epochs=1, **more)  # fmt: skip
    run = TrainingRun(found)
    run.begin_epoch()
    for _ in range(5):
        run.train_step()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train_step()
    return run, before


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("first", "other"), [("generator", "discriminator"), ("discriminator", "generator")])
def test_layers_of_either_network_stop_and_the_other_goes_on_learning(first: str, other: str) -> None:
    run, before = stopped(first, 3)
    with run:
        names = [name for name, _ in run.model.named_parameters()]
        assert all(name.startswith(first) for name in names[:4])
        after = dict(run.model.named_parameters())
        moved = {name for name in names if not torch.equal(before[name], after[name])}
        assert not moved & set(names[:4])
        assert {name for name in names if name.startswith(other)} <= moved
        assert any(name.startswith(first) for name in moved)


def test_one_network_alone_is_watched_by_the_class_of_its_layers() -> None:
    for network in ("Generator", "Discriminator"):
        fields = {"CAC_WATCH": (f"{network}Conv2d",), "CAC_VAR_START_THR": 1.0, "CAC_VAR_START_ITR": 0}
        with TrainingRun(config(options=(f"first={network.lower()}", "width=8"), method="gradskip", **fields)) as run:
            plan = run.method.model_metadata()["plan"]
            names = [name for name, _ in run.model.named_parameters()]
            watched = {names[number] for unit in plan["units"] for number in unit["watched"]}
        assert watched
        assert all(name.startswith(network.lower()) for name in watched)


@pytest.mark.thorough
@pytest.mark.slow
def test_training_comes_nearer_to_the_images() -> None:
    with TrainingRun(config(epochs=20, options=("width=16",))) as run:
        rows = [run.train_epoch() for _ in range(20)]
    assert rows[-1]["quality"] < 0.6 * rows[0]["quality"]
    assert rows[-1]["test_quality"] == pytest.approx(rows[-1]["quality"], rel=0.3)
    metrics = json.loads(rows[-1]["further_metrics"])
    assert metrics["discriminator_collapsed"] == 0
    assert 0.3 < metrics["diversity"] < 2


@pytest.mark.slow
@pytest.mark.thorough
def test_a_discriminator_that_collapses_is_said() -> None:
    with TrainingRun(config(epochs=1)) as run:
        run.begin_epoch()
        while not run.epoch_is_trained:
            run.train_step()
        with torch.no_grad():  # no unit of the last block answers any more
            run.model.get_parameter("discriminator.blocks.1.shortcut.bias").fill_(-1e6)
        with pytest.warns(UserWarning, match="epoch 1: the discriminator has collapsed: it rates images and sam"):
            row = run.end_epoch()
    metrics = json.loads(row["further_metrics"])
    assert metrics["discriminator_collapsed"] == 1
    assert run.workload.trouble({**metrics, "discriminator_collapsed": 0.0}) == ""


def test_a_discriminator_without_a_loss_is_said_too() -> None:
    found = {"discriminator_collapsed": 1.0, "score_deviation": 5.0, "discriminator_loss": 0.0}
    assert "without loss" in GanDigits().trouble(found)


def test_its_generator_alone_is_exported_by_the_lines_that_the_page_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"^```python\n(.*?export_model.*?)^```$", RECIPE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    torch.save(GanDigits().make_model().state_dict(), "gan.pt")
    names: dict[str, Any] = {}
    exec(code.replace("generator.onnx", "generator.pt2"), names)  # loads without onnxscript
    noise = torch.randn(5, 32)
    found = torch.export.load("generator.pt2").module()(noise)
    torch.testing.assert_close(found, names["model"].generator.eval()(noise))
