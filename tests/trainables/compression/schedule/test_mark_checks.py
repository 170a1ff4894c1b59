"""Values of marks that can never be are found before a search; wrong combinations are nobody's fault."""

from __future__ import annotations

import pytest

from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.schedule import ModelFacts, ScheduleError, read_marks
from trainables.compression.schedule.reading import check_marks

FACTS = ModelFacts(
    parameters={"conv1.weight": (8, 1, 3, 3), "conv2.weight": (8, 8, 3, 3), "fc.weight": (10, 8)}, modules={}
)
TEXT = """version: 1
pruners:
  g:
    class: {kind}
    group_type: Filters
    initial_sparsity: 0.05
    final_sparsity: {final}
    weights: {weights}
lr_schedulers:
  l: {{class: StepLR, step_size: {size}}}
policies:
- {{pruner: {{instance_name: g}}, starting_epoch: {start}, ending_epoch: {end}}}
- {{lr_scheduler: {{instance_name: l}}, starting_epoch: 0, ending_epoch: 3}}
"""
RIGHT = {
    "kind": "L1RankedStructureParameterPruner_AGP", "final": "!search {low: 0.2, high: 0.6}",
    "weights": "[!search {choices: [conv1.weight, conv2.weight]}]", "size": "!search {low: 1, high: 3}",
    "start": "!search {low: 1, high: 8}", "end": "!search {low: 3, high: 9}",
}  # fmt: skip


def check(**given: str) -> None:
    check_marks(read_marks(TEXT.format(**{**RIGHT, **given})), FACTS, check_lr=check_lr_scheduler)


def test_what_cannot_stand_together_is_no_fault_of_a_value() -> None:
    """An end of 3 after a start of 8; two neighbouring ends, between which nothing can rise."""
    check()


def test_a_value_that_only_some_choices_of_others_allow_is_no_fault_of_a_value() -> None:
    """Rows want a matrix, the second of four; filters and channels a convolution."""
    text = TEXT.replace("group_type: Filters", "group_type: !search {{choices: [Filters, Rows, Channels]}}")
    weights = "[!search {choices: [conv1.weight, fc.weight, conv2.weight, conv1.weight]}]"
    marked = read_marks(text.format(**{**RIGHT, "weights": weights}))
    check_marks(marked, FACTS, check_lr=check_lr_scheduler)


def test_a_high_end_off_its_grid_is_no_value() -> None:
    check(final="!search {low: 0.5, high: 1.05, step: 0.2}")  # 0.5, 0.7, 0.9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "[!search {choices: [conv1.weight, conv9.weight]}]"}, "8: pruners.g.weights.0: unknown param"),
        ({"weights": "[!search {choices: [conv1.weight, fc.weight]}]"}, "8: pruners.g.weights.0: Filters of fc.we"),
        ({"kind": "!search {choices: [L1RankedStructureParameterPruner_AGP, L3Ranked]}"},
         "4: pruners.g.class: unknown class 'L3Ranked'"),
        ({"final": "!search {low: 0.2, high: 1.5}"}, "7: pruners.g.final_sparsity: must be <= 1, got 1.5"),
        ({"final": "!search {low: 0.2, high: 1.2, step: 0.5}"}, "7: pruners.g.final_sparsity: must be <= 1, got 1.2"),
        ({"size": "!search {low: 0, high: 3}"}, "10: lr_schedulers.l: step_size of StepLR must be a whole number"),
        ({"end": "!search {low: -3, high: 9}"}, "12: policies.0.ending_epoch: must be above starting_epoch"),
    ],
)  # fmt: skip
def test_a_value_that_can_never_be_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ScheduleError) as found:
        check(**given)
    assert found.value.errors[0].startswith(f"<schedule>:{message}"), found.value.errors
