"""A search that measures gradients and clusters samples, and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands_run import run_here

import analysis
from trainables.workloads.digits import BATCH_SIZE, Digits

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_a_search_with_statistics_has_them_in_its_report(one_ray: None, tmp_path: Path) -> None:
    # Two at a time, as a search does; without controls, which have no statistics.
    done = run_here(
        tmp_path, "search", "--space", "gradient_clustering", "--trials", "3", "--epochs", "2", "--no-controls",
        "--set", "statistics_measurements=3", "--name", "g",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = tmp_path / "results" / "g"
    history = analysis.history(study)
    frame = analysis.gradient_statistics(history)
    assert set(frame["trial"]) == {0, 1, 2}  # the baseline, too
    # As many rows as the JSON has, and those of the last epoch are what trials reported as columns.
    entries = [entry for text in history["gradient_statistics"] for entry in json.loads(text)]
    assert len(frame) == sum(1 + len(entry["layers"]) for entry in entries)
    names = [name for name, _ in Digits().make_model().named_parameters()]
    assert list(dict.fromkeys(frame.loc[frame["layer"] != "", "layer"])) == names
    trials = analysis.load(study).set_index("trial")
    for trial, own in frame[frame["layer"] == ""].groupby("trial"):
        last = own[(own["estimator"] == "sgd") & (own["step"] == own["step"].max())].iloc[0]
        assert last["normalised_variance"] == trials.loc[trial, "sgd_normalised_variance"]
        assert sorted(set(own["step"])) == sorted({e["step"] for e in entries})
        assert len(set(own["step"])) == 3
    assert (frame["normalised_variance"].dropna() <= 50 / 49 + 1e-6).all()

    clusters = analysis.gradient_clusters(history)
    samples = Digits().samples()
    assert samples is not None
    assert set(clusters["trial"]) == {1, 2}
    assert (clusters.groupby("trial")["size"].sum() == samples.count).all()
    assert samples.count > BATCH_SIZE
    assert np.allclose(clusters.groupby("trial")["share"].sum(), 1)

    page = study / "report.html"
    assert run_here(tmp_path, "report", str(study)).returncode == 0
    text = page.read_text()
    for name in ("gradient_noise", "gradient_variance", "layer_noise"):
        assert f'id="plot-{name}"' in text
    shown = re.search(r"(\d+) clusters? of trial (\d)", text)
    assert shown is not None
    own = clusters[clusters["trial"] == int(shown[2])]
    assert int(shown[1]) == len(own)
    pictures = re.findall(r'<img alt="sample (\d+), label (\d)"[^>]* src="data:image/png;base64,', text)
    numbers = [number for examples in own["examples"] for number in examples]
    assert [int(number) for number, _ in pictures] == numbers
    import torch

    labels = samples.batch(torch.tensor(numbers), torch.Generator())[1].tolist()
    assert [int(label) for _, label in pictures] == labels
