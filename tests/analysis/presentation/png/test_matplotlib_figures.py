"""PNG of the plots: files that hold pictures, and a process left as it was."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_data import report_data

from analysis.presentation.figures.report_figures import report_figures
from analysis.presentation.html import write_pngs
from analysis.presentation.png import matplotlib_figures
from trainables.errors import UserError


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matplotlib_figures, "DPI", 60)


@pytest.mark.slow
def test_every_plot_of_the_page_is_a_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    data = report_data(30)
    files = write_pngs(data, tmp_path / "new" / "folder")
    assert [file.stem for file in files] == list(report_figures(data))
    for file in files:
        pixels = np.asarray(imread(file))[:, :, :3]
        height, width = pixels.shape[:2]
        assert width == round(6.4 * 60)
        assert height > 60
        inked = (pixels < 0.9).any(axis=2)
        assert 0.01 < inked.mean() < 0.9, file.name
        assert not inked[:, 0].any()  # nothing is cut off at the edges
        assert not inked[:, -1].any()
        assert not inked[0].any()
        assert not inked[-1].any()


def test_a_picture_has_the_values_and_the_legend_of_its_figure() -> None:
    from matplotlib.figure import Figure

    for name, figure in report_figures(report_data(30)).items():
        axes = Figure().add_subplot()
        matplotlib_figures._draw(axes, figure)
        lines = {(*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines()}
        marks = {tuple(place) for group in axes.collections if hasattr(group, "get_sizes")
                 for place in group.get_offsets().tolist()}  # fmt: skip
        bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
        for trace in figure.traces:
            if trace["type"] == "bar":
                assert set(zip(trace.get("base", [0] * len(trace["x"])), trace["x"], strict=True)) <= set(bars), name
            elif trace["x"] != [None]:
                assert (*trace["x"], *trace["y"]) in lines or set(zip(trace["x"], trace["y"], strict=True)) <= marks
        assert len(bars) == sum(len(trace["x"]) for trace in figure.traces if trace["type"] == "bar")
        shown = [trace["name"] for trace in figure.traces if trace.get("showlegend", True)]
        legend = axes.get_legend()
        assert sorted(shown) == sorted([] if legend is None else [text.get_text() for text in legend.get_texts()])
        assert axes.get_xlabel() == figure.layout["xaxis"]["title"]["text"]
        if "range" in figure.layout["yaxis"]:
            assert list(axes.get_ylim()) == pytest.approx(figure.layout["yaxis"]["range"])


@pytest.mark.slow
def test_only_what_there_is(tmp_path: Path) -> None:
    data = report_data(8)
    bare = replace(data, history=None, importance=None, interactions=None, confirmation=None, variance=None)
    names = [file.stem for file in write_pngs(bare, tmp_path)]
    assert names == ["pareto", "timeline", "convergence", "hypervolume", "cost"]


@pytest.mark.slow
def test_a_name_with_dollar_signs_is_no_mathematics(tmp_path: Path) -> None:
    data = report_data(8)
    assert data.variance is not None
    odd = data.variance.assign(layer=r"$\undefined{$")
    bare = replace(data, variance=odd, history=None, importance=None, interactions=None, confirmation=None)
    assert (tmp_path / "variance.png") in write_pngs(bare, tmp_path)


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the plots cannot be written to .*file: .*; give another folder"):
        write_pngs(report_data(3), tmp_path / "file")


def test_no_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"needs matplotlib, which is not installed: pip install"):
        write_pngs(report_data(3), tmp_path)


@pytest.mark.slow
def test_no_global_state_is_touched(tmp_path: Path) -> None:
    """Neither pyplot nor a backend: whoever draws in the same process draws on as before."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(matplotlib_figures.__file__).parents[3] / "tests" / "support")!r})
import matplotlib
def settings():  # asking for the backend chooses one
    return {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}
before = settings()
from pathlib import Path
from dataclasses import replace
from report_data import report_data
from analysis.presentation.html import write_pngs
data = report_data(5)
write_pngs(replace(data, history=None, importance=None, interactions=None, confirmation=None), Path({str(tmp_path)!r}))
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
