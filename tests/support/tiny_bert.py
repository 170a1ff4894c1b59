"""A pretrained BERT of two narrow layers with its tokenizer, and texts that it can tell apart; needs no network."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ("good", "fine", "nice", "bad", "poor", "ugly", "film", "story", "a", "the")


def save_tiny_bert(folder: Path) -> str:
    """Save it, without a head, and return the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return str(folder)


def sentences(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts of 3 to 8 words, one of which tells the class, and their classes ``neg`` and ``pos``."""
    draw = random.Random(seed)
    labels = [draw.choice(("pos", "neg")) for _ in range(count)]
    texts = []
    for label in labels:
        words = draw.choices(WORDS[6:], k=draw.randint(2, 7))
        words.insert(draw.randint(0, len(words)), draw.choice(WORDS[:3] if label == "pos" else WORDS[3:6]))
        texts.append(" ".join(words))
    return texts, labels


def write_sentences(folder: Path, **counts: int) -> str:
    """Write ``NAME.csv`` with the columns text and label for each split, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(counts.items()):
        rows = [f'"{text}",{label}' for text, label in zip(*sentences(count, seed), strict=True)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return str(folder)
