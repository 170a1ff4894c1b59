"""Studies side by side, against brute force and areas worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest
from studies import result_row, write_study

from analysis.io.layout import Layout
from analysis.presentation.figures.comparison import fronts
from analysis.presentation.html import figure_html
from analysis.presentation.study_comparison import compare, comparison_line, comparison_table, joint_front_table
from trainables.errors import UserError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Accuracy of every baseline here, a fraction that is not exact in binary.
BASELINE = 580 / 599
#: Outcomes: drop in 1/599 of accuracy, compute saved.
Outcomes = Sequence[tuple[int, float]]


def study(folder: Path, outcomes: Outcomes, *, more: Sequence[dict[str, Any]] = (), **info: Any) -> Path:
    """A study whose baseline has `BASELINE` and whose trials dropped by so many of 599 and saved so much."""
    rows = [{"row": result_row((580 - drop) / 599, saved)} for drop, saved in outcomes]
    layout = write_study(folder, [{"row": result_row(BASELINE)}, *rows, *more])
    layout.write_info(replace(layout.read_info(), **info))
    return folder


def test_two_studies_by_hand(tmp_path: Path) -> None:
    one = study(tmp_path / "one", [(0, 0.2), (3, 0.4), (3, 0.3), (6, 0.5)], more=[{"error": "it broke"}])
    other = study(tmp_path / "other", [(0, 0.3), (3, 0.4), (1, 0.1)], space="manual_layers")
    found = compare([one, other], allowed_drop=3 / 599)
    first, second = found.studies.to_dict("records")
    assert (first["study"], first["space"]) == ("one", "auto_thresholds")
    assert (second["study"], second["space"]) == ("other", "manual_layers")
    assert (first["trials"], first["failed"], second["trials"], second["failed"]) == (6, 1, 4, 0)
    assert (first["front_size"], second["front_size"]) == (3, 2)
    # Steps of the attainable saving over the drop, from no drop to five points.
    step = 3 / 599
    assert first["hypervolume"] == pytest.approx(0.2 * 0.05 + 0.2 * (0.05 - step) + 0.1 * (0.05 - 2 * step))
    assert second["hypervolume"] == pytest.approx(0.3 * 0.05 + 0.1 * (0.05 - step))
    assert (first["best_trial"], first["compute_saved"]) == (2, 0.4)  # exactly the allowed drop
    assert first["accuracy_drop"] == pytest.approx(step)
    # Joint: (0, .3) of the other, (3, .4) of both, (6, .5) of the one.
    assert first["share_of_joint_front"] == pytest.approx(2 / 3)
    assert second["share_of_joint_front"] == pytest.approx(2 / 3)
    joint = found.joint_front
    assert list(zip(joint["study"], joint["trial"], strict=True)) == [
        ("one", 4), ("one", 2), ("other", 2), ("other", 1)
    ]  # fmt: skip
    assert list(joint["compute_saved"]) == [0.5, 0.4, 0.4, 0.3]
    assert found.notes == ()


def test_what_is_no_find_is_on_no_front(tmp_path: Path) -> None:
    control = {"role": "control", "row": result_row(BASELINE, 0.9)}
    useless = [(0, 0.0), (0, -0.2), (-5, -0.1), (30, 0.6)]  # nothing saved, or as much lost as the reference
    found = compare([study(tmp_path / "a", useless, more=[control]), study(tmp_path / "b", [(1, 0.1)])])
    first, second = found.studies.to_dict("records")
    assert (first["front_size"], first["hypervolume"], first["share_of_joint_front"]) == (0, 0.0, 0.0)
    assert found.studies["best_trial"].isna().tolist() == [True, False]
    assert np.isnan(first["compute_saved"])
    assert second["share_of_joint_front"] == 1.0
    assert len(found.candidates) == 5


def test_equal_outcomes_of_two_seeds_are_equal(tmp_path: Path) -> None:
    """583/599 - 580/599 is not 580/599 - 577/599 in binary."""
    one = study(tmp_path / "one", [(3, 0.4)])
    rows = [{"row": result_row(583 / 599)}, {"row": result_row(580 / 599, 0.4)}]
    for row in rows:
        row["config"] = {"workload": "digits", "epochs": 30, "seed": 1, "method": "none"}
    other = write_study(tmp_path / "other", rows)
    other.write_info(replace(other.read_info(), seed=1))
    found = compare([one, other.root])
    assert list(found.studies["share_of_joint_front"]) == [1.0, 1.0]
    assert found.studies["hypervolume"].nunique() == 1
    assert found.notes == ("Seeds differ (one: 0, other: 1): each accuracy loss is from the baseline of its own seed.",)


def test_what_makes_studies_less_comparable_is_noted(tmp_path: Path) -> None:
    plain = study(tmp_path / "plain", [(0, 0.2)], versions={"torch": "2.12", "ray": "2"})
    held = study(tmp_path / "held", [(0, 0.1)], versions={"torch": "2.13", "ray": "2"}, hold={"CAC_VAR_SAMPLES": 5})
    assert compare([plain, held]).notes == (
        "Fixed values differ (plain: none, held: CAC_VAR_SAMPLES=5).",
        "Versions of torch differ (plain: 2.12, held: 2.13).",
    )
    better = write_study(tmp_path / "better", [{"row": result_row(0.99)}])
    failed = write_study(tmp_path / "failed", [{"error": "it broke"}, {"row": result_row(0.9, 0.5)}])
    assert compare([study(tmp_path / "s", [(0, 0.2)]), better.root, failed.root]).notes == (
        "better has no completed trial beside the baseline.",
        "failed has no completed baseline, so no accuracy loss can be stated and none of its trials is compared.",
        "Baselines of the same seed differ in accuracy (s: 0.9683, better: 0.9900): they were not trained alike.",
    )


def test_studies_without_anything_give_empty_tables(tmp_path: Path) -> None:
    found = compare([write_study(tmp_path / name, []).root for name in ("a", "b")])
    assert len(found.joint_front) == len(found.candidates) == 0
    assert found.studies["share_of_joint_front"].isna().all()
    assert comparison_table(found)[1] == ["a", "auto_thresholds", "0", "0", "0", "0.00000", "-", "-", "-", "0.0", "-"]
    assert joint_front_table(found) == [["study", "trial", "saved", "accuracy loss", "accuracy", "configuration"]]
    assert (
        comparison_line(found)
        == "No study has a setting that saves compute within the allowed accuracy loss of 0.50 points."
    )
    assert [trace["name"] for trace in fronts(found).traces if trace["x"]] == ["baseline"]


def test_the_sentence(tmp_path: Path) -> None:
    one, two = study(tmp_path / "one", [(0, 0.2)]), study(tmp_path / "two", [(1, 0.4)])
    three = study(tmp_path / "three", [(2, 0.4)])
    within = "within the allowed accuracy loss of 0.50 points"
    assert comparison_line(compare([one, two])) == (
        f"two saves most {within}: 40.0 % of the training compute; 20.0 % (one)."
    )
    assert (
        comparison_line(compare([two, three])) == f"two and three save most {within}: 40.0 % of the training compute."
    )


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one, two = study(tmp_path / "one", [(0, 0.2)]), study(tmp_path / "two", [(0, 0.2)])
    long, other = study(tmp_path / "long", [], epochs=60), study(tmp_path / "other", [], saving="both")
    for paths, message in (
        ([one], "a comparison needs two or more studies, got 1: name another"),
        ([one, two, one], r"each study must be given once, got .*one twice"),
        ([one, tmp_path / "nothing"], r"no study in .*nothing"),
        ([one, Layout(two).journal], r"a comparison needs folders of studies, .*optuna.journal is none"),
        ([one, long], r"if their epochs is the same, got 30 \(one\), 60 \(long\): leave out what diff"),
        ([one, other], r"if their saving is the same, got training \(one\), both \(other\): leave out what differs"),
    ):
        with pytest.raises(UserError, match=message):
            compare(paths)
    with pytest.raises(UserError, match=r"the allowed accuracy loss must be a fraction in \[0, 1\)"):
        compare([one, two], allowed_drop=2)


def test_the_picture_has_every_front_as_steps(tmp_path: Path) -> None:
    one, other = study(tmp_path / "one", [(0, 0.2), (6, 0.5), (9, 0.1)]), study(tmp_path / "other", [(-3, 0.3)])
    figure = fronts(compare([one, other]))
    traces = {trace["name"]: trace for trace in figure.traces if trace.get("showlegend", True)}
    bottom = figure.layout["yaxis"]["range"][0]
    assert [*zip(traces["one"]["x"], traces["one"]["y"], strict=True)] == [
        pytest.approx(point) for point in [(0, 0), (20, 0), (50, -600 / 599), (50, bottom)]
    ]
    assert traces["one"]["line"]["shape"] == "vh"
    assert (traces["other"]["x"][1], traces["other"]["y"][1]) == (pytest.approx(30), pytest.approx(300 / 599))
    assert [shape["y0"] for shape in figure.layout["shapes"]] == [pytest.approx(-0.5)]
    points = [y for trace in figure.traces if not trace.get("showlegend", True) for y in trace["y"]]
    assert len(points) == 4
    assert min(points) > bottom
    for look in ("color", "symbol"):
        assert traces["one"]["marker"][look] != traces["other"]["marker"][look]


@pytest.mark.slow
def test_the_picture_is_a_page_that_names_the_studies(chromium: Browser, tmp_path: Path) -> None:
    names = [study(tmp_path / "a<b&c$d$", [(0, 0.2)]), study(tmp_path / "_d", [(1, 0.3)])]
    page = figure_html("two <studies>", fronts(compare(names)))
    assert page == figure_html("two <studies>", fronts(compare(names)))
    (tmp_path / "page.html").write_text(page)
    seen = chromium.new_page()
    seen.goto((tmp_path / "page.html").as_uri())
    seen.wait_for_selector(".legendtext")
    assert seen.title() == "two <studies>"
    assert seen.locator(".legendtext").all_text_contents() == ["a<b&c$d$", "_d", "baseline"]
    with seen.expect_download() as saved:
        seen.locator(".modebar-btn").click(force=True)
    assert saved.value.suggested_filename == "fronts.svg"
    texts = [e.text for e in ElementTree.parse(saved.value.path()).iter() if e.tag.endswith("text")]
    assert {"a<b&c$d$", "compute saved (%)"} <= set(texts)
    seen.close()
