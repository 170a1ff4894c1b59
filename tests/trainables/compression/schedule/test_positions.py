"""YAML with lines: against PyYAML's own loader, and what must be refused."""

from __future__ import annotations

import pytest
import yaml

from trainables.compression.schedule.document import MOST_NESTED, MOST_VALUES, NotYaml, compose


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("-.5e3", -500.0), ("1.e+2", 100.0), ("1.5", 1.5), ("1e", "1e"), ("'1e-4'", "1e-4"),
     ("e5", "e5"), ("2020-01-01", "2020-01-01"), ("=", "=")],
)  # fmt: skip
def test_numbers_and_text_beyond_yaml_1_1(text: str, value: object) -> None:
    found = compose(f"a: {text}").value["a"]
    assert (found, type(found)) == (value, type(value))


def test_merged_maps() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], x: 0}\n"
    assert compose(text).value == yaml.safe_load(text)
    assert compose(text).value["c"] == {"x": 0, "y": 2, "z": 4}
    assert compose(text).duplicates == []


def test_duplicates_are_told_and_the_last_counts() -> None:
    found = compose("a: 1\nb: 2\na: 3\n")
    assert found.value == yaml.safe_load("a: 1\nb: 2\na: 3\n")
    assert [(p.path, p.text, p.line) for p in found.duplicates] == [(("a",), "is given twice, first in line 1", 3)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!python/name:os.system x", "unknown tag !!python/name:os.system: plain values and !search are allowed"),
        ("a: !mine {b: 1}", "unknown tag !mine: plain values and !search are allowed"),
        ("a: !!int x", "cannot be read as int"),
        ("a: !!bool x", "cannot be read as bool"),
        ("a: " + "9" * 5000, "cannot be read as int"),
        ("a: {[1]: 2}", "a key must be text, got a map or list"),
        ("a: {!search x : 2}", "a key must be text, got a !search range"),
        ("a: {<<: 3}", "<< must name another map"),
        ("a: &a {<<: *a}", "<< must name another map"),
    ],
)
def test_what_cannot_be_a_value(text: str, problem: str) -> None:
    assert [(found.text, found.path) for found in compose(text).problems] == [(problem, ("a",))]


def bomb(depth: int) -> str:
    """Ten aliases of ten aliases of ..."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth)]
    return "\n".join(lines)


def nested_by_aliases(depth: int) -> str:
    return "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, depth))])


TOO_MANY = f"must not hold more than {MOST_VALUES} values (behind an alias they count each time)"
TOO_DEEP = f"must not nest maps and lists more than {MOST_NESTED} deep"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty: a schedule needs version and policies"),
        ("# only a comment\n", None, "is empty: a schedule needs version and policies"),
        ("a: 1\n b: 2", 2, "is not YAML: mapping values are not allowed in this context"),
        ("a: 1\n---\nb: 2", 2, "is not YAML: expected a single document in the stream, but found another document"),
        ("a: &a [*a]", 1, "must not contain itself by an alias"),
        (bomb(9), 1, TOO_MANY),
        ("a:\n  [" + "1," * (MOST_VALUES + 1) + "]", 2, TOO_MANY),
        ("[" * 100_000 + "]" * 100_000, 1, TOO_DEEP),
        (nested_by_aliases(MOST_NESTED + 2), 1, TOO_DEEP),
    ],
)  # fmt: skip
def test_what_is_refused_at_once(text: str, line: int | None, message: str) -> None:
    with pytest.raises(NotYaml) as raised:
        compose(text)
    assert (raised.value.line, raised.value.text) == (line, message)


def test_control_characters() -> None:
    with pytest.raises(NotYaml, match=r"is not YAML: .*not allowed"):
        compose("a: \x00")


def test_tabs_are_named_where_they_indent() -> None:
    with pytest.raises(NotYaml) as caught:
        compose("version: 1\npruners:\n\tx: 1\n")
    assert caught.value.line == 3
    assert caught.value.text.endswith("; YAML is indented by blanks, not by tabs")
