"""YAML with lines: against PyYAML's own loader, and what must be refused."""

from __future__ import annotations

import pytest
import yaml

from trainables.compression.schedule.document import NotYaml, compose


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("-.5e3", -500.0), ("1.e+2", 100.0), ("1.5", 1.5), ("1e", "1e"), ("'1e-4'", "1e-4"),
     ("e5", "e5"), ("2020-01-01", "2020-01-01"), ("=", "=")],
)  # fmt: skip
def test_numbers_and_text_beyond_yaml_1_1(text: str, value: object) -> None:
    found = compose(f"a: {text}").value["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["010", "1:30", "yes", "off", "0x1f", "0b101", "1_000", "+12", ".inf", "~", "1.5"])
def test_numbers_and_switches_of_yaml_1_1(text: str) -> None:
    found, expected = compose(f"a: {text}").value["a"], yaml.safe_load(text)
    assert (found, type(found)) == (expected, type(expected))


def test_merged_maps() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3, z: 4}\nc: {<<: [*a, *b], x: 0}\nd: *b\n"
    assert compose(text).value == yaml.safe_load(text)
    assert compose(text).value["c"] == {"x": 0, "y": 2, "z": 4}
    assert compose(text).duplicates == []


def test_duplicates_are_told_and_the_last_counts() -> None:
    found = compose("a: 1\nb: 2\na: 3\n")
    assert found.value == yaml.safe_load("a: 1\nb: 2\na: 3\n")
    assert found.duplicates == [(("a",), "is given twice, first in line 1")]
    assert found.lines["a",] == 3


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty: a schedule needs version and policies"),
        ("# only a comment\n", None, "is empty: a schedule needs version and policies"),
        ("a: !!python/name:os.system x", 1,
         "must hold plain values and !search alone, got the unknown tag !!python/name:os.system"),
        ("\na: !mine {b: 1}", 2, "must hold plain values and !search alone, got the unknown tag !mine"),
        ("a: !!set {b}", 1, "must hold plain values and !search alone, got the unknown tag !!set"),
        ("a: !!int x", 1, "has a value that cannot be read as int: x"),
        ("a: !!bool x", 1, "has a value that cannot be read as bool: x"),
        ("a: " + "9" * 5000, 1, f"has a value that cannot be read as int: {'9' * 60}"),
        ("a: {[1]: 2}", 1, "must have text as keys, got a map or list"),
        ("a: {!search x : 2}", 1, "must have text as keys, got a !search range"),
        ("a: {<<: 3}", 1, "must name another map by <<"),
        ("a: 1\n b: 2", 2, "is not YAML: mapping values are not allowed in this context"),
        ("a: 1\n---\nb: 2", 2, "is not YAML: expected a single document in the stream, but found another document"),
        ("a: &a [*a]", None, "must not nest maps and lists that deep, nor contain itself by an alias"),
    ],
)  # fmt: skip
def test_what_is_refused_at_once(text: str, line: int | None, message: str) -> None:
    with pytest.raises(NotYaml) as raised:
        compose(text)
    assert (raised.value.line, raised.value.text) == (line, message)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: \x00", None, r"^is not YAML: .*not allowed"),
        ("version: 1\npruners:\n\tx: 1\n", 3, "; YAML is indented by blanks, not by tabs$"),
    ],
)
def test_control_characters_and_tabs(text: str, line: int | None, message: str) -> None:
    with pytest.raises(NotYaml, match=message) as caught:
        compose(text)
    assert caught.value.line == line
