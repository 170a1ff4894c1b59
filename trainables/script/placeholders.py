"""Placeholders in a user's shell command: ``{CAC_VAR_SAMPLES}`` is replaced by the trial's value.

A placeholder is a name (letters, digits and underscores, beginning with a letter) in braces with nothing between.
Everything else in braces belongs to the shell or another program and is kept: ``${VAR}``, ``{a,b}``, ``{1..3}``,
``{}``, ``awk '{print $1}'``, JSON. A name in doubled braces is no placeholder: ``{{print}}`` becomes ``{print}``. If
more braces surround a name, every two pairs become one pair of the result, and one remaining pair makes a placeholder
(so ``{{{X}}}`` is the value in braces). Doubled braces without a name between them are never reduced:
``{"a":{"b":1}}`` stays JSON.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from trainables.errors import UserError, unknown_name

#: Variable of a user's shell with the number of epochs to train, where these are fewer than those of the full run.
EPOCHS_VARIABLE = "TUNE_CAC_EPOCHS"
_IN_BRACES = re.compile(r"(?P<open>\{+)(?P<name>[A-Za-z][A-Za-z0-9_]*)(?P<close>\}+)")


def names(command: str) -> list[str]:
    """Return the placeholders of a command, each once, in order.

    >>> names("python train.py --lr {LR} --out {OUT}/{LR} ${HOME}")
    ['LR', 'OUT']
    """
    matches = _IN_BRACES.finditer(command)
    return list(dict.fromkeys(match["name"] for match in matches if _pairs(command, match) % 2))


def fill(command: str, values: Mapping[str, Any], known: Iterable[str] | None = None) -> str:
    """Return the command with values for its placeholders, quoted so that the shell reads the values unchanged.

    Quoting follows the quotes around the placeholder: ``{OUT}/log``, ``"{OUT}/log"`` and ``'{OUT}/log'`` are the same
    word. Lists are joined with commas, True and False are 1 and 0, None is empty.

    >>> fill("train.py --thr {THR} --out '{OUT}'", {"THR": 0.5, "OUT": "my runs"})
    "train.py --thr 0.5 --out 'my runs'"

    Args:
        command: a command line for ``/bin/sh -c``.
        values: by name.
        known: all valid names; those of ``values`` unless given.

    Raises:
        UserError: a placeholder is not known, or has no value.
    """
    known = set(values if known is None else known)
    quotes = _quotes(command)
    parts, end = [], 0
    for match in _IN_BRACES.finditer(command):
        pairs = _pairs(command, match)
        if pairs == 0:
            continue
        inner = f"{{{match['name']}}}"
        if pairs % 2:
            inner = _quoted(_text(_value(match["name"], values, known)), quotes[match.start()])
        braces = pairs // 2 if pairs % 2 else pairs // 2 - 1
        parts += [command[end : match.start("name") - pairs], "{" * braces, inner, "}" * braces]
        end = match.end("name") + pairs
    return "".join([*parts, command[end:]])


def _pairs(command: str, match: re.Match[str]) -> int:
    """Return the number of brace pairs around a name; 0 for a variable of the shell, ``${NAME}``."""
    of_shell = match["open"] == "{" and command[: match.start()].endswith("$")
    return 0 if of_shell else min(len(match["open"]), len(match["close"]))


def _value(name: str, values: Mapping[str, Any], known: set[str]) -> Any:
    if name not in known:
        error = unknown_name("placeholder", name, known)
        raise UserError(f"{error}. For the text {{{name}}} itself write {{{{{name}}}}}")
    if name not in values:
        raise UserError(f"the command's placeholder {{{name}}} has no value in this trial: leave it out of the command")
    return values[name]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list | tuple):
        return ",".join(_text(part) for part in value)
    return str(value)


def _quoted(text: str, quote: str) -> str:
    """Return the text as it must be written inside these quotes (none: as a word, or a part of one)."""
    if quote == "'":
        return text.replace("'", "'\"'\"'")
    if quote == '"':
        return re.sub(r'([\\$`"])', r"\\\1", text)
    return shlex.quote(text)


def _quotes(command: str) -> list[str]:
    """Return for each character the quotes around it: ``'``, ``"`` or none.

    Handles quotes, backslashes and command substitution ``$(...)``, which begins anew inside double quotes, but not
    comments, backquotes and here-documents.
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
