"""Parallel start of a search: Ray's processes start while this process loads torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tune_cac.interrupts import importing_beside

#: Modules needed to inspect the model and to learn from the baseline; an optimizer loads torch's compiler.
_NEEDED = ("torch", "torch._dynamo")


@contextmanager
def early_session(*, cpus: int, modules: Sequence[Path] = (), address: str | None = None) -> Iterator[None]:
    """Start a `session.ray_session` for a search that is certain to train, before its trials are known."""
    # The thread loads nothing that imports Ray: two threads that import one package see it half initialized.
    with importing_beside(_load):
        from tune_cac.ray_backend.session import ray_session

        with ray_session(cpus=cpus, modules=modules, address=address):
            yield


def _load() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - whoever needs it says what is wrong with it
            return
