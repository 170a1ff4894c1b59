"""Training samples by number: what methods that choose samples themselves need of a data set.

Shapes: N samples; B samples of a batch; numbers (B,) int64 in 0..N-1, on the CPU; a batch is a tuple of tensors
(B, ...).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators, seed_generators
from trainables.workloads.base import Batch, Samples
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.seeded_loader import epoch_seed

#: What `samples_of` takes, in words.
_TAKES = "a DataLoader of a map-style data set, such a data set, or a tuple of tensors"


class TensorSamples(Samples):
    """Samples that are the rows of tensors.

    Args:
        tensors: each (N, ...), on the CPU.
        batch_size: of a batch where nobody names another size.
    """

    def __init__(self, tensors: Iterable[Tensor], batch_size: int = 1) -> None:
        self.tensors = tuple(tensors)
        self.count = len(self.tensors[0])
        self.batch_size = batch_size

    def batch(self, numbers: Tensor, generator: torch.Generator) -> Batch:
        return tuple(tensor[numbers] for tensor in self.tensors)


class DatasetSamples(Samples):
    """Samples of a map-style data set; its draws (augmentation) do not move the process's generators.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        collate: a list of items in, a batch out.
        batch_size: of a batch where nobody names another size.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate, batch_size: int = 1):
        self._dataset, self._collate = dataset, collate
        self.count = len(dataset)
        self.batch_size = batch_size
        self.structure: Any = None
        """A batch as the data set makes it, without its tensors; None before the first."""

    def batch(self, numbers: Tensor, generator: torch.Generator) -> Batch:
        seed = int(torch.randint(2**31, (), generator=generator))
        with kept_generators([]):
            seed_generators(seed, torch.device("cpu"))
            batch = self._collate([self._dataset[number] for number in numbers.tolist()])
        self.structure = structure_of(batch)
        return flatten(batch)


def samples_of(data: Any) -> Samples:
    """Return the samples of a data set in whatever form training code has it.

    Args:
        data: `Samples`, a DataLoader of a map-style data set, such a data set, or tensors (N, ...).

    Raises:
        UserError: a stream without numbers, or nothing of the kind.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        if not all(part.dim() for part in data):
            raise UserError(
                "tensors of samples must have a row for each, got a tensor without dimensions: leave it out"
            )
        sizes = {len(part) for part in data}
        if len(sizes) > 1:
            raise UserError(f"tensors of samples must be equally long, got {' and '.join(map(str, sorted(sizes)))}")
        samples: Samples = TensorSamples(data)
    elif isinstance(data, DataLoader):
        samples = _of_loader(data)
    elif isinstance(data, (tuple, list, Mapping, str)) and len(data):
        raise UserError(
            f"data must be {_TAKES}, got a {type(data).__name__}, whose entries may be samples or batches: give "
            "DataLoader(samples, batch_size=...), or reservoir(batches, most=5000, seed=0)"
        )
    else:
        _check_map_style(data)
        samples = DatasetSamples(data)
    if samples.count == 0:
        raise UserError(f"data must have samples, got none: give {_TAKES}")
    return samples


def structured(loss: Callable[..., Any], samples: Samples) -> Callable[..., Any]:
    """Return a loss of batches as tuples of tensors, given one of batches as a data set yields them.

    Args:
        loss: (model, batch) -> loss; batches that are no tuple of tensors, but a mapping or nested, come as such.
        samples: of the data set.
    """
    if not isinstance(samples, DatasetSamples):
        return loss

    def of_tensors(model: Any, batch: Batch) -> Any:
        structure = samples.structure
        flat = structure is None or (isinstance(structure, (tuple, list)) and all(part is None for part in structure))
        return loss(model, batch if flat else unflatten(structure, batch))

    return of_tensors


def _of_loader(loader: DataLoader[Any]) -> DatasetSamples:
    _check_map_style(loader.dataset)
    if loader.batch_sampler is None:
        raise UserError(
            "a DataLoader must make batches of samples, got batch_size=None, whose items are batches already: give "
            "batch_size, or reservoir(loader, most=5000, seed=0)"
        )
    dataset: Any = loader.dataset
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, WeightedRandomSampler):
        raise UserError(
            "samples are drawn by the method, and cannot be drawn by weights, too, got a DataLoader with a "
            "WeightedRandomSampler: give one with shuffle=True, and put the weights into the loss"
        )
    if isinstance(sampler, SubsetRandomSampler):  # the others are another split
        dataset = Subset(dataset, [int(index) for index in sampler.indices])
    size = getattr(loader.batch_sampler, "batch_size", None) or 1
    return DatasetSamples(dataset, loader.collate_fn or default_collate, int(size))


class _View(Dataset[Any]):
    """One version of each sample of a data set whose augmentation draws from the process's generators."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        with kept_generators([]):
            seed_generators(epoch_seed(int(number), self._seed), torch.device("cpu"))
            return self.dataset[number]


def view_of(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return the loader with one version of each sample, which depends on the sample's number and the seed alone."""
    view = copy.copy(loader)
    vars(view)["dataset"] = _View(loader.dataset, seed)  # torch forbids to set it
    return view


#: Samples that `check_repeats` compares.
_COMPARED = 8


def check_repeats(loader: DataLoader[Any]) -> None:
    """Raise UserError if a sample has other values when it is drawn again, or beside others, of those compared.

    Also for a loader of a stream, without batches of samples, or that makes them in another way, and where a batch of
    one sample has not one row.
    """
    _check_map_style(loader.dataset)
    if loader.batch_sampler is None or type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError("a DataLoader must make batches of samples by torch's own __iter__, with batch_size")
    samples = DatasetSamples(loader.dataset, loader.collate_fn or default_collate)
    numbers = torch.linspace(0, samples.count - 1, min(_COMPARED, samples.count)).long()
    beside = samples.batch(numbers, torch.Generator().manual_seed(0))
    for row, number in enumerate(numbers):
        first, again = (samples.batch(number[None], torch.Generator().manual_seed(seed)) for seed in (0, 1))
        if len(first[0]) != 1:
            raise UserError(f"collate_fn must make a row of each sample, got {len(first[0])} of sample {int(number)}")
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            raise UserError(
                f"sample {int(number)} had other values when it was drawn again: leave augmentation out, or return "
                "views=4, with which epoch e trains on version e mod 4 of each sample, drawn by the generators of "
                "torch, numpy and random"
            )
        rows = (b[row : row + 1] if b.dim() and len(b) == len(numbers) else b for b in beside)
        if not all(torch.equal(a, b) for a, b in zip(first, rows, strict=True)):
            raise UserError(
                f"sample {int(number)} had other values beside others, as where each batch is padded to its longest: "
                "collate_fn must pad all to one length, and mix none"
            )


def _check_map_style(dataset: Any) -> None:
    stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if stream and hasattr(dataset, "__iter__"):
        raise UserError(
            f"samples must have numbers, and an iterable stream ({type(dataset).__name__}) has none: keep a bounded "
            "part of it, reservoir(batches, most=5000, seed=0)"
        )
    if stream or not hasattr(dataset, "__len__"):
        raise UserError(f"data must be {_TAKES}, got {type(dataset).__name__}")


def reservoir(batches: Iterable[Any], *, most: int, seed: int, batch_size: int = 1) -> TensorSamples:
    """Return at most so many samples of a stream, each with equal probability; all of them if there are no more.

    Source: Vitter, "Random sampling with a reservoir", 1985, algorithm R.

    Args:
        batches: finite; tensors, tuples, lists or dicts of tensors (B, ...). Samples are copied to the CPU.
        most: samples that are kept, >= 1.
        seed: of the choice.
        batch_size: `Samples.batch_size` of the result.

    Raises:
        UserError: no sample at all, or samples of several shapes.
    """
    if most < 1:
        raise UserError(f"most must be an integer >= 1, got {most!r}")
    generator = torch.Generator().manual_seed(seed)
    kept: list[Batch] = []
    seen = 0
    for found in batches:
        batch = flatten(found)
        for row in range(len(batch[0])):
            place = seen if seen < most else int(torch.randint(seen + 1, (), generator=generator))
            seen += 1
            if place < most:
                # Copies: a row as it is keeps its whole batch in memory.
                kept[place : place + 1] = [tuple(tensor[row].detach().cpu().clone() for tensor in batch)]
    if not kept:
        raise UserError("a reservoir needs samples, got a stream without any")
    shapes = {tuple(tuple(part.shape) for part in sample) for sample in kept}
    if len(shapes) > 1:
        first, second, *_ = sorted(shapes)
        raise UserError(f"samples of a reservoir must have one shape, got {first} and {second}: pad them to one length")
    return TensorSamples([torch.stack(parts) for parts in zip(*kept, strict=True)], batch_size)
