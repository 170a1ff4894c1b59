"""A search's start with its waits side by side: Ray's processes come up while this one loads torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tune_cac.interrupts import importing_beside

#: What a look at the model needs, and then learning from the baseline: an optimizer loads torch's compiler.
_NEEDED = ("torch", "torch._dynamo")


@contextmanager
def early_session(*, cpus: int, modules: Sequence[Path] = ()) -> Iterator[None]:
    """Ray's session (`cluster.ray_session`) for a search that will certainly train, begun before it knows what."""
    # Nothing that imports Ray is loaded there: two threads in the middle of one package see each other's halves.
    with importing_beside(_load):
        from tune_cac.ray_backend.session import ray_session

        with ray_session(cpus=cpus, modules=modules):
            yield


def _load() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - whoever needs it says what is wrong with it
            return
