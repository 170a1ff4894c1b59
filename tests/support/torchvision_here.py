"""torchvision beside the CPU build of torch, for its data sets and transforms.

Its wheels hold operators for the CUDA build, which do not load here; that they are missing is noticed only where fake
versions of them are registered. It is installed into a folder of its own (Makefile), since other packages that find it
would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def import_torchvision() -> ModuleType:
    """Import the package, with `datasets` and `transforms`; its operators may be missing."""
    real = torch.library.register_fake

    def register(name: Any, *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return real(name, *arguments, **keywords)

    torch.library.register_fake = register
    sys.path.append(str(Path(sys.prefix) / "torchvision"))
    try:
        import torchvision
        import torchvision.datasets
        import torchvision.transforms
    finally:
        torch.library.register_fake = real
        sys.path.pop()
    package: ModuleType = torchvision
    return package
