"""Memory of a training step with nothing, a half and three quarters of ResNet-18's convolutions stopped.

    python benchmarks/stopped_memory.py [cpu|cuda]

Each measurement is a process of its own. Kept: bytes that autograd holds between forward and backward, parameters
aside. Peak: resident memory over what it was before the steps (CPU), allocated memory (CUDA).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

from machine import header, spread

REPEATS = 5


def measure(share: float, device: str) -> dict[str, float]:
    """In this process."""
    import torch
    from stopped_steps import resnet18, stop_share
    from torch import nn

    from trainables.gradskip import SGD

    torch.set_num_threads(2)
    model = resnet18(64).to(device)
    settings = stop_share(model, share)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, model=model, settings=settings)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def step(images: int) -> None:
        x = torch.randn(images, 3, 32, 32, device=device)
        y = torch.zeros(images, dtype=torch.int64, device=device)
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    step(2)  # stops
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    storages.clear()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(128)
    kept = sum(storages.values())
    step(128)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"kept": kept, "peak": peak}


def main() -> None:
    """Print the table."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(header("benchmarks/stopped_memory.py"), f"| {device}, ResNet-18, 32x32, batch 128")
    for share in (0.0, 0.5, 0.75):
        found = []
        for _ in range(REPEATS):
            command = [sys.executable, __file__, device, str(share)]
            found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        kept = found[0]["kept"] / 1e6
        print(f"{share:>4.0%} stopped: kept {kept:.1f} MB; peak {spread([f['peak'] / 1e6 for f in found])} MB")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(measure(float(sys.argv[2]), sys.argv[1])))
    else:
        main()
