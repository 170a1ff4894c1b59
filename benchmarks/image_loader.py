"""Does the image loader keep ahead of the training? On one's own Parquet file or folder of small images.

    python benchmarks/image_loader.py DATA

First use: every image is decoded. Later start: a new process builds the workload from the kept arrays and takes its
first batch; imports are counted apart. Loader: what the training waits for the next batch, as a share of a step of
ResNet-20 at batch size 128 on two threads (augmentation included, the first five steps of each run left out).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import header, spread

from trainables.workloads.images.workload import Images

REPEATS = 3
STEPS, FIRST_STEPS = 40, 5
THREADS = 2
BATCH_SIZE = 128
START = """
import sys, time
begun = time.perf_counter()
from trainables.workloads.images.workload import Images
imported = time.perf_counter()
images = Images(data=sys.argv[1], cache=sys.argv[2])
next(images.train_batches(0, 0))
print(imported - begun, time.perf_counter() - imported)
"""


def first_use_s(data: str) -> tuple[float, int]:
    """Wall time of a first use, and how many images that is."""
    with tempfile.TemporaryDirectory() as cache:
        begun = time.perf_counter()
        images = Images(data=data, cache=cache)
        elapsed_s = time.perf_counter() - begun
        return elapsed_s, sum(len(labels) for labels in images._data.labels.values())


def later_start_s(data: str, cache: str) -> tuple[float, float]:
    """Wall time of imports, and of the workload with its first batch, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", START, data, cache], capture_output=True, text=True, check=True,
    )  # fmt: skip
    import_s, start_s = map(float, done.stdout.split())
    return import_s, start_s


def training(images: Images, epoch: int) -> tuple[float, float]:
    """Mean time of a step with its batch, and mean time waited for the batch, in seconds."""
    model = images.make_model().train()
    optimizer = images.make_optimizer(model.named_parameters())
    batches = images.train_batches(epoch, 0)
    waited_s, begun = 0.0, 0.0
    for step in range(FIRST_STEPS + STEPS):
        if step == FIRST_STEPS:
            begun, waited_s = time.perf_counter(), 0.0
        asked = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked
        optimizer.zero_grad(set_to_none=True)
        images.loss(model, batch).backward()
        optimizer.step()
    return (time.perf_counter() - begun) / STEPS, waited_s / STEPS


def alone_s(images: Images) -> float:
    """Mean time to make a batch when nothing else runs, in seconds."""
    batches = images._train_batches(0, 0, 0)
    next(batches)
    begun = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
    return (time.perf_counter() - begun) / STEPS


def main(data: str) -> None:
    """Print the three numbers."""
    torch.set_num_threads(THREADS)
    print(header("image_loader"))
    decoded = [first_use_s(data) for _ in range(REPEATS)]
    print(f"first use, {decoded[0][1]:,} images decoded: {spread([elapsed for elapsed, _ in decoded])} s")
    with tempfile.TemporaryDirectory() as cache:
        images = Images(data=data, cache=cache, model="resnet20", batch_size=BATCH_SIZE)
        kept_bytes = sum(path.stat().st_size for path in Path(cache).rglob("*.npy"))
        starts = [later_start_s(data, cache) for _ in range(REPEATS)]
        print(f"later start: {spread([start for _, start in starts])} s, after imports of "
              f"{spread([imports for imports, _ in starts])} s; {kept_bytes / 1e6:.0f} MB kept")  # fmt: skip
        print(f"a batch of {BATCH_SIZE} made with nothing beside: "
              f"{spread([1e3 * alone_s(images) for _ in range(REPEATS)])} ms")  # fmt: skip
        steps = [training(images, epoch) for epoch in range(REPEATS)]
        print(f"ResNet-20, batch {BATCH_SIZE}, {THREADS} threads: step {spread([1e3 * step for step, _ in steps])} ms")
        print(f"of which waited for the loader: {spread([1e3 * waited for _, waited in steps])} ms, "
              f"{spread([100 * waited / step for step, waited in steps])} % of a step")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
