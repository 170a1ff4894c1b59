"""A command of tune_cac whose disk is full after so many appends to the journal.

    python full_disk_search.py APPENDS ARGUMENTS...

The first append that fails leaves half of its line, as a full disk does.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

from optuna.storages.journal import JournalFileBackend

from tune_cac.cli.main import main


def fill_up(appends: int) -> None:
    real, left = JournalFileBackend.append_logs, [appends]

    def append_logs(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        left[0] -= 1
        if left[0] == -1:
            text = json.dumps(logs[0], separators=(",", ":"))
            with open(self._file_path, "a") as file:
                file.write(text[: len(text) // 2])
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, logs)

    JournalFileBackend.append_logs = append_logs  # type: ignore[method-assign]


if __name__ == "__main__":
    fill_up(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
