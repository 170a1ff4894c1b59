"""A trial's values in a shell command, read back by the shell itself."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.errors import UserError
from trainables.script.placeholders import fill, names

VALUES = {"CAC_VAR_START_THR": 0.5, "LAYERS": (1, 2), "NAME": 'it\'s a "name"', "NONE": None, "YES": True, "a": "A"}

#: What an argument of a program can hold, most of it with a meaning for the shell.
MEANINGFUL = st.sampled_from([*"'\"\\$`(){}!*?[]~#;&|<>=- \t\n", "$HOME", "$(id)", "{X}", "a"])
ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3)
ARGUMENTS = st.lists(MEANINGFUL | ANY, max_size=8).map("".join)


def read_by_sh(command: str) -> list[str]:
    """The arguments, each ended with NUL, that a command prints."""
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=60)
@given(ARGUMENTS)
def test_the_shell_reads_a_value_back_as_it_is_inside_any_quotes(value: str) -> None:
    command = (
        r"printf '%s\0' {X} '{X}' \"{X}\" a{X}b '\'"
        "'{X}'"  # the quote before has ended: a backslash means nothing in single quotes
        ' "{X}" "\\"{X}" "$(printf %s. {X})" "$(printf %s. "{X}")" "$( (printf %s. \'{X}\') )" "$((1+1)){X}"'
    )
    expected = [value, value, f'"{value}"', f"a{value}b", f"\\{value}", value, f'"{value}', *[f"{value}."] * 3]
    assert read_by_sh(fill(command, {"X": value})) == [*expected, f"2{value}"]


def test_kinds_of_values() -> None:
    values = {"F": 1e-05, "I": -3, "T": True, "N": None, "L": [0.5, 2, False], "E": (), "S": "a b"}
    command = r"printf '%s\0' {F} {I} {T} {N} {L} {E} {S}"
    assert read_by_sh(fill(command, values)) == ["1e-05", "-3", "1", "", "0.5,2,0", "", "a b"]


@pytest.mark.parametrize(
    ("command", "filled"),
    [
        ("train.py --thr {CAC_VAR_START_THR}", "train.py --thr 0.5"),
        ("--layers={LAYERS} {YES}{YES} {NONE}", "--layers=1,2 11 ''"),
        ("{{a}}", "{a}"),
        ("{{unknown}}", "{unknown}"),
        ('{"x":{a}}', '{"x":A}'),
        ('{"x":{{a}}}', '{"x":{a}}'),
        ("{{a}", "{A"),
        ("${a} ${a:-{a}} ${#a} $a", "${a} ${a:-A} ${#a} $a"),
        ("${{a}}", "${a}"),
        ("echo {a,b} {1..3} {} {{}} { a } {a-b} {2a} {_a} {a b} {ä}", None),
        ("awk '{print $1}' '{print; next}'", None),
        ("""python -c 'print({"k": {"n": 1}}, {{1}})'""", None),
        ("f() { true; }; f", None),
        ("}}{{", None),
        ("", None),
    ],
)
def test_what_is_a_placeholder(command: str, filled: str | None) -> None:
    assert fill(command, VALUES) == (command if filled is None else filled)
    assert not (filled is None and names(command))


def test_names() -> None:
    assert names("{b} {{c}} '{a}' ${d} {b}") == ["b", "a"]


@pytest.mark.parametrize(
    ("command", "known", "message"),
    [
        ("--thr {CAC_VAR_START_TRH}",
         ["CAC_VAR_START_THR", "seed"],
         "unknown placeholder 'CAC_VAR_START_TRH': did you mean 'CAC_VAR_START_THR'? "
         "Valid: CAC_VAR_START_THR, seed. For the text {CAC_VAR_START_TRH} itself write {{CAC_VAR_START_TRH}}"),
        ("awk '{print}'",
         ["seed"],
         "unknown placeholder 'print': Valid: seed. For the text {print} itself write {{print}}"),
    ],
)  # fmt: skip
def test_bad_placeholders(command: str, known: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        fill(command, dict.fromkeys(known, 1))
    assert str(caught.value) == message
