"""Placeholders in a user's shell command: ``{CAC_VAR_SAMPLES}`` is replaced by the trial's value.

A placeholder is a name (letters, digits and underscores, beginning with a letter) in braces with nothing between;
``{{print}}`` becomes ``{print}``. Everything else in braces belongs to the shell or another program and is kept:
``${VAR}``, ``{a,b}``, ``{1..3}``, ``{}``, ``awk '{print $1}'``, JSON.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from trainables.errors import UserError, unknown_name

#: Variable of a user's shell with the number of epochs to train, where these are fewer than those of the full run.
EPOCHS_VARIABLE = "TUNE_CAC_EPOCHS"
#: Variable of a best.env with the budget of the forward cache that the best setting had, in MB; `trial` reads it.
CACHE_VARIABLE = "TUNE_CAC_FORWARD_CACHE_MB"
_NAME = "[A-Za-z][A-Za-z0-9_]*"
_IN_BRACES = re.compile(rf"\{{\{{(?P<text>{_NAME})\}}\}}|(?<!\$)\{{(?P<name>{_NAME})\}}")


def names(command: str) -> list[str]:
    """Return the placeholders of a command, each once, in order."""
    return list(dict.fromkeys(match["name"] for match in _IN_BRACES.finditer(command) if match["name"]))


def fill(command: str, values: Mapping[str, Any]) -> str:
    """Return the command with values for its placeholders, quoted so that the shell reads the values unchanged.

    Quoting follows the quotes around the placeholder: ``{OUT}/log``, ``"{OUT}/log"`` and ``'{OUT}/log'`` are the same
    word. Lists are joined with commas, True and False are 1 and 0, None is empty. UserError: a placeholder has no
    value.

    >>> fill("train.py --thr {THR} --out '{OUT}'", {"THR": 0.5, "OUT": "my runs"})
    "train.py --thr 0.5 --out 'my runs'"
    """
    quotes = _quotes(command)

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return f"{{{match['text']}}}"
        if name not in values:
            error = unknown_name("placeholder", name, values)
            raise UserError(f"{error}. For the text {{{name}}} itself write {{{{{name}}}}}")
        return _quoted(_text(values[name]), quotes[match.start()])

    return _IN_BRACES.sub(replaced, command)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(part) for part in value)
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _quoted(text: str, quote: str) -> str:
    """Return the text as it must be written inside these quotes (none: as a word, or a part of one)."""
    if quote == "'":
        return text.replace("'", "'\"'\"'")
    if quote == '"':
        return re.sub(r'([\\$`"])', r"\\\1", text)
    return shlex.quote(text)


def _quotes(command: str) -> list[str]:
    """Return for each character the quotes around it: ``'``, ``"`` or none.

    A command substitution ``$(...)`` begins anew; comments, backquotes and here-documents are not handled.
    """
    inside, found, escaped = [""], [], False
    for place, character in enumerate(command):
        top = inside[-1]
        found.append("" if top == "(" else top)
        if escaped:
            escaped = False
        elif top == "'":
            if character == "'":
                inside.pop()
        elif character == "\\":
            escaped = True
        elif character == top == '"' or (character == ")" and top == "("):
            inside.pop()
        elif character == '"' or (character == "'" and top != '"'):
            inside.append(character)
        elif character == "(" and (top == "(" or command[:place].endswith("$")):
            inside.append("(")
    return found
