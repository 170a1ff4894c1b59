"""Ranges to search in a schedule: what they mean, how they are filled, and what is refused."""

from __future__ import annotations

import math

import pytest

from trainables.compression.schedule import Mark, ScheduleError, dump, read_marks, read_schedule
from trainables.errors import UserError

TEXT = """
version: 1
pruners:
  my_pruner:
    class: SensitivityPruner
    sensitivities:
      classifier.1.weight: !search {low: 0.1, high: 0.9}
      classifier.4.weight: !search {name: s, low: 0.001, high: 0.1, log: true}
      classifier.6.weight: !search
        name: s
        low: 0.001
        high: 0.1
        log: true
  structures:
    class: RandomLevelStructureParameterPruner
    group_type: !search {choices: [Filters, Channels]}
    sparsity_range: [0.1, !search {low: 0.2, high: 0.7, step: 0.2}]
    weights: [conv.weight]
policies:
  - pruner: {instance_name: my_pruner}
    starting_epoch: !search {low: 0, high: 7}
    ending_epoch: 9
  - pruner: {instance_name: structures}
    epochs: [3]
"""
S1, GROUP = "pruners.my_pruner.sensitivities.classifier.1.weight", "pruners.structures.group_type"
RANGE, START = "pruners.structures.sparsity_range.1", "policies.0.starting_epoch"


def test_marks_by_name_in_the_files_order() -> None:
    marks = read_marks(TEXT).marks
    assert list(marks) == [S1, "s", GROUP, RANGE, START]
    assert marks[S1] == Mark(low=0.1, high=0.9)
    assert marks["s"] == Mark(low=0.001, high=0.1, log=True)
    assert marks[GROUP] == Mark(choices=("Filters", "Channels"))
    assert marks[RANGE] == Mark(low=0.2, high=0.7, step=0.2)
    assert [marks[name].integer for name in (S1, "s", RANGE, START)] == [False, False, False, True]


def test_filling_gives_a_schedule() -> None:
    marked = read_marks(TEXT)
    values = {S1: 0.25, "s": 0.01, GROUP: "Channels", RANGE: 0.4, START: 3.0}
    filled = marked.fill(values)
    assert filled["pruners"]["my_pruner"]["sensitivities"] == {
        "classifier.1.weight": 0.25, "classifier.4.weight": 0.01, "classifier.6.weight": 0.01,
    }  # fmt: skip
    assert filled["pruners"]["structures"]["group_type"] == "Channels"
    assert filled["pruners"]["structures"]["sparsity_range"] == [0.1, 0.4]
    assert (filled["policies"][0]["starting_epoch"], type(filled["policies"][0]["starting_epoch"])) == (3, int)
    assert read_schedule(dump(filled)) == read_schedule(filled) == marked.read(values)
    filled["pruners"].clear()  # one's own: the marked schedule stays
    assert marked.fill(values)["pruners"]


def test_messages_of_a_filled_schedule_have_the_files_lines() -> None:
    with pytest.raises(ScheduleError, match=r"^<schedule>:21: policies\.0\.starting_epoch: must be >= 0, got -3$"):
        read_marks(TEXT).read({S1: 0.25, "s": 0.01, GROUP: "Channels", RANGE: 0.4, START: -3})


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("0.3", "a: !search must be a map such as {low: 0.1, high: 0.9}, got '0.3'"),
        ("{low: 1}", "a: !search needs low and high, or choices"),
        ("{low: 1, high: 1}", "a: !search needs low < high, got low 1 and high 1"),
        ("{low: x, high: 1}", "a: !search needs a number for low, got 'x'"),
        ("{low: 0, high: .inf}", "a: !search needs a number for high, got inf"),
        ("{low: 0, high: 1, log: true}", "a: !search needs low > 0 with log, got 0"),
        ("{low: 0, high: 1, log: 3}", "a: !search needs true or false for log, got 3"),
        ("{low: 1, high: 9, log: true, step: 1}", "a: !search takes log or step, got both"),
        ("{low: 1, high: 9, step: 0}", "a: !search needs a step in (0, high - low], got 0"),
        ("{low: 1, high: 9, choices: [1, 2]}", "a: !search takes choices or low and high, got choices and low"),
        ("{choices: [1, 1]}", "a: !search needs at least two different choices, got [1, 1]"),
        ("{choices: 3}", "a: !search needs choices that are a list of plain values, got 3"),
        ("{choices: [[1], 2]}", "a: !search needs choices that are a list of plain values, got [[1], 2]"),
        ("{low: 1, high: 2, stpe: 1}",
         "a.stpe: unknown key of !search, did you mean 'step'? Valid: low, high, step, log, choices, name"),
        ("{low: 1, high: 2, name: 3}", "a.name: must be text, got 3"),
        ("{low: 1, high: 2}\nb: !search {name: a, low: 1, high: 3}",
         "b: shares the name 'a' with a, so low, high, ... must be the same there"),
    ],
)  # fmt: skip
def test_definitions_that_are_refused(definition: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        read_marks(f"version: 1\na: !search {definition}\n")
    line = 3 if definition.endswith("}") and "\n" in definition else 2
    assert str(raised.value) == f"<schedule>:{line}: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({START: 2.5}, f"{START} must be a whole number, got 2.5"),
        ({START: True}, f"{START} must be a number, got True"),
        ({S1: "x"}, f"{S1} must be a number, got 'x'"),
        ({S1: math.nan}, f"{S1} must be a number, got nan"),
        ({GROUP: "Rows"}, f"{GROUP} must be one of Filters, Channels, got 'Rows'"),
        ({"t": 1}, "unknown search range 't': Valid: " + ", ".join(sorted([S1, "s", GROUP, RANGE, START]))),
    ],
)
def test_values_that_are_refused(changes: dict[str, float | str], message: str) -> None:
    marked = read_marks(TEXT)
    with pytest.raises(UserError) as raised:
        marked.fill(marked.middles() | changes)
    assert str(raised.value) == message
    with pytest.raises(UserError, match=r"^s needs a value: it is a range to search$"):
        marked.fill({name: value for name, value in marked.middles().items() if name != "s"})
