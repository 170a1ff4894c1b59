"""Write the generated tables of the documentation: run `python docs/generate.py` after a change of what they show.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; a test holds the files up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import search_spaces
from search_spaces import SPACES
from trainables.gradskip.variables import VARIABLES
from trainables.savings import saved_words

DOCS = Path(__file__).parent
_PART = re.compile(r"(<!-- generated: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(header), *map(list, rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def variables(*, published: bool) -> str:
    """Return the table of the published variables, or of ours."""
    return table(
        ("variable", "`Settings`", "default", "range", "read by", "meaning"),
        (
            (f"`{v.name}`", f"`{v.field}`", v.default_text, v.allowed.words, _modes(v.mode), v.meaning)
            for v in VARIABLES
            if v.published == published
        ),
    )


def _modes(mode: str) -> str:
    return {"both": "any rule", "auto": "variance", "manual": "manual lists"}.get(mode, mode.replace(",", ", "))


def spaces() -> str:
    """Return the table of the search spaces."""
    return table(
        ("space", "what varies", "ranked by"),
        ((f"`{name}`", said, saved_words(search_spaces.load(name).saving)) for name, said in SPACES.items()),
    )


PARTS: dict[str, Callable[[], str]] = {
    "published_variables": lambda: variables(published=True),
    "other_variables": lambda: variables(published=False),
    "spaces": spaces,
}


def generated(text: str) -> str:
    """Return a page with its generated parts written anew; raise KeyError for an unknown part."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(generated(page.read_text("utf-8")), "utf-8")
