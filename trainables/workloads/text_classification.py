"""Texts by class on a pretrained transformer of the library transformers, the workload ``text_classification``.

Shapes: B texts of a batch; T tokens of the longest text of a split, to which all of it are padded, so that a text's
input is the same in every epoch; K classes; inputs, as the tokenizer names them, (B, T) int64; labels (B,) int64 in
0..K-1; scores (B, K) float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainables.errors import UserError, unknown_name
from trainables.workloads.base import VALIDATION_LOSS, Batch, Workload, check_positive, digest_of, on_device
from trainables.workloads.images.source import SPLIT_NAMES
from trainables.workloads.images.workload import hold_out
from trainables.workloads.sample_access import TensorSamples
from trainables.workloads.seeded_loader import shuffled_batches
from trainables.workloads.text import learning_rate_share

EVALUATION_BATCH_SIZE = 128
#: Kinds of files; of a split the first kind that is there is read.
SUFFIXES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokenized texts; the tensors must not be modified."""

    splits: dict[str, tuple[Tensor, ...]]
    """Inputs and labels of each split."""
    inputs: tuple[str, ...]
    """Names of the inputs."""
    classes: tuple[str, ...]
    """Labels of the training split as the data has them, by class number."""
    pad_token_id: int


def find_files(data: str) -> dict[str, list[Path]]:
    """Return the files of each split: a file is all training data, those of a folder are told apart by their names.

    UserError: there are none for training.
    """
    root = Path(data).expanduser()
    if root.is_file():
        return {"train": [root]}
    for folder in (root, root / "data"):  # the latter as in repositories of Hugging Face
        found = {}
        for split, names in {**SPLIT_NAMES, "validation": (*SPLIT_NAMES["validation"], "dev")}.items():
            patterns = (f"{name}{part}{kind}" for name in names for kind in SUFFIXES for part in ("", "-*"))
            if paths := next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), None):
                found[split] = paths
        if "train" in found:
            return found
    raise UserError(
        f"the data of workload text_classification must be a file ({', '.join(SUFFIXES)}) or a folder with train.csv, "
        f"validation.csv, ... or such, got {str(root)!r}" + ("" if root.exists() else ", which does not exist")
    )


def read_rows(path: Path, text: str, label: str) -> tuple[list[str], list[str]]:
    """Return texts and labels of a file; numbers as names of both columns say that it has no line of names.

    UserError: it cannot be read, lacks a column, or a row lacks a text or a label.
    """
    is_numbered = (text + label).isdigit()
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            # Tab-separated files of benchmarks quote nothing: a quotation mark in a text would swallow lines.
            tabs = path.suffix == ".tsv"
            columns = [f"f{name}" for name in (text, label)] if is_numbered else [text, label]
            table = pa.csv.read_csv(
                path,
                read_options=pa.csv.ReadOptions(autogenerate_column_names=is_numbered),
                parse_options=pa.csv.ParseOptions(
                    delimiter="\t" if tabs else ",", quote_char=False if tabs else '"', newlines_in_values=not tabs
                ),
                convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string())),
            )
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    names = [name.removeprefix("f") for name in table.column_names] if is_numbered else table.column_names
    for option, name in (("text", text), ("label", label)):
        if name not in names:
            way_out = f"; give --option {option}=NAME, or text=0 and label=1 for a file without a line of names"
            raise UserError(f"{path}: {unknown_name('column', name, names)}{way_out}")
    texts, labels = (table.column(names.index(name)).to_pylist() for name in (text, label))
    for row, values in enumerate(zip(texts, labels, strict=True)):
        if None in values or values[1] == "":
            raise UserError(f"{path}, row {row} (from 0) must have a text and a label, got {values}")
    return [str(value) for value in texts], [str(value) for value in labels]


@lru_cache(maxsize=2)
def _encoded(data: str, model: str, text: str, label: str, max_length: int, validation: float) -> Encoded:
    """Read and tokenize all splits, once a process."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for split, paths in find_files(data).items():
        parts = [read_rows(path, text, label) for path in paths]
        rows[split] = [*chain(*(part[0] for part in parts))], [*chain(*(part[1] for part in parts))]
    if "test" in rows and set(rows["test"][1]) == {"-1"}:
        del rows["test"]  # Hugging Face writes -1 where the labels are not public
    found = set(rows["train"][1])
    if not 1 < len(found) < len(rows["train"][1]):
        raise UserError(
            f"column {label} of {data} must have 2 or more classes, each of several training texts, got {len(found)} "
            f"labels of {len(rows['train'][1])} texts"
        )
    if broken := min((one for one in found if re.fullmatch(r"-?\d*\.\d*[1-9]\d*", one)), default=None):
        raise UserError(
            f"column {label} of {data} must have classes, got numbers with fractions such as {broken}: a regression is "
            "trained by a factory of your own (docs/own-training.md)"
        )
    classes = sorted(found, key=int if all(re.fullmatch(r"-?\d+", label) for label in found) else str)
    number_of = {label: number for number, label in enumerate(classes)}
    for split, (_, labels) in rows.items():
        for value in set(labels) - found:
            raise UserError(f"{split} of {data}: {unknown_name('label', value, classes)}, as in its training texts")
    tokenizer = _pretrained("AutoTokenizer", model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    splits: dict[str, tuple[Tensor, ...]] = {}
    for split, (texts, labels) in rows.items():
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        splits[split] = *inputs.values(), torch.tensor([number_of[value] for value in labels])
    if "validation" not in splits:
        trained, validated = hold_out(splits["train"][-1].numpy(), validation)
        splits["validation"] = tuple(tensor[validated] for tensor in splits["train"])
        splits["train"] = tuple(tensor[trained] for tensor in splits["train"])
    return Encoded(
        splits=splits, inputs=tuple(inputs), classes=tuple(classes), pad_token_id=int(tokenizer.pad_token_id)
    )


def _pretrained(kind: str, model: str, **more: Any) -> Any:
    """Load by a class of transformers, from a folder without asking the hub, and silently.

    UserError: transformers is not installed, or has nothing of that name.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"workload text_classification needs transformers ({error}): pip install 'tune-cac[transformers]'"
        ) from None
    logging = transformers.utils.logging
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return getattr(transformers, kind).from_pretrained(model, local_files_only=Path(model).is_dir(), **more)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the model of workload text_classification must be a folder of save_pretrained or a name on the Hugging "
            f"Face hub, got {model!r}: {(str(error).strip().splitlines() or [''])[0]}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


@dataclass(kw_only=True, eq=False)
class TextClassification(Workload):
    """Texts in files, a pretrained model, AdamW, linear warm-up and cosine to 0.

    Raises:
        UserError: an option out of range, or data or a model that cannot be read.
    """

    data: str
    """A file (CSV with a line of names, TSV without quotes, Parquet), or a folder with such by split."""
    model: str
    """A folder of ``save_pretrained``, or a name on the hub; its head is new unless it has one for as many classes."""
    text: str = "text"
    """Column of the texts, or its number from 0 where a file has no line of names."""
    label: str = "label"
    """Column of the labels, likewise."""
    max_length: int = 128
    """Most tokens of a text, >= 1; the rest is cut off."""
    batch_size: int = 32
    """Texts per training step, >= 1; the last step of an epoch may have fewer."""
    learning_rate: float = 5e-5
    """Highest learning rate, > 0."""
    weight_decay: float = 0.01
    """Weight decay of all parameters, >= 0."""
    validation: float = 0.1
    """Share of each class's training texts for validation where the data has no validation split, in (0, 1)."""

    name = "text_classification"
    by_step = True

    def __post_init__(self) -> None:
        check_positive(self.name, max_length=self.max_length, batch_size=self.batch_size)
        for option, holds, rule in (
            ("learning_rate", 0 < self.learning_rate < math.inf, "a number > 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a number >= 0"),
            ("validation", 0 < self.validation < 1, "a share in (0, 1)"),
        ):
            if not holds:
                raise UserError(f"{option} of workload {self.name} must be {rule}, got {getattr(self, option)!r}")
        self._read = _encoded(self.data, self.model, self.text, self.label, self.max_length, self.validation)
        self.splits = tuple(split for split in ("train", "validation", "test") if split in self._read.splits)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.train_samples // self.batch_size)

    def make_model(self) -> nn.Module:
        classes = self._read.classes
        model: nn.Module = _pretrained(
            "AutoModelForSequenceClassification", self.model, num_labels=len(classes),
            id2label=dict(enumerate(classes)), label2id={label: number for number, label in enumerate(classes)},
            pad_token_id=self._read.pad_token_id, ignore_mismatched_sizes=True,  # of another head
        )  # fmt: skip
        return model.float()

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return AdamW(named_parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: learning_rate_share(step, total_steps))

    def batch_at(self, epoch: int, seed: int, step: int) -> Batch:
        rows = shuffled_batches(self.train_samples, self.batch_size, epoch, seed)[step]
        return tuple(tensor[rows] for tensor in self._read.splits["train"])

    def fingerprint(self) -> str:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of the head
            weights = self.make_model().state_dict().values()
        options = (self.batch_size, self.learning_rate, self.weight_decay, self._read.classes)
        return digest_of(super().fingerprint(), options, *weights, *chain(*self._read.splits.values()))

    @property
    def train_samples(self) -> int:
        return len(self._read.splits["train"][-1])

    @property
    def different_inputs(self) -> int:
        return self.train_samples

    def samples(self) -> TensorSamples:
        return TensorSamples(self._read.splits["train"], self.batch_size)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        yield from zip(*(tensor.split(EVALUATION_BATCH_SIZE) for tensor in self._read.splits[split]), strict=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self._scores(model, batch), batch[-1])

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        scores: Tensor = model(**dict(zip(self._read.inputs, batch[:-1], strict=True))).logits
        return scores

    def evaluate(self, model: nn.Module, split: str, device: Any) -> dict[str, float]:
        return self._metrics(model, self.evaluation_batches(split), device)

    def evaluate_a_little(self, model: nn.Module, device: Any) -> dict[str, float]:
        return self._metrics(model, islice(self.evaluation_batches("validation"), 1), device)

    @property
    def little_part(self) -> float:
        """Return 0, since one batch always suffices (`Workload.little_part`)."""
        return 0.0

    def _metrics(self, model: nn.Module, batches: Iterable[Batch], device: Any) -> dict[str, float]:
        """Return the accuracy, the mean F1 of the classes that occur and the mean loss."""
        from sklearn.metrics import f1_score

        parts = [(self._scores(model, on_device(batch, device)), batch[-1]) for batch in batches]
        scores, labels = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        chosen = scores.argmax(1)
        return {
            "accuracy": float((chosen == labels).double().mean()),
            "f1": float(f1_score(labels, chosen, average="macro")),
            VALIDATION_LOSS: float(F.cross_entropy(scores, labels)),
        }
