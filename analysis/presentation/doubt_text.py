"""Doubts about a study's baseline that its answer must not hide. Pure: frames in, text out."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import plural
from analysis.io.checked import number_of, numbers_of
from analysis.metrics.baseline import baseline_of
from analysis.metrics.quality import quality_of
from analysis.quality_words import value_text
from trainables.quality import allowed_amount

#: How many times the allowed drop a trial may be better than the baseline before it is doubted.
_TIMES_ALLOWED = 10


def doubt(ranking: pd.DataFrame, best: pd.Series, allowed_drop: float | str) -> str:
    """Return a sentence if the baseline seems not to have reported its end; empty otherwise.

    Args:
        ranking: from `analysis.rank`.
        best: the recommended trial.
        allowed_drop: allowed drop of the metric, as for `analysis.rank`.
    """
    baseline, quality = baseline_of(ranking, best), quality_of(ranking)
    alike = ranking[numbers_of(ranking, "epochs") == number_of(baseline, "epochs")]
    most, own = numbers_of(alike, "epoch").max(), number_of(baseline, "epoch")
    if most > own:  # neither is where one of them is not known
        return (
            f"Doubtful: the baseline reported {plural(int(own), 'epoch')} and other trials {int(most)}, so its last "
            "report was lost or it ended early."
        )
    allowed = float(allowed_amount(allowed_drop, baseline[quality.name]))
    if 0 < _TIMES_ALLOWED * allowed < -best[quality.drop]:
        return (
            f"Doubtful: so much better than the baseline's {value_text(baseline[quality.name], quality)} that the "
            "baseline may not have reported its last epoch, or not have trained as the others did."
        )
    return ""
