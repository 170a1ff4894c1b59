"""Measure a text classifier in floats and in int8, by onnxruntime, by torch and by torchao, in turns.

    python benchmarks/int8_engines.py --model FOLDER        # of save_pretrained; torchao's rows where it is installed

Times are the medians of rounds, ratios the medians of the rounds' ratios to onnxruntime with floats; 24 tokens, one
thread. The compiled models are compiled before.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from machine import header
from torch import nn
from transformers import AutoModelForSequenceClassification

from trainables.deployment.exporting import Deployed, export_model, quantized_after

TOKENS, ROUNDS = 24, 15


def inputs(texts: int) -> dict[str, torch.Tensor]:
    """Return random tokens of so many texts."""
    ids = torch.randint(1000, 20_000, (texts, TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def engines(model: nn.Module, folder: Path) -> dict[str, nn.Module]:
    """Return what runs the model, by name."""
    found: dict[str, nn.Module] = {}
    for name in ("onnxruntime, floats", "onnxruntime, int8"):
        exported = export_model(model, (), folder / f"{len(found)}.onnx", kwargs=inputs(4))
        if "int8" in name:
            quantized_after(exported, [])
        found[name] = Deployed(exported, model)
    found["torch, floats"] = model
    if find_spec("torchao") is not None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        found["torchao, int8"] = copy.deepcopy(model)
        quantize_(found["torchao, int8"], Int8DynamicActivationInt8WeightConfig())
    for name in [name for name in found if name.startswith("torch")]:
        found[f"{name}, compiled"] = copy.deepcopy(found[name])
        found[f"{name}, compiled"].compile()
    return found


def main() -> None:
    """Print a table a batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of save_pretrained")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(parser.parse_args().model).eval()
    print(header(__file__))
    with TemporaryDirectory() as folder, torch.no_grad():
        for texts in (1, 32):
            calls = {name: partial(engine, **inputs(texts)) for name, engine in engines(model, Path(folder)).items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(ROUNDS + 1):
                for name, call in calls.items():
                    seconds = []
                    for _ in range(3):
                        start = perf_counter()
                        call()
                        seconds.append(perf_counter() - start)
                    if number:  # the first compiles
                        times[name].append(min(seconds))
            base = times["onnxruntime, floats"]
            for name, own in times.items():
                ratios = sorted(a / b for a, b in zip(own, base, strict=True))
                print(f"{texts:>3} {name:28} {1000 * median(own):8.2f} ms  {median(ratios):.2f} "
                      f"({ratios[ROUNDS // 4]:.2f} to {ratios[-1 - ROUNDS // 4]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
