"""Lines of a process that failed, told apart from those that torchrun and accelerate print about its failure."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: First line of a launcher's report, logged by torch's elastic agent: "E1123 05:31:40.446000 29506 torch/...".
_REPORT = re.compile(r"[A-Z]\d{4} [\d:.]+ .*torch/distributed/elastic/")
_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*: (\d+)", re.DOTALL)


def lines_of_failed_process(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of a log that the process printed which failed first; all lines if no launcher reported it.

    Others fail after it, with errors about the connection. torch writes the rank before each line of an exception as
    soon as the processes are connected; without it, the lines of all processes are returned.
    """
    end = next((number for number, line in enumerate(lines) if _REPORT.match(line)), None)
    found = _ROOT_CAUSE.search("\n".join(lines[end:])) if end is not None else None
    if found is None:
        return lines
    printed = lines[:end]
    return [line for line in printed if line.startswith(f"[rank{found[1]}]:")] or printed
