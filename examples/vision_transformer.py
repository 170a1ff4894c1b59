"""A vision transformer of transformers on handwritten digits, whose heads and MLP widths a schedule removes.

    python -m tune_cac trial --workload vision_transformer:make --schedule vision_transformer.yaml --save pruned.pt
    python -m tune_cac export-model pruned.pt
    python -m tune_cac trial --workload vision_transformer:make --option heads=4 --option mlp=256 --save narrower.pt

The last one is the control: the same widths from the start, trained as long.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
images = nn.functional.interpolate(images, size=(16, 16), mode="bilinear")
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, labels = images[order], torch.tensor(digits.target)[order]
parts = {"train": slice(0, 1000), "validation": slice(1000, 1400), "test": slice(1400, None)}
splits = {name: TensorDataset(images[part], labels[part]) for name, part in parts.items()}


class Scores(nn.Module):
    """A model of transformers that returns its scores alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, class) scores of (batch, 1, 16, 16) images."""
        return self.network(x).logits


def make(heads: int = 8, mlp: int = 512) -> dict[str, object]:
    """Return the training's parts; a head has 16 dimensions."""
    config = ViTConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=heads, head_dim=16, intermediate_size=mlp,
        image_size=16, patch_size=4, num_channels=1, num_labels=10,
    )  # fmt: skip
    return {
        "model": lambda: Scores(ViTForImageClassification(config)), "epochs": 20,
        **{name: DataLoader(rows, batch_size=50, shuffle=name == "train") for name, rows in splits.items()},
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.05),
    }  # fmt: skip
