"""A training step with part of ResNet-18 stopped: time saved over FLOPs saved, ratio in one run.

    python benchmarks/stopped_steps.py [cpu|cuda]

32x32 images. A share of the 20 convolutions, in execution order and with their norms, is stopped by `gradskip.SGD`;
rounds alternate between the shares in random order. FLOPs are torch's FlopCounterMode.
"""

from __future__ import annotations

import random
import sys
from statistics import median

import torch
from machine import header, now, spread
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.gradskip import SGD, Settings

SHARES = (0.0, 0.25, 0.5, 0.75)


#: Convolutions: the stem's, two in each of eight blocks, three in shortcuts. What "layers" counts.
LAYERS = 20


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C', H', W')."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Sequential:
    """Stem, eight blocks, head."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks, inside = [], width
    for stage in range(4):
        for first in (True, False):
            outside = width * 2**stage
            blocks.append(Block(inside, outside, 2 if first and stage else 1))
            inside = outside
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))
    return nn.Sequential(stem, *blocks, head)


def stop_share(model: nn.Module, share: float) -> Settings:
    """Settings that stop this share of the layers in the first step: in execution order, with their norms."""
    if share == 0:
        return Settings(start_thr=-1)
    convolutions = [n for n, p in enumerate(model.parameters()) if p.dim() == 4]
    assert len(convolutions) == LAYERS
    last = convolutions[round(share * LAYERS) - 1]
    return Settings(stop_layer_num=(last,), stop_layer_itr=(0,), whole_units=True)


class Run:
    """A model with its first layers stopped, and what its steps cost."""

    def __init__(self, share: float, device: str, width: int, batch: int) -> None:
        self.device = device
        self.model = resnet18(width).to(device)
        settings = stop_share(self.model, share)
        self.optimizer = SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, model=self.model, settings=settings
        )
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
        self.y = torch.randint(10, (batch,), generator=generator).to(device)
        self.step()
        self.step()
        assert self.optimizer.gradskip.left_upstream() == []
        with FlopCounterMode(display=False) as forward:
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        self.forward_flops, self.backward_flops = forward.get_total_flops(), backward.get_total_flops()

    def step(self) -> tuple[float, float]:
        """Seconds of the backward pass and of the whole step."""
        self.optimizer.zero_grad()
        begun = now(self.device)
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        between = now(self.device)
        loss.backward()
        after = now(self.device)
        self.optimizer.step()
        return after - between, now(self.device) - begun


def main() -> None:
    """Print the table."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    width, batch, rounds, steps = (64, 512, 20, 10) if device == "cuda" else (64, 32, 7, 2)
    random.seed(0)
    torch.set_num_threads(2)
    name = torch.cuda.get_device_name() if device == "cuda" else "2 threads"
    print(header("benchmarks/stopped_steps.py"), f"| {name}, width {width}, batch {batch}")
    runs = {share: Run(share, device, width, batch) for share in SHARES}
    ratios: dict[float, dict[str, list[float]]] = {s: {"backward": [], "step": []} for s in SHARES if s}
    saved: dict[float, dict[str, list[float]]] = {s: {"backward": [], "step": []} for s in SHARES if s}
    for round_number in range(rounds + 1):
        times: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
        for _ in range(steps):
            order = list(SHARES)
            random.shuffle(order)
            for share in order:
                times[share].append(runs[share].step())
        if round_number == 0:
            continue
        for share in ratios:
            for part, index in (("backward", 0), ("step", 1)):
                time_saved = 1 - median(t[index] for t in times[share]) / median(t[index] for t in times[0.0])
                saved[share][part].append(time_saved)
                ratios[share][part].append(time_saved / flops_saved(runs[share], runs[0.0], part))
    for share in ratios:
        run = runs[share]
        print(f"{share:.0%} of the layers ({round(share * LAYERS)} of {LAYERS}) stopped:")
        for part in ("backward", "step"):
            print(
                f"  {part:<9} FLOPs saved {flops_saved(run, runs[0.0], part):.3f}, time saved "
                f"{spread(saved[share][part])}; ratio {spread(ratios[share][part])}"
            )


def flops_saved(run: Run, dense: Run, part: str) -> float:
    """Of the backward pass, or of the whole step."""
    if part == "backward":
        return 1 - run.backward_flops / dense.backward_flops
    return 1 - (run.forward_flops + run.backward_flops) / (dense.forward_flops + dense.backward_flops)


if __name__ == "__main__":
    main()
