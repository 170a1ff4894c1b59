"""Spaces in YAML files: what each form of a key becomes, and one line for each mistake."""

from __future__ import annotations

import pickle
from pathlib import Path

import optuna
import pytest

import search_spaces
from search_spaces import SpaceContext
from search_spaces.space import ANY_RUN, corners, describe
from search_spaces.yaml_space import file_space
from trainables.config import TrialConfig
from trainables.errors import UserError

FILE = """\
# Thresholds, and what decides
# for networks of ours
CAC_VAR_START_THR: {low: 0.9, high: 1, step: 0.03, start: 0.93}
CAC_VAR_START_ITR: {low: 0, high: 50}
CAC_RULE: {choices: [variance, linear, freezeout]}
CAC_RULE_START_ITR: {low: 1, high: 100, log: true, when: {CAC_RULE: [linear, freezeout]}}
CAC_RULE_END_ITR: {value: 300, when: {CAC_RULE: [linear, freezeout]}}
CAC_RULE_CUBIC: {choices: [0, 1], when: {CAC_RULE: freezeout}}
CAC_WHOLE_UNITS: 1
CAC_WATCH: [conv, linear]
lr: {low: 1e-3, high: 1e-1, log: true, meaning: how fast}
width: {choices: [16, 32]}
deep: {choices: [true, false], when: {width: 32}}
"""


def test_each_form_of_a_key() -> None:
    space = file_space("my.yaml", FILE)
    assert (space.name, space.method, space.description) == ("my.yaml", "gradskip", "Thresholds, and what decides")
    assert list(space.notes(ANY_RUN)) == ["for networks of ours"]
    found = {f.name: (f.low, f.high, f.step, f.log, f.choices, f.condition) for f in describe(space, ANY_RUN)}
    assert found == {
        "CAC_VAR_START_THR": (0.9, 0.99, 0.03, False, None, ""),  # 1 is not on the grid
        "CAC_VAR_START_ITR": (0, 50, 1, False, None, ""),
        "CAC_RULE": (None, None, None, False, ("variance", "linear", "freezeout"), ""),
        "CAC_RULE_START_ITR": (1, 100, 1, True, None, "CAC_RULE=linear or freezeout"),
        "CAC_RULE_CUBIC": (None, None, None, False, (False, True), "CAC_RULE=freezeout"),
        "lr": (0.001, 0.1, None, True, None, ""),
        "width": (None, None, None, False, (16, 32), ""),
        "deep": (None, None, None, False, (True, False), "width=32"),
    }
    assert dict(space.start(ANY_RUN)) == {
        "CAC_VAR_START_THR": 0.93, "CAC_VAR_START_ITR": 25, "CAC_RULE": "variance", "lr": 0.01, "width": 16,
    }  # fmt: skip
    assert (space.meaning("lr"), space.meaning("width")) == ("how fast", "option of the workload")
    for corner in corners(space, ANY_RUN):
        rule = corner["CAC_RULE"]
        assert corner["CAC_WATCH"] == ("conv", "linear")
        assert corner["CAC_WHOLE_UNITS"] is True
        assert (corner.get("CAC_RULE_END_ITR") == 300) == (rule != "variance")
        assert ("CAC_RULE_CUBIC" in corner) == (rule == "freezeout")
        assert ("deep" in corner) == (corner["width"] == 32)
    assert corners(pickle.loads(pickle.dumps(space)), ANY_RUN) == corners(space, ANY_RUN)


def test_it_is_searched_as_any_space(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(FILE)
    name = str(tmp_path / "my.yaml")
    assert search_spaces.read_files(f"agp+{name}", {}) == {name: FILE}
    assert search_spaces.read_files(name, {name: "kept"}) == {name: "kept"}
    space = search_spaces.load(name)
    (tmp_path / "my.yaml").unlink()
    assert search_spaces.load(name, {name: FILE}).options == space.options == ("lr", "width", "deep")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.enqueue_trial(dict(space.start(ANY_RUN)))
    for number in range(20):
        values = space.suggest(study.ask(), ANY_RUN)
        config = TrialConfig(method=space.method, workload="a:b", **values)
        assert (number == 0) <= (config.options == ("lr=0.01", "width=16"))
        assert 0.9 <= values["CAC_VAR_START_THR"] <= 0.99
        assert len(str(values["CAC_VAR_START_THR"])) <= 4  # no rounding errors


def test_numbers_may_be_shares_of_the_run_and_ranges_end_with_it() -> None:
    text = """
    gradient_start_itr: {low: 0, high: 0.9 steps, step: 0.1 steps, start: 0.5 steps}
    svrg_snapshot_every: {low: 5, high: 2000, log: true, at_most: steps, start: 100}
    warm: {low: 2, high: 0.5 epochs}
    late: {low: 0.01 steps, high: 60, log: true, start: 20}
    """
    assert file_space("s.yaml", "ends: {choices: [5 epochs, 9 steps]}").start(ANY_RUN) == {"ends": "5 epochs"}
    space = file_space("s.yaml", text)
    for steps, epochs, ends, start in (
        (300, 30, [(0, 270, 30), (5, 300, 1), (2, 15, 1), (3, 60, 1)], [150, 100, 8, 20]),
        (47, 4, [(0, 40, 4), (5, 47, 1), (2, 2, 1), (1, 60, 1)], [23, 47, 2, 20]),
        (3, 2, [(0, 2, 1), (3, 3, 1), (2, 2, 1), (1, 60, 1)], [1, 3, 2, 20]),
        (9_000, 2, [(0, 8100, 900), (5, 2000, 1), (2, 2, 1), (90, 90, 1)], [4500, 100, 2, 90]),
    ):
        context = SpaceContext(total_steps=steps, epochs=epochs)
        assert [(found.low, found.high, found.step) for found in describe(space, context)] == ends
        assert list(space.start(context).values()) == start


def test_a_variable_has_other_ranges_in_other_branches() -> None:
    text = """
    CAC_RULE: {choices: [plasticity, gradient_norm]}
    plasticity.CAC_RULE_TOLERANCE: {low: 0.1, high: 0.2, when: {CAC_RULE: plasticity}}
    gradient_norm.CAC_RULE_TOLERANCE: {low: 0.5, high: 0.8, when: {CAC_RULE: gradient_norm}}
    """
    space = file_space("s.yaml", text)
    found = {(corner["CAC_RULE"], corner["CAC_RULE_TOLERANCE"]) for corner in corners(space, ANY_RUN)}
    assert found == {("plasticity", 0.1), ("plasticity", 0.2), ("gradient_norm", 0.5), ("gradient_norm", 0.8)}
    assert {asked.name for asked in describe(space, ANY_RUN)} == {
        "CAC_RULE", "plasticity.CAC_RULE_TOLERANCE", "gradient_norm.CAC_RULE_TOLERANCE",
    }  # fmt: skip


def test_lists_of_layers_are_choices() -> None:
    text = "CAC_STOP_LAYER_NUM: {choices: [3, [3, 9]]}\nCAC_STOP_LAYER_ITR: {choices: ['10', [10, 20]]}"
    with pytest.raises(UserError, match=r"^space s\.yaml: "):
        file_space("s.yaml", text)  # both ends of all choices: two layers and one iteration
    space = file_space("s.yaml", "CAC_STOP_LAYER_NUM: {choices: [3, [3, 9]]}")
    assert [corner["CAC_STOP_LAYER_NUM"] for corner in corners(space, ANY_RUN)][:2] == [(3,), (3, 9)]


def test_fields_of_compression() -> None:
    text = "pruning_frequency: {choices: [1, 2]}\nagp_final_sparsity: {low: 0, high: 0.5}"
    space = search_spaces.load("s.yaml", {"s.yaml": text})
    assert (space.method, space.saving) == ("compression", "sparse-inference")
    assert space.meaning("pruning_frequency") == "every how many epochs between them"
    assert space.start(ANY_RUN)["agp_final_sparsity"] == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "space s.yaml must be a map of keys such as CAC_VAR_MT_THR: {low: 0.9, high: 0.99}, got nothing"),
        ("- 1", "space s.yaml must be a map of keys such as CAC_VAR_MT_THR: {low: 0.9, high: 0.99}, got [1]"),
        ("a: {low: 1,\nb: [", "space s.yaml:2 is not YAML: "),
        ("quantizers: {q: {class: PostTrainLinearQuantizer}}", "s.yaml is a compression schedule, no space: "),
        ("lr: {low: 1, high: 2}\nlr: 3", "space s.yaml: lr must be there once, line 2"),
        (
            "lr: {lo: 1, high: 2}",
            "space s.yaml: unknown key of lr 'lo': did you mean 'low'? Valid: at_most, choi",
        ),
        ("lr: {low: 1}", "space s.yaml: lr needs low and high, got no high"),
        ("lr: {low: 2, high: 1}", "space s.yaml: lr needs low <= high, got low 2 and high 1"),
        ("lr: {low: 0, high: 1, log: true}", "space s.yaml: lr needs low > 0 with log, got 0"),
        ("lr: {low: 1, high: 4, log: true, step: 2}", "space s.yaml: lr takes log or step, got log and step 2"),
        ("lr: {low: 1, high: 4, step: 0}", "space s.yaml: lr needs a step > 0, got 0"),
        ("lr: {low: 1, high: 4, log: 3}", "space s.yaml: lr needs true or false for log, got 3"),
        ("lr: {low: 1, high: 4, at_most: weeks}", "space s.yaml: lr needs steps or epochs for at_most, got 'weeks'"),
        ("lr: {low: 1, high: 0.9 weeks}", "space s.yaml: lr needs a number for high, got '0.9 weeks'"),
        ("lr: {low: a, high: 4}", "space s.yaml: lr needs a number for low, got 'a'"),
        ("lr: {low: 1, high: 4, start: 5}", "space s.yaml: lr needs a start in [1, 4], got 5"),
        ("lr: {low: 1, high: 4, start: 1.5}", "space s.yaml: lr needs an integer for start, got 1.5"),
        ("lr: {low: 1, high: 4, choices: [3]}", "lr takes low and high, or choices, or value, got low, high, choices"),
        ("lr: {}", "space s.yaml: lr takes low and high, or choices, or value, got {}"),
        ("lr: {choices: [1], log: true}", "space s.yaml: lr takes log with low and high alone, got choices and log"),
        ("lr: {choices: []}", "space s.yaml: lr needs at least one choice, got none"),
        ("lr: {choices: 3}", "space s.yaml: lr needs a list of choices, got 3"),
        ("lr: {choices: [1, 1]}", "space s.yaml: lr needs different choices, got 1 twice"),
        ("lr: {choices: [1, 2], start: 3}", "space s.yaml: lr needs a start among its choices, got 3"),
        (
            "gradient_layers: [[a], [b, c]]",
            "space s.yaml: gradient_layers must be one value, got [['a'], ['b', 'c']]: give several as "
            "{choices: [...]}",
        ),
        ("lr: {choices: [{a: 1}]}", "space s.yaml: lr must be a number or a text, got {'a': 1}"),
        ("lr: {choices: [1, 2], meaning: 3}", "space s.yaml: lr needs a text for meaning, got 3"),
        ("lr: {value: 1, start: 3}", "space s.yaml: lr takes start with a range or choices, got value and start"),
        ("lr: 3", "space s.yaml searches nothing: ask for a range or for choices"),
        ("lr:", "space s.yaml: lr must be a number or a text, got None"),
        ("seed: {low: 1, high: 3}", "space s.yaml can't set seed: --seed says it"),
        ("metric: {choices: [a, b]}", "space s.yaml can't set metric: --metric of a search says it"),
        ("a-b: {low: 1, high: 3}", "a key of space s.yaml must be the name of a variable or an option, got 'a-b'"),
        ("CAC_RUL: {choices: [linear]}", "space s.yaml: unknown variable 'CAC_RUL': did you mean 'CAC_RULE'? Valid: "),
        ("CAC_RULE: {choices: [linar]}", "space s.yaml: CAC_RULE must be"),
        ("CAC_RULE: {low: 1, high: 2}", "space s.yaml: CAC_RULE is no number: give choices instead of low and high"),
        ("CAC_VAR_START_THR: {low: 0.5, high: 1.5}", "space s.yaml: CAC_VAR_START_THR must be in (0, 1] or -1 (off)"),
        ("CAC_VAR_START_ITR: {low: 0.5, high: 3}", "space s.yaml: CAC_VAR_START_ITR must be an integer >= 0"),
        ("CAC_VAR_START_ITR: {low: 0, high: 3, step: .5}", "space s.yaml: CAC_VAR_START_ITR must be an integer >= 0"),
        (
            "pruning_start_epoch: {low: -1, high: 3}",
            "space s.yaml: pruning_start_epoch must be an integer >= 0, got -1",
        ),
        ("a: {choices: [1, 2], when: 3}", "space s.yaml: when of a must be a map such as {CAC_RULE: linear}, got 3"),
        ("a: {choices: [1, 2], when: {b: 1}}", "space s.yaml: when of a needs keys above it, got 'b': there is none"),
        ("b: 1\na: {choices: [1, 2], when: {b: 1}}", "space s.yaml: when of a needs a key with choices, b has none"),
        ("b: {choices: [1, 2]}\na: {value: 1, when: {b: 3}}", "when of a needs choices of b (1, 2), got 3"),
        ("CAC_RULE: {choices: [variance, linear]}", "space s.yaml: CAC_RULE_END_ITR must be set for CAC_RULE=linear"),
    ],
)
def test_a_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        file_space("s.yaml", text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^cannot read space no\.yaml: No such file or directory$"):
        search_spaces.load("auto_thresholds+no.yaml")
    Path("bytes.yml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"^space bytes\.yml must be UTF-8 text$"):
        search_spaces.load("bytes.yml")
    Path("large.yaml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(UserError, match=r"^space large\.yaml must not be larger than 1 MB$"):
        search_spaces.load("large.yaml")
