"""Files that are whole or absent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from thorough import rest_thorough

from trainables.storage import atomic_write


def test_nobody_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert {name[:6] for name in os.listdir(tmp_path)} == {"file", ".file."}  # beside it: one file system
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_block_that_fails_changes_nothing(tmp_path: Path, before: bytes | None, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(error), atomic_write(path) as file:  # noqa: PT012
        file.write(b"new")
        raise error
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == (
        {} if before is None else {"file": before}
    )


WRITERS = {
    "bytes": "file.write(bytes(1_000_000))",
    "torch": "import torch; torch.save(torch.ones(1_000_000), file)",
    "parquet": "pq.write_table(pa.table({'x': np.random.default_rng(0).random(1_000_000)}), file)",
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", rest_thorough(WRITERS))
def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(tmp_path: Path, writer: str) -> None:
    """The size limit stands for a full disk: the file system refuses in the middle of the file."""
    (tmp_path / "file").write_bytes(b"old")
    code = f"""
        import errno, resource, sys
        import numpy as np, pyarrow as pa, pyarrow.parquet as pq
        from pathlib import Path
        from trainables.storage import atomic_write
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with atomic_write(Path(sys.argv[1])) as file:
                {WRITERS[writer]}
        except (OSError, RuntimeError) as error:
            disks = error if isinstance(error, OSError) else error.__context__  # torch's writer raises its own
            print(disks.errno)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EFBIG}\n"
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
