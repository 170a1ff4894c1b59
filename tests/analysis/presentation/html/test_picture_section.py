"""The section with a generator's samples: pictures of two trials, collapse in words, nothing from a damaged file."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import pandas as pd
from PIL import Image
from report_data import report_data

from analysis.presentation.html.page import sample_pictures


def png(shade: int) -> str:
    file = io.BytesIO()
    Image.new("L", (128, 32), shade).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def rows(trial: int, epochs: int = 20, **columns: object) -> pd.DataFrame:
    return pd.DataFrame(
        {"trial": trial, "epoch": range(1, epochs + 1), "sample_picture": [png(e) for e in range(epochs)], **columns}
    )


def test_the_baseline_and_the_shown_trial_have_pictures_of_some_epochs() -> None:
    data = report_data(12)
    assert data.best is not None
    best = int(data.best["trial"])
    page = sample_pictures(replace(data, history=pd.concat([rows(0), rows(best), rows(best + 1)])))
    assert "<td>0 (baseline)</td>" in page
    assert f"<td>{best}</td>" in page
    assert f"<td>{best + 1}</td>" not in page
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(sources) == 16
    assert Image.open(io.BytesIO(base64.b64decode(sources[0]))).size == (128, 32)
    assert 'width="256" height="64"' in page
    assert "epoch 1<" in page
    assert "epoch 20<" in page


def test_a_collapsed_discriminator_is_said() -> None:
    collapsed = [1.0 if epoch in (3, 4) else 0.0 for epoch in range(20)]
    page = sample_pictures(replace(report_data(5), history=rows(0, discriminator_collapsed=collapsed)))
    assert "The discriminator of trial 0 had collapsed after epoch 4, 5." in page


def test_what_is_no_picture_is_left_out() -> None:
    for bad in ('"><script>alert(1)</script>', base64.b64encode(b"GIF89a" + b"x" * 40).decode(), "", None, 7):
        history = rows(0, 2).assign(sample_picture=pd.Series([bad, bad], dtype="object"))
        assert sample_pictures(replace(report_data(5), history=history)) == ""
    assert sample_pictures(replace(report_data(5), history=None)) == ""
    assert sample_pictures(report_data(5)) == ""
