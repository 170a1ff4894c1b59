"""Contrasts that text and marks need (WCAG 2.2, 1.4.3 and 1.4.11), and the formula against published values."""

from __future__ import annotations

import pytest

from analysis.presentation.figures.palette import DARK, LIGHT


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, in [1, 21] (WCAG 2.2, definitions)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_stand_out(colours: dict[str, str]) -> None:
    for ground in ("ground", "panel"):
        for text in ("text", "faint", "link"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("trial", "front", "chosen", "control", "published", "limit", "focus"):
        assert contrast(colours[mark], colours["ground"]) >= 3, mark
