"""Spaces of the user's own from a function: what they become, and one line for each mistake."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

import search_spaces
from search_spaces.space import ANY_RUN, corners, describe
from trainables.config import TrialConfig
from trainables.errors import UserError

MINE = '''
from search_spaces import Space

def thresholds(trial, context):
    """Thresholds of mine."""
    values = {"CAC_VAR_START_THR": trial.suggest_float("CAC_VAR_START_THR", 0.8, 0.9, step=0.02), "lr": 0.1}
    values["CAC_RULE"] = trial.suggest_categorical("CAC_RULE", ("variance", "freezeout"))
    if values["CAC_RULE"] == "freezeout":
        values["CAC_RULE_END_ITR"] = context.total_steps
        values["CAC_RULE_START_ITR"] = trial.suggest_int("start", 1, 9)
    return values

def start(context):
    return {"CAC_BRAKING_DISTANCE": 3}

def braking(trial, context):
    return {"CAC_BRAKING_DISTANCE": trial.suggest_int("CAC_BRAKING_DISTANCE", 0, context.total_steps)}

SPACE = Space(name="x", method="gradskip", suggest=braking, start=start, notes=lambda context: ["mine"])

def rates(trial, context):
    nesterov = trial.suggest_categorical("n", (True, False))
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True), "nesterov": nesterov}
'''

_numbers = itertools.count()
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module of the user's into the working directory; return its name, another each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(source: str) -> str:
        name = f"own_space_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return module


def test_a_function_in_the_form_of_ours_is_a_space(write: Write) -> None:
    name = f"{write(MINE)}:thresholds"
    space = search_spaces.load(name)
    assert (space.name, space.method, space.saving, space.options) == (name, "gradskip", "training", ("lr",))
    assert space.description == "Thresholds of mine."
    assert {found.name: found.condition for found in describe(space, ANY_RUN)} == {
        "CAC_VAR_START_THR": "", "CAC_RULE": "", "start": "CAC_RULE=freezeout",
    }  # fmt: skip
    # The middle of the grid 0.80, 0.82, ..., 0.90 and the first choice.
    assert dict(space.start(ANY_RUN)) == {"CAC_VAR_START_THR": 0.84, "CAC_RULE": "variance"}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(10):
        values = space.suggest(study.ask(), ANY_RUN)
        assert values["workload_options"] == ("lr=0.1",)
        assert values.get("CAC_RULE_END_ITR", 300) == 300
        TrialConfig(method=space.method, workload="a:b", **values)
    assert corners(pickle.loads(pickle.dumps(space)), ANY_RUN) == corners(space, ANY_RUN)


def test_a_space_object_has_its_own_start_and_notes(write: Write) -> None:
    module = write(MINE)
    space = search_spaces.load(f"{module}:SPACE")
    assert (dict(space.start(ANY_RUN)), space.notes(ANY_RUN)) == ({"CAC_BRAKING_DISTANCE": 3}, ["mine"])
    # Joined with one of ours that does not search the same, and with options of the workload.
    both = search_spaces.load(f"{module}:SPACE+stop_rules+{module}:rates".replace("stop_rules", "agp"))
    assert (both.method, both.saving, both.options) == ("gradskip+compression", "both-sparse", ("lr", "nesterov"))
    assert dict(both.start(ANY_RUN))["lr"] == pytest.approx(10**-1.5, rel=1e-5)  # the geometric middle
    [low, *_] = corners(both, ANY_RUN)
    assert low["workload_options"] == ("lr=0.001", "nesterov=true")
    assert "lr, nesterov; each combination of their values is also trained once" in both.notes(ANY_RUN)[-1]
    rules = search_spaces.load(f"stop_rules+{module}:rates")  # no compression: any rule
    assert rules.method == "gradskip"


def body(line: str) -> str:
    return f"def f(trial, context):\n    {line}\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (body("return 3"), "space M:f must return a dict, such as {'CAC_VAR_MT_THR': 0.95}, got int"),
        (body("return {'CAC_VAR_START_THR': 0.9}"), "space M:f searches nothing: ask for a range or for choices"),
        (body("return trial.suggest_floats()"), "space M:f raised AttributeError: '_CheckedTrial' object has no"),
        (body("raise OSError('no disk')"), "space M:f raised OSError: no disk"),
        (body("return {'epochs': trial.suggest_int('e', 1, 2)}"), "space M:f can't set epochs: --epochs says it"),
        (body("return {'a b': trial.suggest_int('e', 1, 2)}"), "a key of space M:f must be the name of a variable or"),
        (
            body("return {'CAC_VAR_STRT_THR': trial.suggest_float('t', 0.1, 0.2)}"),
            "space M:f: unknown variable 'CAC_VAR_STRT_THR': did you mean 'CAC_VAR_START_THR'? Valid: CAC_BRAKING",
        ),
        (
            body("return {'CAC_VAR_START_THR': trial.suggest_float('t', 0.1, 2)}"),
            "space M:f: CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 2",
        ),
        (body("return {'lr': trial.suggest_float('lr', 2, 1)}"), "M:f: lr needs low <= high, got low 2 and high 1"),
        (body("return {'lr': trial.suggest_categorical('lr', [(1,)])}"), "M:f: lr needs choices that are numbers or"),
        (body("return {'lr': [trial.suggest_int('lr', 1, 2)]}"), "space M:f: lr must be a number or a text, got [1]"),
        (
            body("return {f'o{n}': trial.suggest_categorical(f'o{n}', (1, 2, 3)) for n in range(8)}"),
            "space M:f has more than 2000 combinations of choices, and a search checks each: give numbers by low, ",
        ),
        ("f = 3", "space M:f must be a function that takes a trial and a context, or a Space, got int"),
        ("g = 3", "space M:f: unknown name in M 'f': Valid: g"),
        ("1 / 0", "space M:f: importing M failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_is_one_line(source: str, message: str, write: Write) -> None:
    module = write(source)
    with pytest.raises(UserError) as raised:
        search_spaces.load(f"{module}:f")
    said = str(raised.value).replace(module, "M")
    assert message in said
    assert "\n" not in str(raised.value)


def test_a_start_with_an_unknown_parameter(write: Write) -> None:
    module = write(MINE.replace('{"CAC_BRAKING_DISTANCE": 3}', '{"CAC_BRAKING": 3}'))
    with pytest.raises(UserError, match=r"start of space .*:SPACE: unknown parameter 'CAC_BRAKING': did you mean"):
        search_spaces.load(f"{module}:SPACE")


def test_spaces_that_share_a_key_or_a_parameter(write: Write) -> None:
    module = write(MINE)
    with pytest.raises(UserError, match=r"^spaces auto_thresholds and .*:SPACE both search CAC_BRAKING_DISTANCE: join"):
        search_spaces.load(f"auto_thresholds+{module}:SPACE")
    with pytest.raises(UserError, match=r"^spaces .*:thresholds and .*:rates both search lr: join others$"):
        search_spaces.load(f"{module}:thresholds+{module}:rates")
    with pytest.raises(UserError, match=r"can't be searched together with compression, got agp\+"):
        search_spaces.load(f"agp+{module}:thresholds")
