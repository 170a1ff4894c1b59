"""Writing: what is written is read as the same, and looks like a schedule."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.compression.schedule import dump, read_schedule, to_mapping
from trainables.compression.schedule.document import compose

#: Names that a careless writer would leave unquoted, among others.
names = st.sampled_from(["conv1.weight", "*", "1e-4", "yes", "null", "0", "re:a|b", "a: b", "#", "- x", "é", "!search"])
shares = st.floats(0, 1)
levels = st.dictionaries(names, shares, min_size=1)
timings = st.one_of(
    st.lists(st.integers(0, 99), min_size=2, unique=True).map(lambda epochs: {"epochs": sorted(epochs)}),
    st.tuples(st.integers(0, 9), st.integers(2, 9)).map(
        lambda pair: {"starting_epoch": pair[0], "ending_epoch": sum(pair), "frequency": 1}
    ),
)
pruners = st.one_of(
    levels.map(lambda values: {"class": "SparsityLevelParameterPruner", "levels": values}),
    st.lists(names, min_size=1).map(
        lambda weights: {
            "class": "AutomatedGradualPruner",
            "initial_sparsity": 0.05,
            "final_sparsity": 0.5,
            "weights": weights,
        }
    ),
    st.dictionaries(names, st.tuples(st.floats(0, 1e-9), st.sampled_from(["3D", "Rows"])).map(list), min_size=1).map(
        lambda regims: {"class": "StructureParameterPruner", "threshold_criteria": "Max", "reg_regims": regims}
    ),
)


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    components = draw(st.dictionaries(names, pruners, min_size=1, max_size=3))
    args = st.sampled_from([{}, {"keep_mask": True}, {"mini_batch_pruning_frequency": 4}])
    policies = []
    for name in components:
        given_args = draw(args)
        inner = {"instance_name": name, **({"args": given_args} if given_args else {})}
        policies.append({"pruner": inner, **draw(timings)})
    return {"version": 1, "pruners": components, "policies": policies}


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_what_is_dumped_is_read_again(mapping: dict[str, Any]) -> None:
    text = dump(mapping)
    assert compose(text).value == mapping
    schedule = read_schedule(text)
    assert to_mapping(schedule) == mapping
    assert read_schedule(mapping) == schedule


def test_it_reads_like_a_schedule() -> None:
    mapping = {
        "policies": [{"pruner": {"instance_name": "p", "args": {"keep_mask": True}}, "epochs": [1, 2]}],
        "quantizers": {"q": {"class": "DorefaQuantizer", "overrides": {"fc": {"bits_weights": None}}}},
        "pruners": {"p": {"class": "BernoulliFilterPruner", "weights": ("a", "b")}},
        "mine": 3,
        "version": 1,
    }
    assert dump(mapping) == (
        "version: 1\n\n"
        "pruners:\n  p:\n    class: BernoulliFilterPruner\n    weights: [a, b]\n\n"
        "quantizers:\n  q:\n    class: DorefaQuantizer\n    overrides:\n      fc:\n        bits_weights: null\n\n"
        "mine: 3\n\n"
        "policies:\n- pruner:\n    instance_name: p\n    args:\n      keep_mask: true\n  epochs: [1, 2]\n"
    )


def test_absent_and_null_bits_stay_different() -> None:
    mapping = {
        "version": 1,
        "quantizers": {
            "q": {"class": "PACTQuantizer", "overrides": {"a": {"bits_weights": None}, "b": {"bits_activations": 4}}}
        },
        "policies": [{"quantizer": {"instance_name": "q"}, "starting_epoch": 0, "ending_epoch": 3, "frequency": 1}],
    }
    assert to_mapping(read_schedule(mapping)) == mapping
