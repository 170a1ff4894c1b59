"""Generation of handwritten digits: a residual generator against a discriminator with spectral norm.

Shapes: B samples; noise (B, 32); images (B, 1, 16, 16) in [0, 1], the digits of the workload ``digits``; scores (B,).

Both networks train in every step. The loss is the sum of the two hinge losses (Lim and Ye 2017, as in Miyato et al.
2018): the discriminator's sees samples without their graph, the generator's sees the discriminator's weights as
constants, so that each network's gradient is that of its own loss. The generator's blocks keep logits between them:
norm and activation, upsampling, from which the shortcut is taken, convolution with norm and activation, convolution,
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import AdamW, Optimizer

from trainables.errors import UserError, unknown_name
from trainables.registry import WORKLOADS
from trainables.workloads.base import Batch, Workload, digest_of
from trainables.workloads.digits import digit_splits
from trainables.workloads.seeded_loader import epoch_seed

BATCH_SIZE = 64
NOISE = 32
#: Channels between the blocks, twice those at full resolution, unless specified.
WIDTH = 32
#: Learning rates of generator and discriminator (Heusel et al. 2017: the discriminator's is larger), moments of AdamW.
LEARNING_RATES = {"generator": 5e-4, "discriminator": 2e-3}
BETAS = (0.0, 0.9)
WEIGHT_DECAY = 0.01
#: Principal components of the training images in which samples are compared with images.
COMPONENTS = 32
#: Seed of the noise of evaluations.
NOISE_SEED = 0
#: The order in which the networks are called, and so in which their layers stop, by the option ``first``.
NETWORKS = ("generator", "discriminator")
#: A discriminator has collapsed if it rates everything the same (standard deviation of scores), or if nothing is left
#: of its loss, so that the generator gets no more gradient to learn from than the weights' sizes give.
SAME_SCORES, NO_LOSS = 1e-3, 1e-3


class GeneratorConv2d(nn.Conv2d):
    """A convolution of the generator: ``CAC_WATCH=GeneratorConv2d`` watches the generator alone."""


class DiscriminatorConv2d(nn.Conv2d):
    """A convolution of the discriminator: ``CAC_WATCH=DiscriminatorConv2d`` watches the discriminator alone."""


class UpBlock(nn.Module):
    """A block of the generator, of logits (B, C, H, W) to logits (B, D, 2H, 2W)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.upsample = nn.Upsample(scale_factor=2)
        self.conv1 = GeneratorConv2d(channels, out, 3, padding=1, bias=False)  # the norm behind it has a bias
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = GeneratorConv2d(out, out, 3, padding=1)
        self.shortcut = nn.Identity() if channels == out else GeneratorConv2d(channels, out, 1, bias=False)

    def forward(self, logits: Tensor) -> Tensor:
        value = self.upsample(F.relu(self.norm1(logits)))
        shortcut = self.shortcut(value)
        value = F.relu(self.norm2(self.conv1(value)))
        found: Tensor = self.conv2(value) + shortcut
        return found


class DownBlock(nn.Module):
    """A block of the discriminator, of (B, C, H, W) to (B, D, H/2, W/2); every layer has spectral norm 1."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = spectral_norm(DiscriminatorConv2d(channels, out, 3, padding=1))
        self.conv2 = spectral_norm(DiscriminatorConv2d(out, out, 3, padding=1))
        self.shortcut = spectral_norm(DiscriminatorConv2d(channels, out, 1))

    def forward(self, value: Tensor) -> Tensor:
        residual = self.conv2(F.relu(self.conv1(F.relu(value))))
        found: Tensor = F.avg_pool2d(residual + self.shortcut(value), 2)
        return found


class Generator(nn.Module):
    """Noise (B, 32) to images (B, 1, 16, 16) in [0, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NOISE, width * 16)
        self.blocks = nn.Sequential(UpBlock(width, width), UpBlock(width, width // 2))
        self.norm = nn.BatchNorm2d(width // 2)
        self.conv = GeneratorConv2d(width // 2, 1, 3, padding=1)

    def forward(self, noise: Tensor) -> Tensor:
        logits = self.blocks(self.linear(noise).unflatten(1, (-1, 4, 4)))
        return self.conv(F.relu(self.norm(logits))).sigmoid()


class Discriminator(nn.Module):
    """Images (B, 1, 16, 16) to scores (B,), large for real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(DownBlock(1, width // 2), DownBlock(width // 2, width))
        self.linear = spectral_norm(nn.Linear(width, 1))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.linear(F.relu(self.blocks(images)).sum((2, 3))).squeeze(1)
        return found


class GAN(nn.Module):
    """Both networks; a forward pass returns the losses of discriminator and generator.

    Args:
        first: which of `NETWORKS` is called first.
        width: channels between the blocks.
    """

    def __init__(self, first: str, width: int = WIDTH) -> None:
        super().__init__()
        self._first = first
        parts: dict[str, Callable[[int], nn.Module]] = {"generator": Generator, "discriminator": Discriminator}
        for name in (first, *(name for name in NETWORKS if name != first)):
            self.add_module(name, parts[name](width))

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hinge losses (discriminator, generator), two scalars."""
        generator, discriminator = self.get_submodule("generator"), self.get_submodule("discriminator")
        if self._first == "discriminator":
            real = discriminator(images)
            samples = generator(noise)
        else:
            samples = generator(noise)
            real = discriminator(images)
        loss = F.relu(1 - real).mean() + F.relu(1 + discriminator(samples.detach())).mean()
        constants = {name: parameter.detach() for name, parameter in discriminator.named_parameters()}
        return loss, -functional_call(discriminator, constants, (samples,)).mean()


class GanDigits(Workload):
    """A generator and a discriminator of digits, both trained by AdamW in every step, cosine schedule.

    Args:
        first: ``generator`` or ``discriminator``: whose layers come first in the order of stops.
        width: channels between the blocks, an even number >= 2.

    Raises:
        UserError: another network, or another width.
    """

    name = "gan_digits"
    quality = WORKLOADS[name].quality
    default_epochs = WORKLOADS[name].default_epochs
    by_step = True

    def __init__(self, *, first: str = "generator", width: int = WIDTH) -> None:
        if first not in NETWORKS:
            raise unknown_name("first network of workload gan_digits", first, NETWORKS)
        if width < 2 or width % 2:
            raise UserError(f"width of workload gan_digits must be an even number >= 2, got {width}")
        self._first, self._width = first, width
        self.batch_size: int = BATCH_SIZE

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.train_samples // self.batch_size)

    @property
    def train_samples(self) -> int:
        return len(digit_splits()["train"][0])

    def make_model(self) -> nn.Module:
        return GAN(self._first, self._width)

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named_parameters:
            groups.setdefault(name.partition(".")[0], []).append((name, parameter))
        return AdamW(
            [{"params": parameters, "lr": LEARNING_RATES[network]} for network, parameters in groups.items()],
            betas=BETAS, weight_decay=WEIGHT_DECAY,
        )  # fmt: skip

    def batch_at(self, epoch: int, seed: int, step: int) -> Batch:
        return next(self.train_batches_from(epoch, seed, step))

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(epoch_seed(epoch, seed))
        order = torch.randperm(self.train_samples, generator=generator)
        noise = torch.randn(self.train_samples, NOISE, generator=generator)
        images = digit_splits()["train"][0][order]
        return zip(images.split(self.batch_size), noise.split(self.batch_size), strict=True)

    def fingerprint(self) -> str:
        images = (images for images, _ in digit_splits().values())
        return digest_of(super().fingerprint(), self._first, self._width, *images)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        discriminator, generator = model(*batch)
        found: Tensor = discriminator + generator
        return found

    def evaluate(self, model: nn.Module, split: str, device: Any) -> Mapping[str, float]:
        """Return the Frechet distance, and what tells whether the two networks still learn from each other.

        ``discriminator_loss`` and ``score_deviation`` are of the discriminator on images and samples together,
        ``diversity`` is the samples' total standard deviation over the images', ``discriminator_collapsed`` is 1 or 0
        (`SAME_SCORES`, `NO_LOSS`).
        """
        images = digit_splits()[split][0]
        samples = self.samples_of(model, len(images), device)
        discriminator = model.get_submodule("discriminator")
        real, fake = (discriminator(part.to(device)).double().cpu() for part in (images, samples))
        loss = float(F.relu(1 - real).mean() + F.relu(1 + fake).mean())
        deviation = float(torch.cat([real, fake]).std())
        spread = [float(part.double().flatten(1).var(0).sum().sqrt()) for part in (samples, images)]
        return {
            self.quality.name: frechet_distance(samples, images),
            "discriminator_loss": loss,
            "score_deviation": deviation,
            "diversity": spread[0] / spread[1],
            "discriminator_collapsed": float(deviation < SAME_SCORES or loss < NO_LOSS),
        }

    def samples_of(self, model: nn.Module, count: int, device: Any) -> Tensor:
        """Return samples (N, 1, 16, 16) on the CPU from the same noise at every call."""
        noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(NOISE_SEED))
        found: Tensor = model.get_submodule("generator")(noise.to(device)).float().cpu()
        return found

    def trouble(self, metrics: Mapping[str, float]) -> str:
        if not metrics.get("discriminator_collapsed"):
            return ""
        if metrics["score_deviation"] < SAME_SCORES:
            return "the discriminator has collapsed: it rates images and samples the same, and teaches nothing"
        return "the discriminator has collapsed: it tells images from samples without loss, and teaches nothing"


@cache
def _components() -> tuple[Tensor, Tensor]:
    """Return mean (256,) and principal components (256, 32) of the training images, float64."""
    images = digit_splits()["train"][0].double().flatten(1)
    mean = images.mean(0)
    directions = torch.linalg.svd(images - mean, full_matrices=False).Vh
    return mean, directions[:COMPONENTS].T


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the Frechet distance of two sets of images (N, 1, 16, 16) as Gaussians in `COMPONENTS` components.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) (Dowson and Landau 1982; Heusel et al. 2017 with an Inception network's
    features, which are not of 16x16 digits).
    """
    mean, directions = _components()
    (m1, c1), (m2, c2) = (_moments((images.double().flatten(1) - mean) @ directions) for images in (first, second))
    root = _root(c1)
    cross = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    return float((m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * cross)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.mean(0), torch.cov(features.T)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    found: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return found
