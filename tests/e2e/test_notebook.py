"""docs/analysis.ipynb: committed without outputs, runs from top to bottom, and what it shows is right."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

from analysis.metrics.accounting import SearchCost

NOTEBOOK = Path(__file__).parents[2] / "docs" / "analysis.ipynb"
#: Appended to the notebook: what it has in its variables, as one line of JSON.
TELL = """
import json
print(json.dumps({
    "study": str(study),
    "ranking": ranking["trial"].tolist(),
    "front": front["trial"].tolist(),
    "line": line[["epochs", "accuracy"]].values.tolist(),
    "beats": {int(t): None if pd.isna(b) else b for t, b in zip(ranking["trial"], beats)},
    "epochs": epochs.groupby("trial")["accuracy"].last().to_dict(),
    "confirmed": table.set_index("candidate")["confirmed"].to_dict(),
    "exact": replayed.loc[replayed["exact"], ["stops", "accuracy"]].values.tolist(),
}))
"""


def test_it_is_committed_without_outputs() -> None:
    text = NOTEBOOK.read_text()
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata == {} for cell in book.cells)
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert not re.search(r"/(home|root|tmp|work|Users|opt)/", text)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbformat.NotebookNode]:
    """The notebook after it ran in an empty folder, in a kernel of this Python."""
    folder = tmp_path_factory.mktemp("notebook")
    write_kernel_spec(folder / "kernels" / "python3")  # one of the user's own could be another Python's
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell(TELL))
    (folder / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        NotebookClient(
            book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder / "empty")}}
        ).execute()  # raises where a cell does
    assert list((folder / "empty").iterdir()) == []
    yield book
    shutil.rmtree(Path(told(book)["study"]).parent)


def told(book: nbformat.NotebookNode) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(book.cells[-1].outputs[0].text)
    return found


def shown(book: nbformat.NotebookNode, source: str) -> dict[str, Any]:
    """What the one cell with this in its source shows, by kind."""
    (cell,) = [cell for cell in book.cells[:-1] if cell.cell_type == "code" and source in cell.source]
    found = [output.data for output in cell.outputs if output.output_type in ("execute_result", "display_data")]
    return dict(found[-1])


@pytest.mark.thorough
@pytest.mark.slow
def test_what_it_shows_is_right(executed: nbformat.NotebookNode) -> None:
    said = told(executed)
    trials = pd.read_parquet(Path(said["study"]) / "trials.parquet").set_index("trial")
    assert (trials["status"] == "completed").all()
    counted = trials[trials["role"] != "control"]
    assert len(counted) == 24
    base = trials["accuracy"][0]
    points = list(zip(counted.index, counted["accuracy"], counted["compute_saved"], strict=True))

    within = {trial: saved for trial, accuracy, saved in points if base - accuracy <= 0.005 + 1e-9}
    first = said["ranking"][0]
    assert first in within
    assert within[first] == max(within.values())
    assert sorted(said["ranking"]) == sorted(counted.index)

    front = [
        (trial, a, s)
        for trial, a, s in points
        if not any((x >= a and y >= s) and (x > a or y > s) for _, x, y in points)
    ]
    assert sorted(said["front"]) == sorted(trial for trial, *_ in front)

    shorter = trials[trials["control"] == "shorter"].sort_values("epochs", ascending=False)
    assert shorter["epochs"].tolist() == [13, 12, 10, 9, 7]  # 90 to 50 % of 15
    assert said["line"] == [[15, base], *([row.epochs, row.accuracy] for row in shorter.itertuples())]
    assert set(said["beats"].values()) <= {"ahead", "behind", "alike", None}
    for trial, accuracy, saved in points:
        if any(row.compute_saved >= saved and row.accuracy >= accuracy for row in shorter.itertuples()):
            assert said["beats"][str(trial)] != "yes"  # a shorter run saves as much and is as accurate

    assert {int(t): a for t, a in said["epochs"].items()} == trials["accuracy"].to_dict()
    for stops, accuracy in said["exact"]:
        assert stops > 0 or accuracy == base


@pytest.mark.thorough
@pytest.mark.slow
def test_cells_show_what_they_announce(executed: nbformat.NotebookNode) -> None:
    for picture in ('label="front"', "curves.plot("):
        assert "image/png" in shown(executed, picture)
    study = Path(told(executed)["study"])
    headline = ast.literal_eval(shown(executed, "found.headline")["text/plain"])
    assert f"\n{headline}\n" in (study / "report.md").read_text()
    trials = pd.read_parquet(study / "trials.parquet")
    cost = eval(shown(executed, "search_cost(trials)")["text/plain"], {"SearchCost": SearchCost})
    assert cost.trials == len(trials)
    assert cost.search_flops == trials["search_flops"].sum()
    assert cost.dense_equivalents == pytest.approx(cost.search_flops / trials["dense_flops"].max())
    assert cost.dense_equivalents < cost.own_equivalents
    assert told(executed)["confirmed"] == {"17": True, "4": False}  # 1 of 599 lost on average, and 5.5
    assert re.search(r"high=0\.0045\d+, confidence=0\.95, n=4", shown(executed, "paired_interval(")["text/plain"])
