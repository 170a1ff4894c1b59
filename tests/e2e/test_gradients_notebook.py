"""The notebooks of docs/gradients.md and the page's code: they run, and what they show is right."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "gradients.ipynb"
VARIANCE = ROOT / "docs" / "gradient_variance.ipynb"
PAGE = (ROOT / "docs" / "gradients.md").read_text()
#: Appended to the notebook: what it has in its variables, as one line of JSON.
TELL = """
import json
print(json.dumps({
    "errors": errors,
    "epsilons": list(central_difference.EPSILONS),
    "values": [decaying.values[0], decaying.at(first)[0], decaying.values[-1]],
    "steps": {f"{a} {e}": [s.found.loss_before, s.found.loss_after, s.discrete[0]] for (a, e), s in steps.items()},
    "won": {" ".join(key): [list(each), any_n] for key, (each, any_n, held) in won.items()},
    "trained": trained,
}))
"""


TELL_VARIANCE = """
import json
print(json.dumps({
    "relative": {name: variance_study.curves(runs[0], name)[2] for (_, name), runs in studied.items()},
    "sizes": [cluster.size for cluster in clusters],
    "backward": [rows[-1]["backward_flops"] for rows in zeros.values()],
    "shares": shares,
}))
"""


@pytest.mark.parametrize(("notebook", "pictures"), [(NOTEBOOK, 6), (VARIANCE, 4)])
def test_it_is_committed_executed_from_top_to_bottom_without_errors_or_paths(notebook: Path, pictures: int) -> None:
    text = notebook.read_text()
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= pictures
    sources = "\n".join(cell.source for cell in book.cells)
    printed = "\n".join(output.get("text", "") for output in outputs)
    assert not re.search(r"/(home|root|tmp|work|Users|opt)/", sources + printed)
    assert len(text) < 700_000


def executed(notebook: Path, tell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a notebook small, and return what it tells at its end."""
    monkeypatch.setenv("TUNE_CAC_QUICK", "1")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    write_kernel_spec(tmp_path / "kernels" / "python3")
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    book = nbformat.read(notebook, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell(tell))
    NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / "docs")}}
    ).execute()
    return json.loads(book.cells[-1].outputs[0]["text"])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_one_on_variance_runs_small_and_what_it_shows_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = executed(VARIANCE, TELL_VARIANCE, tmp_path, monkeypatch)
    assert all(value == 1 for value in told["relative"]["sgd"])  # measured twice on the same draws
    assert set(told["relative"]) == {"sgd", "svrg", "gradient_clustering", "importance_sampling"}
    assert sum(told["sizes"]) == 599
    plain, *others = told["backward"]
    assert all(value <= plain for value in others)
    assert all(0 < share <= 1 for values in told["shares"].values() for share in values)


@pytest.mark.thorough
@pytest.mark.slow
def test_it_runs_small_and_what_it_shows_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = executed(NOTEBOOK, TELL, tmp_path, monkeypatch)
    smooth = dict(zip(told["epsilons"], told["errors"]["smooth float64"], strict=True))
    assert smooth[1e-2] / smooth[1e-1] == pytest.approx(1e-2, rel=0.1)  # of second order
    assert smooth[1e-4] < 1e-6
    start, stuck, end = told["values"]
    assert start > 100 * stuck > 100 * end
    for before, after, decrease in told["steps"].values():
        assert after < before
        assert decrease == pytest.approx(before - after, rel=1e-3)
    assert set(told["won"]) == {
        f"{state} {name}" for state in ("raw", "pretrained") for name in ("stochastic rounding", "plain + noise of 0.1")
    }
    assert all(any_n >= max(each) for each, any_n in told["won"].values())
    assert all(0 <= value <= 1 for values in told["trained"].values() for value in values)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "gradients.md", "exec"), names)  # our own page
    error, found, passes, measured = capsys.readouterr().out.splitlines()
    assert float(error) < 0.05
    count, taken, before, after = found.split()
    assert int(count) >= int(taken) > 0
    assert float(after) < float(before)
    assert passes == "9 4"
    assert measured.startswith("GradientMoments(mean=")
