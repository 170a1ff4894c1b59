"""Print step times of a plain loop and of ours, item by item of the training recipe, and images loaded a second.

    python benchmarks/recipe.py [--device cuda] [--batch-size 32] [--rounds 5] [--steps 3]
    python benchmarks/recipe.py --loader DATA      # a folder of images by class, for ImageFolder, too

Step: ResNet-18 of 32x32 images (width 64) on two threads, batches that lie in memory. "plain loop" is
the loop of PyTorch's tutorials with torch.optim.SGD; "ours" is `TrainingRun` with the same model, optimizer and
batches, then with one field of the recipe at a time. All variants take turns; ratios are to the plain loop of the same
round. "kept": bytes that a forward pass leaves allocated (torch.profiler).

Loader: pixels of a shuffled epoch, cropped and mirrored, as normalised batches of 128; one thread a process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import header, now, spread
from stopped_steps import resnet18
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from trainables.config import TrialConfig
from trainables.registry import WORKLOADS, Entry
from trainables.training.recipe.recipe import BatchLoader
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch, Workload
from trainables.workloads.images.workload import Images

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

THREADS = 2
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
#: One field at a time, then combinations.
ITEMS: dict[str, dict[str, Any]] = {
    "ours": {},
    "channels_last": {"channels_last": True},
    "bfloat16": {"precision": "bfloat16"},
    "fused_optimizer": {"fused_optimizer": True},
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "checkpointing cheap": {"activation_checkpointing": "cheap"},
    "checkpointing blocks": {"activation_checkpointing": "blocks"},
    "compile_mode default": {"compile_mode": "default"},
    "bfloat16, channels_last": {"precision": "bfloat16", "channels_last": True},
    "bfloat16, compiled": {"precision": "bfloat16", "compile_mode": "default"},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "cudnn_benchmark": {"cudnn_benchmark": True},
    "float16": {"precision": "float16"},
    "float16, channels_last, cudnn_benchmark": {
        "precision": "float16", "channels_last": True, "cudnn_benchmark": True,
    },
}  # fmt: skip


class InMemory(Workload):
    """ResNet-18 on batches of noise that are made once."""

    name = "in_memory"
    splits = ("train", "validation")
    batch_size = 32

    @property
    def steps_per_epoch(self) -> int:
        return 10_000

    def make_model(self) -> nn.Module:
        return resnet18()

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return ConstantLR(optimizer, factor=1.0)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        batches = [batch_of(self.batch_size, number) for number in range(4)]
        return (batches[step % 4] for step in range(self.steps_per_epoch))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float:
        return 0.0


def batch_of(size: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def plain_loop(batch_size: int, device: torch.device) -> Callable[[], None]:
    """A step of the loop of PyTorch's tutorials."""
    model = resnet18().to(device).train()
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    batches = [batch_of(batch_size, number) for number in range(4)]
    count = 0

    def step() -> None:
        nonlocal count
        images, labels = (tensor.to(device) for tensor in batches[count % 4])
        count += 1
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def kept_bytes(run: TrainingRun, batch_size: int) -> int:
    """Bytes that a step's forward pass leaves allocated for its backward pass."""
    batch = run.recipe.on_device(batch_of(batch_size, 0))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, run.recipe.precision.forward_pass():
        loss = run.workload.loss(run.model, batch)
    found = sum(event.self_cpu_memory_usage for event in seen.key_averages())
    del loss
    return found


def step_times(arguments: argparse.Namespace) -> None:
    """Print a line for each item."""
    device = torch.device(arguments.device)
    torch.set_num_threads(THREADS)
    WORKLOADS["in_memory"] = Entry(home=f"{__name__}:InMemory", default_epochs=1, description="")
    items = {**ITEMS, **(ON_GPU if device.type == "cuda" else {})}
    with ExitStack() as stack:
        runs = {}
        for name, fields in items.items():
            config = TrialConfig(workload="in_memory", method="none", epochs=1, threads=THREADS,
                                 device=arguments.device, batch_size=arguments.batch_size, **fields)  # fmt: skip
            runs[name] = stack.enter_context(TrainingRun(config))
            runs[name].begin_epoch()
        steps: dict[str, Callable[[], None]] = {"plain loop": plain_loop(arguments.batch_size, device)}
        steps |= {name: run.train_step for name, run in runs.items()}
        firsts = {name: timed(step, 1, device) for name, step in steps.items()}  # compiles, picks kernels
        for step in steps.values():
            timed(step, 1, device)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                times[name].append(timed(step, arguments.steps, device) / arguments.steps)
        plain = times["plain loop"]
        print(f"ResNet-18, 32x32, batch {arguments.batch_size}, {arguments.rounds} rounds of {arguments.steps} steps")
        print(f"{'plain loop':<42} {spread([1e3 * t for t in plain])} ms a step")
        for name, run in runs.items():
            ratios = [ours / theirs for ours, theirs in zip(times[name], plain, strict=True)]
            more = f", first step {firsts[name]:.1f} s" if "compile" in name else ""
            kept = (
                ""
                if "compile" in name or device.type == "cuda"
                else f", {kept_bytes(run, arguments.batch_size) / 1e6:.0f} MB kept"
            )
            print(f"{name:<42} {spread(ratios)} of the plain loop{kept}{more}")


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of some steps."""
    begun = now(device.type)
    for _ in range(count):
        step()
    return now(device.type) - begun


def loader_speed(arguments: argparse.Namespace) -> None:
    """Print images a second of ImageFolder and of ours, by workers."""
    from torchvision_here import import_torchvision

    vision = import_torchvision()
    torch.set_num_threads(1)
    transform = vision.transforms.Compose(
        [
            vision.transforms.RandomCrop(32, padding=4),
            vision.transforms.RandomHorizontalFlip(),
            vision.transforms.ToTensor(),
            vision.transforms.Normalize((0.5,) * 3, (0.25,) * 3),
        ]
    )
    theirs = vision.datasets.ImageFolder(arguments.loader, transform=transform)
    with tempfile.TemporaryDirectory() as cache:
        kept = Images(data=arguments.loader, cache=cache)
        for workers in (0, 1, 2):
            of_kept = BatchLoader(kept, 0, workers=workers)
            folder = DataLoader(theirs, batch_size=128, shuffle=True, num_workers=workers)
            makers: dict[str, Callable[[int], Iterator[Any]]] = {
                "ImageFolder in a DataLoader": lambda _, loader=folder: iter(loader),
                "ours, kept decoded": lambda epoch, loader=of_kept: loader.batches(epoch, 0),
            }
            speeds: dict[str, list[float]] = {name: [] for name in makers}
            for epoch in range(arguments.rounds):
                for name, make in makers.items():
                    speeds[name].append(images_a_second(make(epoch)))
            theirs_speed = speeds["ImageFolder in a DataLoader"]
            for name, found in speeds.items():
                ratio = spread([ours / one for ours, one in zip(found, theirs_speed, strict=True)])
                print(f"{workers} workers  {name:<30} {spread(found)} images/s, {ratio} of ImageFolder's")


def images_a_second(batches: Iterator[Any]) -> float:
    """Images a second of the batches after the first."""
    next(batches)
    begun, count = time.perf_counter(), 0
    for images, _ in islice(batches, 60):
        count += len(images)
    return count / (time.perf_counter() - begun)


def main() -> None:
    """Print the figures asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loader", metavar="DATA")
    arguments = parser.parse_args()
    print(header("recipe"))
    if arguments.loader:
        loader_speed(arguments)
    else:
        step_times(arguments)


if __name__ == "__main__":
    main()
