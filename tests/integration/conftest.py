"""One Ray for the searches of a file, and a cluster of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import two_nodes as two_nodes_script
from object_storage import CREDENTIALS
from object_storage import s3 as s3
from object_storage import s3_environment as s3_environment
from one_ray import one_ray as one_ray


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with a processor each."""
    process = subprocess.Popen(
        [sys.executable, two_nodes_script.__file__],
        env={**os.environ, **CREDENTIALS, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        # Ray may print of its own before.
        yield next(line.strip() for line in process.stdout if re.fullmatch(r"[0-9.]+:[0-9]+\n", line))
    finally:
        process.communicate(timeout=60)
