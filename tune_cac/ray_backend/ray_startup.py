"""Parallel start of a search: Ray's processes start while this process loads torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tune_cac.interrupts import importing_beside

#: Needed to learn from the baseline.
TORCH = "torch"
#: What an optimizer loads: needed to inspect a model, which a search of a script does not do.
COMPILER = "torch._dynamo"


@contextmanager
def early_session(
    needed: Sequence[str], *, cpus: int, modules: Sequence[Path] = (), address: str | None = None
) -> Iterator[None]:
    """Start a `session.ray_session` for a search that is certain to train, before its trials are known.

    Args:
        needed: modules that the search needs in this process, loaded meanwhile in this order.
        cpus: as for `session.ray_session`, like the other arguments.
        modules: the user's own.
        address: of a cluster.
    """
    # The thread loads nothing that imports Ray: two threads that import one package see it half initialized.
    with importing_beside(lambda: _load(needed)):
        from tune_cac.ray_backend.session import ray_session

        with ray_session(cpus=cpus, modules=modules, address=address):
            yield


def _load(needed: Sequence[str]) -> None:
    for name in needed:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - whoever needs it says what is wrong with it
            return
