"""Energy that a GPU has taken, by NVML's counter, where the card and the package nvidia-ml-py tell it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def energy_j(device: torch.device) -> float | None:
    """Return the joules that a device's whole card has taken since its driver was loaded; None where nothing tells."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return _card_energy_j(f"GPU-{found.uuid}")


def _card_energy_j(uuid: str) -> float | None:
    if (nvml := _nvml()) is None:
        return None
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(nvml.nvmlDeviceGetHandleByUUID(uuid))) / 1000
    except nvml.NVMLError:  # cards before Volta, slices of a card (MIG)
        return None


@cache
def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
