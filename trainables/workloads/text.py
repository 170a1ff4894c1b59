"""A workload without convolutions: a small causal transformer that predicts the next character of Python's manual.

Shapes: B sequences of T characters; D width; V character numbers; inputs and targets (B, T) int64 in 0..V-1, the
targets one character ahead; scores (B, T, V) float32.

The text ships with Python (`pydoc_data.topics`), so accuracies are comparable within one version of Python.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainables.workloads.base import Batch, Workload, check_positive, digest_of
from trainables.workloads.seeded_loader import epoch_seed

CONTEXT = 64
WIDTH = 64
BLOCKS = 2
HEADS = 4
BATCH_SIZE = 16
EVALUATION_BATCH_SIZE = 32
STEPS_PER_EPOCH = 30
EVALUATION_WINDOWS = 256
LEARNING_RATE = 1e-2
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
#: Share of the run in which the learning rate rises.
WARM_UP = 0.05
#: Number of characters with their own number; all others share the next number.
CHARACTERS = 96
#: Share of the text for training; validation and test each get half of the rest.
TRAINING_SHARE = 0.8
#: Standard deviation of the embeddings' initial weights; with the usual 0.02 in all layers, the first 60 steps at this
#: learning rate learned only the most frequent character.
INITIAL_DEVIATION = 0.5


def _text() -> str:
    """Return the topics of the manual, sorted by name, with each paragraph once.

    Topics repeat each other, and no paragraph may be in two splits. Paragraphs are equal if their words are: repeated
    ones differ in indentation, wrapping and underlines.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n(?:[ \t]*\n)+", topics[name].strip("\n")):
            paragraphs.setdefault(words(paragraph), paragraph)
    return "\n\n".join(paragraph for key, paragraph in paragraphs.items() if key)


def words(paragraph: str) -> str:
    r"""Return the paragraph's words, without underlines of headings.

    >>> words("  Lists\n  =====")
    'Lists'
    """
    return " ".join(re.sub(r"[-=*^~]{3,}", " ", paragraph).split())


@lru_cache(maxsize=1)
def _splits() -> dict[str, Tensor]:
    """Return 80, 10 and 10 % of the text, in order, as numbers; cached, so the tensors must not be modified."""
    text = _text()
    trained = int(len(text) * TRAINING_SHARE)
    middle = (trained + len(text)) // 2
    counts = Counter(text[:trained])
    known = sorted(sorted(counts), key=lambda character: -counts[character])[:CHARACTERS]
    number_of = {character: number for number, character in enumerate(known)}
    numbers = torch.tensor([number_of.get(character, CHARACTERS) for character in text])
    return {"train": numbers[:trained], "validation": numbers[trained:middle], "test": numbers[middle:]}


class Embedding(nn.Module):
    """A vector for each character plus one for its position."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS + 1, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map characters (B, T) int64 to vectors (B, T, D)."""
        vectors: Tensor = self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return vectors


class Attention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, section 3.2).

    Written as two matrix products: torch's fused attention is not counted as FLOPs on the CPU, computes the scores a
    second time in its backward pass on a GPU, and is not deterministic there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = query / math.sqrt(WIDTH // HEADS) @ key.transpose(-2, -1)  # (B, HEADS, T, T)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each after a norm and added to its input (pre-norm, Xiong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def learning_rate_share(step: int, total_steps: int) -> float:
    """Return the share of the highest learning rate: a linear rise, then half a cosine to 0 at ``total_steps``.

    >>> [round(learning_rate_share(step, 40), 3) for step in (0, 1, 21, 40)]
    [0.5, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(WARM_UP * total_steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(1, total_steps - rising))


class Text(Workload):
    """Two transformer blocks of width 64 on 64 characters, AdamW, linear warm-up and cosine schedule.

    Args:
        batch_size: sequences in a batch, >= 1.
        steps_per_epoch: batches in an epoch, >= 1; sequences are drawn at random, so an epoch can have any length.

    Raises:
        UserError: a number below 1.
    """

    name = "text"
    steps_per_epoch = STEPS_PER_EPOCH

    def __init__(self, *, batch_size: int = BATCH_SIZE, steps_per_epoch: int = STEPS_PER_EPOCH) -> None:
        check_positive(self.name, batch_size=batch_size, steps_per_epoch=steps_per_epoch)
        self._batch_size, self.steps_per_epoch = batch_size, steps_per_epoch

    def make_model(self) -> nn.Module:
        model = nn.Sequential(
            OrderedDict(
                embedding=Embedding(),
                blocks=nn.Sequential(*(TransformerBlock() for _ in range(BLOCKS))),
                norm=nn.LayerNorm(WIDTH),
                head=nn.Linear(WIDTH, CHARACTERS + 1),
            )
        )
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
        return model

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return AdamW(named_parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: learning_rate_share(step, total_steps))

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        windows = _splits()["train"].unfold(0, CONTEXT + 1, 1)
        # One generator per epoch: the sequences of epoch k are drawn without drawing those of the epochs before it.
        generator = torch.Generator().manual_seed(epoch_seed(epoch, seed))
        chosen = torch.randint(len(windows), (self.steps_per_epoch, self._batch_size), generator=generator)
        for places in chosen:
            yield _inputs_and_targets(windows[places])

    def fingerprint(self) -> str:
        return digest_of(super().fingerprint(), self._batch_size, self.steps_per_epoch, *_splits().values())

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        for part in evaluation_windows(split).split(EVALUATION_BATCH_SIZE):
            yield _inputs_and_targets(part)


def evaluation_windows(split: str) -> Tensor:
    """Return fixed windows spread evenly over a split, (at most 256, T + 1); no character is predicted twice."""
    windows = _splits()[split].unfold(0, CONTEXT + 1, CONTEXT)
    count = min(EVALUATION_WINDOWS, len(windows))
    return windows[torch.arange(count) * len(windows) // count]


def _inputs_and_targets(windows: Tensor) -> Batch:
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
