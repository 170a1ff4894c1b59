"""Train a small transformer to predict the next character of a manual; its quality is a loss, in nats a character.

    python -m tune_cac search --script 'python language_model.py' --metric val_loss --allowed-drop 0.02
    python -m tune_cac search --workload language_model:make

Lines that differ from a script without Gradient-Skip end in "# tune_cac".
"""

import math
import os
import pydoc_data.topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tune_cac as cac  # tune_cac

LENGTH, WIDTH, HEADS, STEPS = 32, 48, 4, 60
text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")[:60_000]
tokens = torch.tensor(list(text))
train_tokens, validation_tokens = tokens[:50_000], tokens[50_000:]


class LanguageModel(nn.Module):
    """Embed, add positions, two encoder layers with a causal mask, decode."""

    def __init__(self, characters: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decode = nn.Linear(WIDTH, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return (batch, position, character) scores of the character that follows each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(characters.shape[1])
        hidden = self.embed(characters) * math.sqrt(WIDTH) + self.position
        return self.decode(self.layers(hidden, mask=mask, is_causal=True))


def sequences(source: torch.Tensor) -> torch.Tensor:
    """Return (sequences, LENGTH + 1) stretches of the text."""
    return source[: len(source) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next character."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def evaluate(model: nn.Module, batches: list[torch.Tensor], device: object = None) -> float:
    """Return the mean loss over whole batches."""
    return sum(float(loss(model, batch)) for batch in batches) / len(batches)


def epoch_batches(epoch: int, seed: int) -> list[torch.Tensor]:
    """Return the epoch's batches in their order."""
    order = torch.randperm(len(sequences(train_tokens)), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return list(sequences(train_tokens)[order].split(24)[:STEPS])


def make() -> dict[str, object]:
    """Return the same training as the parts of a factory."""
    return {
        "model": LanguageModel, "train": epoch_batches, "steps_per_epoch": STEPS, "loss": loss, "epochs": 3,
        "validation": list(sequences(validation_tokens).split(100)), "evaluate": evaluate, "metric": "val_loss",
        "unit": "nats", "optimizer": lambda named: torch.optim.AdamW(named, lr=2e-3, weight_decay=0.1),
    }  # fmt: skip


if __name__ == "__main__":
    seed = int(os.environ.get("TUNE_CAC_SEED", 0))  # tune_cac
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = cac.gradskip.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, model=model)  # tune_cac
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * STEPS)
    for epoch in range(3):
        model.train()
        for batch in epoch_batches(epoch, seed):
            optimizer.zero_grad()
            loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            value = evaluate(model, list(sequences(validation_tokens).split(100)))
        print(f"epoch {epoch + 1}: loss {value:.3f}, perplexity {math.exp(value):.2f}")
        cac.report(val_loss=value, perplexity=math.exp(value), epoch=epoch + 1)  # tune_cac
