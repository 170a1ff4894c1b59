"""Models of transformers on handwritten digits, of which a schedule removes heads, MLP widths or filters.

    python -m tune_cac trial --workload smaller_models:vision_transformer --schedule heads.yaml --save pruned.pt
    python -m tune_cac export-model pruned.pt
    python -m tune_cac trial --workload smaller_models:vision_transformer --option heads=4 --option mlp=256
    python -m tune_cac trial --workload smaller_models:resnet --schedule filters.yaml --save pruned.pt
    python -m tune_cac trial --workload smaller_models:resnet --option width=23

Those with options are the controls: as many multiplications from the start, trained as long. A model that is trained
already is pruned and fine-tuned with `--option weights=FILE`, as `--save` writes it (its whole path for a search).
heads.yaml has the names that layers have in transformers 5; 4.50 names those of ViT otherwise.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
images = nn.functional.interpolate(images, size=(16, 16), mode="bilinear")
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, labels = images[order], torch.tensor(digits.target)[order]
parts = {"train": slice(0, 1000), "validation": slice(1000, 1400), "test": slice(1400, None)}


class Scores(nn.Module):
    """A model of transformers that returns its scores alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, class) scores of (batch, 1, 16, 16) images."""
        return self.network(x).logits


def training(network: Callable[[], nn.Module], weights: str) -> dict[str, object]:
    """Return the parts of a training of 20 epochs, from the weights in a file if there is one."""

    def model() -> nn.Module:
        scores = Scores(network())
        if weights:
            scores.load_state_dict(torch.load(weights, weights_only=True))
        return scores

    rows = {name: TensorDataset(images[part], labels[part]) for name, part in parts.items()}
    return {
        "model": model, "epochs": 20,
        **{name: DataLoader(rows[name], batch_size=50, shuffle=name == "train") for name in rows},
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.05),
    }  # fmt: skip


def vision_transformer(heads: int = 8, mlp: int = 512, weights: str = "") -> dict[str, object]:
    """Return the training of four layers of width 128; a head has 16 dimensions."""
    config = ViTConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=heads, head_dim=16, intermediate_size=mlp,
        image_size=16, patch_size=4, num_channels=1, num_labels=10,
    )  # fmt: skip
    return training(lambda: ViTForImageClassification(config), weights)


def resnet(width: int = 32, weights: str = "") -> dict[str, object]:
    """Return the training of six blocks of two convolutions, of up to four times the width."""
    config = ResNetConfig(
        num_channels=1, embedding_size=width, hidden_sizes=[width, 2 * width, 4 * width], depths=[2, 2, 2],
        layer_type="basic", num_labels=10,
    )  # fmt: skip
    return training(lambda: ResNetForImageClassification(config), weights)
