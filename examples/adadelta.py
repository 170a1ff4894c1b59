"""Classify scikit-learn's digits with Adadelta and a step schedule; accuracy counts, the loss is a further column.

    python -m tune_cac search --script 'python adadelta.py'
    python -m tune_cac search --workload adadelta:make

Lines that differ from a script without Gradient-Skip end in "# tune_cac".
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import nll_loss
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

import tune_cac as cac  # tune_cac

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


class Net(nn.Module):
    """Two convolutions, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
        )
        self.scores = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return log probabilities of the classes."""
        return self.scores(self.features(image)).log_softmax(1)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean negative log likelihood."""
    image, label = batch
    return nll_loss(model(image), label)


def evaluate(model: nn.Module, batches: DataLoader, device: object = None) -> dict[str, float]:
    """Return accuracy and mean loss."""
    hits = count = 0
    total = 0.0
    for image, label in batches:
        scores = model(image)
        hits += int((scores.argmax(1) == label).sum())
        total += float(nll_loss(scores, label, reduction="sum"))
        count += len(label)
    return {"accuracy": hits / count, "nll": total / count}


def loader(first: int, last: int, *, shuffle: bool = False) -> DataLoader:
    """Return batches of 64 digits."""
    return DataLoader(TensorDataset(images[first:last], labels[first:last]), 64, shuffle=shuffle)


def make() -> dict[str, object]:
    """Return the same training as the parts of a factory."""

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=steps // 6, gamma=0.7)

    return {
        "model": Net, "train": loader(0, 1200, shuffle=True), "loss": loss, "epochs": 6, "evaluate": evaluate,
        "validation": loader(1200, 1500), "test": loader(1500, 1797), "schedule": schedule,
        "optimizer": lambda named: torch.optim.Adadelta(named, lr=1.0),
    }  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("TUNE_CAC_SEED", 0)))  # tune_cac
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    optimizer = cac.gradskip.wrap(optimizer, model=model)  # tune_cac
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(6):
        model.train()
        for batch in loader(0, 1200, shuffle=True):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            found = evaluate(model, loader(1200, 1500))
        print(f"epoch {epoch + 1}: {found}")
        cac.report(**found, epoch=epoch + 1)  # tune_cac
