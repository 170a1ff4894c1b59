"""Train a variational autoencoder on scikit-learn's digits; its quality is the negative evidence lower bound, in nats.

    python -m tune_cac search --script 'python vae.py' --metric elbo_loss --allowed-drop 1%
    python -m tune_cac search --workload vae:make

Lines that differ from a script without Gradient-Skip end in "# tune_cac".
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import tune_cac as cac  # tune_cac

images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
train_images, validation_images, test_images = images.split([1200, 300, 297])


class Vae(nn.Module):
    """Encode an image to a normal distribution over 8 numbers, draw from it, decode."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, 8), nn.Linear(width, 8)
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, mean and log variance; the mean is decoded in evaluation."""
        hidden = self.encoder(image)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean negative evidence lower bound."""
    (image,) = batch
    logits, mean, log_variance = model(image)
    missed = binary_cross_entropy_with_logits(logits, image, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (missed + divergence).mean()


def evaluate(model: nn.Module, batches: DataLoader, device: object = None) -> float:
    """Return the mean loss over the images."""
    sums = [(float(loss(model, batch)) * len(batch[0]), len(batch[0])) for batch in batches]
    return sum(value for value, _ in sums) / sum(count for _, count in sums)


def loader(images: torch.Tensor, *, shuffle: bool = False) -> DataLoader:
    """Return batches of 64 images."""
    return DataLoader(TensorDataset(images), 64, shuffle=shuffle)


def make(width: int = 64) -> dict[str, object]:
    """Return the same training as the parts of a factory."""
    return {
        "model": lambda: Vae(width), "train": loader(train_images, shuffle=True), "loss": loss, "epochs": 8,
        "validation": loader(validation_images), "test": loader(test_images), "evaluate": evaluate,
        "metric": "elbo_loss", "unit": "nats", "optimizer": lambda named: torch.optim.Adam(named, lr=1e-3),
        "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    }  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("TUNE_CAC_SEED", 0)))  # tune_cac
    model = Vae()
    optimizer = cac.gradskip.Adam(model.parameters(), lr=1e-3, model=model)  # tune_cac
    for epoch in range(8):
        model.train()
        for batch in loader(train_images, shuffle=True):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            value = evaluate(model, loader(validation_images))
        print(f"epoch {epoch + 1}: loss {value:.2f}")
        cac.report(elbo_loss=value, epoch=epoch + 1)  # tune_cac
