"""Colours of the report: Okabe and Ito's colour-blind-safe palette, in a light and a dark scheme.

Okabe, Ito: Color Universal Design (2008). Colours with too little contrast on the white or the dark background are
darkened or lightened; the contrast to the background is at least 4.5 for text and at least 3 for marks (WCAG 2.2, 1.4.3
and 1.4.11).
"""

from __future__ import annotations

#: Light and dark values by a colour's role. Figures name the role; the page has it as a variable.
_COLOURS = {
    "ground": ("#ffffff", "#13171c"),
    "panel": ("#f5f7f9", "#1c222a"),
    "text": ("#1b232c", "#e8ecf0"),
    "faint": ("#55606c", "#a5b0bb"),
    "line": ("#d5dbe1", "#36404b"),
    "rest": ("#dfe4e9", "#3a434e"),
    "trial": ("#7f8b98", "#9aa6b2"),
    "front": ("#0072b2", "#56b4e9"),
    "chosen": ("#00875f", "#2fc796"),
    "control": ("#c75300", "#f09a3e"),
    "published": ("#a8517f", "#dd94bb"),
    "limit": ("#55606c", "#a5b0bb"),
    "link": ("#0063a0", "#6fc0ee"),
    "focus": ("#0072b2", "#56b4e9"),
    # From the first layer to the last: lightness rises or falls evenly, so that the order is also visible in grey.
    "depth0": ("#08306b", "#5a7fd6"),
    "depth1": ("#0f6292", "#4fa3d6"),
    "depth2": ("#2b8888", "#4fc2b0"),
    "depth3": ("#539a55", "#93d46b"),
    "depth4": ("#a89e17", "#f0e442"),
}
LIGHT = {role: light for role, (light, _) in _COLOURS.items()}
DARK = {role: dark for role, (_, dark) in _COLOURS.items()}
#: Roles of the colour scale of layers, from the first one to the last.
DEPTH = tuple(role for role in _COLOURS if role.startswith("depth"))
