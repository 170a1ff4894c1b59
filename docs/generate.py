"""Write the generated tables of the documentation: run `python docs/generate.py` after a change of what they show.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; a test holds the files up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import search_spaces
from search_spaces import SPACES
from trainables.gradients import fields as estimator_settings
from trainables.gradients.fields import (
    DEFAULTS,
    ESTIMATORS,
    FIELD_NAMES,
    GradientFields,
)
from trainables.gradskip.variables import VARIABLES
from trainables.savings import saved_words
from trainables.training.recipe import fields as recipe
from trainables.training.recipe.fields import RecipeFields

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
            (f"`{v.name}`", f"`{v.field}`", v.default_text, v.rule, _modes(v.mode), v.meaning)
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


def estimator_fields() -> str:
    """Return the table of the estimators' fields, with the methods that read them and their defaults there."""
    described = attribute_docstrings(GradientFields)
    readers = {name: [m for m in ESTIMATORS if name in DEFAULTS[m]] for name in FIELD_NAMES}
    return table(
        ("field", "default", "meaning"),
        (
            (
                f"`{name}`",
                ", ".join(
                    dict.fromkeys(
                        "all" if name == "gradient_layers" else _plain(DEFAULTS[method][name])
                        for method in readers[name]
                    )
                ),
                re.sub("`([A-Z_]+)`", lambda found: ", ".join(_choices(found[1])), described[name]),
            )
            for name in FIELD_NAMES
        ),
    )


def _default(method: str, name: str) -> str:
    return "all" if name == "gradient_layers" else _plain(DEFAULTS[method][name])


def recipe_fields() -> str:
    """Return the table of the training recipe's fields."""
    described = attribute_docstrings(RecipeFields)
    return table(
        ("field", "meaning"),
        (
            (f"`{name}`", re.sub("`([A-Z_]+)`", lambda found: ", ".join(getattr(recipe, found[1])), described[name]))
            for name in recipe.RECIPE_FIELDS
        ),
    )


def _choices(name: str) -> Iterable[str]:
    found: Iterable[str] = getattr(estimator_settings, name)
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "auto"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def attribute_docstrings(described: type) -> dict[str, str]:
    """Return the texts below the fields of a class, on one line each."""
    (body,) = (node for node in ast.walk(ast.parse(inspect.getsource(described))) if isinstance(node, ast.ClassDef))
    pairs = pairwise(body.body)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip


PARTS: dict[str, Callable[[], str]] = {
    "published_variables": lambda: variables(published=True),
    "other_variables": lambda: variables(published=False),
    "spaces": spaces,
    "estimator_fields": estimator_fields,
    "recipe_fields": recipe_fields,
}


def generated(text: str) -> str:
    """Return a page with its generated parts written anew; raise KeyError for an unknown part."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(generated(page.read_text("utf-8")), "utf-8")
