"""Facts that runs must have in common to share training: everything but the interventions of their methods."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainables.config import TrialConfig
from trainables.gradients.variance_fields import OF_ANY_METHOD
from trainables.training.recipe.fields import FLOAT32, changes_results
from trainables.workload_options import what_is_trained
from trainables.workloads.base import Workload

#: Code that determines what a run computes, besides the workload's own.
_CODE = (
    "flops.py", "training/*.py", "training/*/*.py", "gradskip/*.py", "workloads/*.py", "stage_tree/*.py",
    "gradients/*.py", "compression/*.py", "compression/*/*.py",
)  # fmt: skip


def root_facts(config: TrialConfig, workload: Workload) -> dict[str, Any]:
    """Return the facts that all runs of one root share, in plain types.

    Runs with equal facts are equal until a method acts. Fields of the configuration that matter only once a method acts
    are part of its actions, not of these facts.
    """
    # Rows of runs that are measured have more columns.
    measured = {name: value for name in OF_ANY_METHOD if (value := getattr(config, name)) is not None}
    return {
        "workload": config.workload,
        "workload_options": list(what_is_trained(config.workload, config.options)),
        "fingerprint": workload.fingerprint(),
        "code": code_fingerprint(),
        "epochs": config.epochs,
        "steps_per_epoch": workload.steps_per_epoch,
        "total_steps": workload.steps_per_epoch * config.epochs,
        "seed": config.seed,
        "threads": config.threads,
        "device": config.device,
        "device_kind": device_kind(config.device),
        **measured,
        "precision": FLOAT32,
        **changes_results(config),
        **config.quality.fields(),  # rows of another metric have other keys
        "torch": torch.__version__,
    }


def root_id(facts: dict[str, Any]) -> str:
    """Return a digest of the facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@cache
def device_kind(device: str) -> str:
    """Return the name of the device's kind; kinds that may round differently have different names."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    """Return the processor's model: libraries select kernels by it, and different kernels round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return models[0] if models else platform.machine()


@cache
def code_fingerprint() -> str:
    """Return a digest of the training code of this package."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
