"""Run a script until its first optimizer step, before a search begins: what cannot run is told at once."""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from pathlib import Path

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.script_counting.trace_file import FIRST_STEP_VARIABLE
from trainables.script.report_lines import ReportError, read_report
from trainables.script.run import files_below, last_lines_of_failed_process, start_script, working_directory

#: Seconds after which a script that has not failed is taken to run, and between two looks at it.
LONGEST_S, _LOOK_S = 30.0, 0.05
_SHOWN_LINES = 10


def check_starts(config: TrialConfig, *, longest_s: float = LONGEST_S) -> None:
    """Run the baseline's script until its first optimizer step, first report, end, or for some seconds; then end it.

    Raises:
        UserError: it ended with an error, or without a step and a report.
    """
    with tempfile.TemporaryDirectory(prefix="tune_cac-") as folder:
        here = Path(folder)
        stepped, begun_s = here / "first-step", time.time()
        process = start_script(config, here, {FIRST_STEP_VARIABLE: str(stepped)})
        reported = threading.Event()

        def read() -> None:
            for line in process.lines():
                try:
                    found = read_report(line, config.quality.name)
                except ReportError:
                    found = {}  # its trial says what is wrong
                if found is not None:
                    return reported.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        until = time.monotonic() + longest_s
        while reader.is_alive() and not stepped.exists() and time.monotonic() < until:
            reader.join(_LOOK_S)
        runs = reported.is_set() or stepped.exists() or reader.is_alive()
        printed = [line for line in last_lines_of_failed_process(process) if line.strip()]
        process.close(grace_s=0)
        reader.join()
        cwd = working_directory(config)
        left = sorted(str(path.relative_to(cwd)) for changed_s, path in files_below(cwd, here) if changed_s >= begun_s)
        if reported.is_set() and left:
            warnings.warn(
                f"the script was run until its first report to see that it runs, which left {', '.join(left[:4])} in "
                f"{cwd}: if it goes on from there, remove it and put {{trial_dir}} into the command",
                stacklevel=3,
            )
        if not runs:
            code = process.returncode
            how = f"with exit code {code}" if code else "without an optimizer step or a report"
            last = "".join(f"\n  {line}" for line in printed[-_SHOWN_LINES:]) or " it printed nothing"
            raise UserError(f"--script must train, it ended {how}; its last lines:{last}")
