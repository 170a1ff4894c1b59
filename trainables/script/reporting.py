"""`tune_cac.report` for users' scripts: one line of metrics that a search reads."""

from __future__ import annotations

import os
import sys
from typing import Any

from trainables.gradskip.script_counting.trace_file import TRIAL_FOLDER
from trainables.script.report_lines import REPORTS_FILE, format_report


def report(*, accuracy: Any = None, step: Any = None, **metrics: Any) -> None:
    """Report metrics of the training to a search; outside of a search it prints the same line.

    In a search the line goes into a file of the trial, so that nothing else that is printed can spoil it, and is
    printed with a word before it. Where that file is not there, as in a container, it is printed as outside.

    The report includes what the gradient-skip optimizers have counted. Of several processes that train together
    (torch.distributed, or a launcher that sets RANK and WORLD_SIZE) only the first one reports, for all: its FLOPs and
    bytes times the number of processes, whose shares of the data are equal.

    Args:
        accuracy: higher is better, 1 at most; on data that is not used for training. A search of another metric
            (``--metric val_loss``) needs that one instead: ``report(val_loss=...)``.
        step: optimizer steps so far, where no gradient-skip optimizer counts them.
        metrics: any other metrics, numbers; of a meaning of their own: ``loss``, ``epoch``, ``test_accuracy`` (read
            once, at the end), ``train_time_s``, ``compute_saved`` or ``executed_flops`` where no gradient-skip
            optimizer counts them.
    """
    values: dict[str, Any] = {} if accuracy is None else {"accuracy": accuracy}
    if step is not None:
        values["step"] = step
    values.update(metrics)
    rank, processes = _rank_and_processes()
    if rank != 0:
        return
    if "trainables.gradskip.script_counting.process_record" in sys.modules:
        from trainables.gradskip.script_counting.process_record import process_summary

        counted = process_summary(processes)
        if counted is not None:
            values["gradskip"] = counted
    line = format_report(**values)
    print(f"tune_cac.report: {line}" if _put_in_file(line) else line, flush=True)


def _put_in_file(line: str) -> bool:
    """Append a line to the trial's file of reports; return whether there is one."""
    folder = os.environ.get(TRIAL_FOLDER)
    if not folder:
        return False
    try:
        file = os.open(os.path.join(folder, REPORTS_FILE), os.O_WRONLY | os.O_APPEND)  # never made here
        try:
            data = f"{line}\n".encode()
            return os.write(file, data) == len(data)
        finally:
            os.close(file)
    except OSError:
        return False


def _rank_and_processes() -> tuple[int, int]:
    """Return this process's rank and the number of processes that train together, as torch or the launcher says."""
    if "torch" in sys.modules:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # torchrun's and accelerate's, before the process group is made and after it is destroyed
    rank, processes = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(processes)) if rank.isdigit() and processes.isdigit() else (0, 1)
