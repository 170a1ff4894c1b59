"""`tune_cac.report` for users' scripts: prints one line of metrics that a search reads."""

from __future__ import annotations

import sys
from typing import Any

from trainables.script.report_lines import format_report


def report(*, accuracy: Any = None, step: Any = None, **metrics: Any) -> None:
    """Report metrics of the training to a search; outside of a search it prints the same line.

    The report includes what the gradient-skip optimizers of this process have counted. Of several processes that train
    together (torch.distributed) only the first one reports.

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
    if "torch" in sys.modules:  # a script without torch has no optimizer of ours either
        import torch

        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
            return
        if "trainables.gradskip.script_counting.process_record" in sys.modules:
            from trainables.gradskip.script_counting.process_record import process_summary

            counted = process_summary()
            if counted is not None:
                values["gradskip"] = counted
    print(format_report(**values), flush=True)
