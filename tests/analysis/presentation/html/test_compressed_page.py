"""The page of a study that compresses: what it is about, what is zero, and nothing of a study as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from compressed import SENSITIVITIES, pruned, write_compressed

from analysis.metrics.ranking import SHORTER
from analysis.presentation.figures.outcomes import confirmation, pareto
from analysis.presentation.figures.report_figures import convergence
from analysis.presentation.html import ReportData, report_html
from analysis.presentation.html.page import trial_table
from trainables.config import TrialConfig
from tune_cac.cli.report import gather
from tune_cac.study.study_result import answer

MARKED = "version: 1\npruners: {one: {class: SparsityLevelParameterPruner, levels: {fc.weight: !search {low: 0.1, "
MARKED += "high: 0.9}}}}\npolicies: [{pruner: {instance_name: one}, epochs: [2]}]\n"
TRIALS = [
    (0.968, 0.5, 0.1), (0.966, 0.7, 0.0), (0.95, 0.9, 0.2), (0.969, 0.2, 0.3), (0.967, 0.6, 0.0),
]  # fmt: skip


def page_data(folder: Path, *, saving: str = "inference", **config: Any) -> ReportData:
    """A study as the command report gathers it, with a shorter training that is no rival."""
    shorter = pruned(0.97, 0.0, 0.5, saving=saving, method="none") | {"role": "control", "control": SHORTER}
    trials = [
        pruned(*outcome, saving=saving, **(config or {"pruning_sensitivities": SENSITIVITIES}), threads=place)
        for place, outcome in enumerate(TRIALS, start=1)
    ]
    layout = write_compressed(folder, [*trials, shorter], saving=saving)
    return gather(layout, answer(layout, allowed_drop=0.005))


def cells(html: str, caption: str) -> list[list[str]]:
    """Texts of a table's rows."""
    (table,) = re.findall(rf"<caption>{caption}</caption>(.*?)</table>", html, flags=re.DOTALL)
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    return page_data(tmp_path_factory.mktemp("page") / "s")


def test_sums_and_layers_of_the_best(data: ReportData) -> None:
    html = report_html(data)
    assert cells(html, "Sparsity by layer of the chosen trial 2") == [
        ["conv1.weight", "40.0 %"], ["conv2.weight", "20.0 %"], ["fc.weight", "0.0 %"],
    ]  # fmt: skip
    assert "<dt>MACs of the weights that are not zero</dt><dd>300,000</dd>" in html
    assert data.best is not None
    unmeasured = data.best.copy()
    unmeasured["layer_sparsity"] = "{}"
    assert "Sparsity by layer" not in report_html(replace(data, best=unmeasured))


def test_pictures_are_drawn_over_what_the_study_ranks_by(data: ReportData) -> None:
    found = pareto(data)
    assert found is not None
    traces = {trace["name"]: trace for trace in found.traces}
    assert found.alt.startswith("Inference compute saved against validation accuracy of 5 searched trials.")
    assert sorted(zip(traces["trials"]["x"], traces["trials"]["y"], strict=True)) == sorted(
        (100 * inference, pytest.approx(100 * accuracy)) for accuracy, inference, _ in TRIALS
    )
    assert (traces["chosen"]["x"], traces["Pareto front"]["x"]) == ([70], [0, 20, 50, 60, 70, 90])
    assert not {"cut dense runs", "random stops"} & set(traces)  # rivals of training compute alone
    assert "inference compute saved 70.0 %" in traces["chosen"]["hovertext"][0]
    course = convergence(data)
    assert course is not None
    assert course.traces[-1]["y"] == [0, 50, 70, 70, 70, 70]
    frame = pd.DataFrame(
        {"candidate": [2], "seeds": [5], "compute_saved": [0.1], "saved": [0.66], "accuracy_drop": [0.001],
         "drop_low": [-0.002], "drop_high": [0.004], "confidence": [0.95], "confirmed": [True]}
    )  # fmt: skip
    retrained = replace(data, confirmation=frame)
    drawn = confirmation(retrained)
    assert drawn is not None
    assert "inference compute saved 66.0 %" in drawn.traces[0]["hovertext"][0]
    html = report_html(retrained)
    assert cells(html, "Candidates retrained on fresh seeds")[0][2] == "66.0 %"
    assert "<dt>inference compute saved</dt><dd><strong>66.0 %</strong>" in html
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', html)[0])
    axes = {name: figure["layout"]["xaxis"]["title"]["text"] for name, figure in figures.items()}
    assert axes["pareto"] == "inference compute saved (%)"
    assert figures["convergence"]["layout"]["yaxis"]["title"]["text"] == "inference compute saved (%)"


def test_the_table_of_all_trials_has_both_savings(data: ReportData) -> None:
    table = trial_table(data)
    labels = [column["label"] for column in table["columns"]]
    place = {column["key"]: labels.index(column["label"]) for column in table["columns"]}
    assert labels[6:11] == ["saved %", "inference %", "sparsity %", "structured %", "training %"]
    assert [table["rows"][n][place["saved"]] for n in range(1, 6)] == [100 * i for _, i, _ in TRIALS]
    assert [table["rows"][n][place["compute_saved"]] for n in range(1, 6)] == [100 * t for *_, t in TRIALS]
    assert "beats_shorter" not in place
    assert "latency_s" not in place
    assert len(labels) == len(set(labels))


def test_a_schedule_config_is_what_the_page_was_made_of(tmp_path: Path) -> None:
    data = page_data(tmp_path / "s", pruning_sensitivities=("a.weight=0",))
    assert data.best is not None
    assert TrialConfig(method="compression", pruning_sensitivities=("a.weight=0",)).compresses
    assert "compresses:" not in report_html(data)  # for it prunes nothing, and there is no best.yaml
