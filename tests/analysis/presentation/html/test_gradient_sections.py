"""The page's sections on gradient statistics and clusters."""

from __future__ import annotations

import base64
import io
import re

from gradient_rows import with_gradients

from analysis.presentation.html import report_html
from analysis.presentation.html.page import clusters as clusters_section


def test_the_page_explains_and_shows_statistics_and_clusters() -> None:
    page = report_html(with_gradients())
    for name in ("gradient_noise", "gradient_variance", "layer_noise"):
        (tag,) = re.findall(rf'<div class="plot" id="plot-{name}"[^>]*>', page)
        assert re.search(r'role="img" aria-label="[^"]{30,}"', tag)
    assert "Normalised variance is V[g] / E[g²]" in page
    assert "near 1 the gradient is noise" in page
    assert "What measuring costs is counted in the trials&#x27; compute." in page


def test_the_table_has_size_share_spread_and_examples() -> None:
    section = clusters_section(with_gradients(cluster_images={}))
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", section)[1:]]
    assert cells == [
        ["1", "6", "60.0 %", "2.5", "4, 0"], ["2", "3", "30.0 %", "1265", "11"], ["3", "1", "10.0 %", "0", "2"],
    ]  # fmt: skip
    assert "<img" not in section


def test_pictures_are_embedded_with_escaped_labels_and_whole_factors() -> None:
    from PIL import Image

    section = clusters_section(with_gradients())
    (tag,) = re.findall(r"<img[^>]*>", section)
    assert "<b>" not in section
    assert 'alt="sample 4, label &lt;b&gt;4&lt;/b&gt;"' in tag
    found = re.search(r'width="(\d+)" height="(\d+)" src="data:image/png;base64,([^"]*)"', tag)
    assert found is not None
    picture = Image.open(io.BytesIO(base64.b64decode(found[3])))
    assert (int(found[1]), int(found[2])) == (6 * picture.width, 6 * picture.height) == (48, 24)
    assert "<li>0</li>" in section  # a sample without a picture keeps its number
