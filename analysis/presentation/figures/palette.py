"""Colours of the report: Okabe and Ito's colour-blind-safe palette, in a light and a dark scheme.

Okabe, Ito: Color Universal Design (2008). Colours with too little contrast on the white or the dark background are
darkened or lightened; the contrast to the background is at least 4.5 for text and at least 3 for marks (WCAG 2.2, 1.4.3
and 1.4.11).
"""

from __future__ import annotations

#: Mapping of a colour's role to its value. Figures name the role; the page looks up the value.
LIGHT = {
    "ground": "#ffffff",
    "panel": "#f5f7f9",
    "text": "#1b232c",
    "faint": "#55606c",
    "line": "#d5dbe1",
    "rest": "#dfe4e9",
    "trial": "#7f8b98",
    "front": "#0072b2",
    "chosen": "#00875f",
    "control": "#c75300",
    "published": "#a8517f",
    "limit": "#55606c",
    "link": "#0063a0",
    "focus": "#0072b2",
}  # fmt: skip
DARK = {
    "ground": "#13171c",
    "panel": "#1c222a",
    "text": "#e8ecf0",
    "faint": "#a5b0bb",
    "line": "#36404b",
    "rest": "#3a434e",
    "trial": "#9aa6b2",
    "front": "#56b4e9",
    "chosen": "#2fc796",
    "control": "#f09a3e",
    "published": "#dd94bb",
    "limit": "#a5b0bb",
    "link": "#6fc0ee",
    "focus": "#56b4e9",
}  # fmt: skip
#: From the first layer to the last: lightness rises or falls evenly, so that the order is also visible in grey.
DEPTH_LIGHT = ("#08306b", "#0f6292", "#2b8888", "#539a55", "#a89e17")
DEPTH_DARK = ("#5a7fd6", "#4fa3d6", "#4fc2b0", "#93d46b", "#f0e442")
