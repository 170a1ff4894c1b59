"""The end of a search whose Ray head is gone: one sentence, where Ray would end the process with its own message."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from tune_cac.messages import say

#: Seconds without an answer after which the head is gone. Ray itself ends the process after 60; a head whose state was
#: kept in Redis may be back before.
GONE_S = 30.0
_LOOK_S, _ANSWER_S = 2.0, 2.0
#: Exit code of a search that ends so.
EXIT_CODE = 1


@contextmanager
def ends_with_head(go_on: str) -> Iterator[None]:
    """End this process if Ray's head does not answer any more while the block runs.

    Nothing can be asked of Ray then, and its calls wait in C where no exception reaches them, so the process ends at
    once. Finished trials are in the journal; a line that was being written is mended when the search goes on.

    Args:
        go_on: the command that continues.
    """
    done = threading.Event()
    address = ray.get_runtime_context().gcs_address
    threading.Thread(target=_watch, args=(address, go_on, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(address: str, go_on: str, done: threading.Event) -> None:
    host, _, port = address.rpartition(":")
    answered = time.monotonic()
    while not done.wait(_LOOK_S):
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
            answered = time.monotonic()
        if time.monotonic() - answered > GONE_S and not done.is_set():
            say(
                f"the Ray cluster at {address} does not answer any more: finished trials are kept; on this machine or "
                f"another cluster go on with: {go_on}"
            )
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(EXIT_CODE)
