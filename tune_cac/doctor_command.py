"""The command ``doctor``: what this machine means for a search, found by a short dry run."""

from __future__ import annotations

import argparse

from trainables.config import TrialConfig
from tune_cac.study import package_versions


def doctor(arguments: argparse.Namespace) -> int:
    """Train a few steps twice, once with a fork in the middle, and say whether they agree to the last bit."""
    config = TrialConfig(
        workload=arguments.workload, epochs=1, method="none", device=arguments.device, threads=arguments.threads
    )
    from trainables.stage_tree.root import device_kind
    from trainables.training.determinism import differing_tensors

    differing = differing_tensors(config)
    print("versions: " + ", ".join(f"{name} {version}" for name, version in package_versions().items()))
    print(f"device: {config.device} ({device_kind(config.device)}), {config.threads} threads a trial")
    if not differing:
        print(
            f"training {config.workload} repeats bit for bit: "
            "a trial that is forked from another equals the trial alone"
        )
        return 0
    print(
        f"training {config.workload} does not repeat bit for bit here ({len(differing)} tensors differ, "
        f"{differing[0]} the first): a trial that is forked from another is as valid as the trial alone, but not "
        "equal to it. "
        "torch.use_deterministic_algorithms(True) in the workload makes it so where kernels exist; --no-sharing "
        "trains every trial alone"
    )
    return 0
