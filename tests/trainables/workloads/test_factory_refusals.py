"""What a function of the user's may not return, state that it hides, and what is said of both."""

from __future__ import annotations

import re

import pytest
from user_factories import Write, check, train

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.registry import is_factory
from trainables.training.doctor.determinism import why_not_repeatable
from trainables.workloads import build

#: Counts in one of many places, and returns what depends on the count where that is asked for.
COUNTING = """
import itertools, numpy as np
CALLS = 0
class Counting(nn.Sequential):
    seen = []
    def __init__(self, *layers):
        super().__init__(*layers)
        self.calls, self._whole, self._each = 0, np.int64(0), itertools.count()
        self.kept = torch.zeros(1)
    def forward(self, x):
        global CALLS
        {}
        return super().forward(x) * ({})
def make():
    return {{**parts(), "model": lambda: Counting(nn.Linear(4, 3))}}
"""
KEEPS = r"the model keeps {} outside of its state_dict\(\)"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (COUNTING.format("self.calls += 1", "min(1.0, self.calls / 1000)"), KEEPS.format("calls")),
        (COUNTING.format("self._whole += 1", 1), KEEPS.format("_whole")),
        (COUNTING.format("next(self._each)", 1), KEEPS.format("_each")),
        (COUNTING.format("self.kept = self.kept + 1", 1), KEEPS.format("kept")),
        (COUNTING.format("self.seen.append(0)", 1), KEEPS.format(r"Counting\.seen")),
        (COUNTING.format("CALLS += 1", 1), KEEPS.format(r"\w+\.CALLS")),
        (
            """
import numpy as np
class Own(torch.utils.data.Dataset):
    def __init__(self): self.random = np.random.default_rng(0)
    def __len__(self): return 50
    def __getitem__(self, n):
        images, labels = data(0, 50)[n]
        return images + float(self.random.normal()), labels
def make():
    return {**parts(), "train": DataLoader(Own(), batch_size=8)}
""",
            r"0\.weight and 3 more came out differently when 8 steps were trained again",
        ),
        (
            """
import random
def make():
    own = random.Random(0)
    return {**parts(), "evaluate": lambda model, batches, device: own.random()}
""",
            r"two evaluations of one model gave 0\.8\d+ and 0\.7\d+",
        ),
        (
            """
import random
def make():
    return {**parts(), "evaluate": lambda model, batches, device: random.random()}
""",
            "",  # on a generator that every run seeds: the same in each
        ),
        ("def make(): return parts()", ""),
        (
            """
import uuid, time
class Named(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.name, self._built = uuid.uuid4().hex, time.time()
        self.register_buffer("unset", torch.full((2,), float("nan")))
    def get_extra_state(self): return {"version": 3}
    def set_extra_state(self, state): pass
def make():
    return {**parts(), "model": lambda: Named(nn.Linear(4, 3))}
""",
            "",  # what no training changes
        ),
        (
            """
import numpy as np
def make():
    own = np.random.default_rng(0)
    def evaluate(model, batches, device):
        batches = list(batches)
        picked = own.choice(len(batches), min(3, len(batches)), replace=False)
        return sum(float(batches[n][0].mean()) for n in picked) / 100
    return {**parts(), "validation": DataLoader(data(0, 60), batch_size=6), "evaluate": evaluate}
""",
            r"two evaluations of one model gave .* and .*",
        ),
    ],
)
def test_hidden_state_is_found(body: str, reason: str, write: Write) -> None:
    found = why_not_repeatable(TrialConfig(workload=write(body), method="none", epochs=2))
    assert re.fullmatch(reason, found), found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def make(): return None", "returned None: return a dict of model"),
        ("def make(): return model()", "returned a model: return a dict"),
        ("def make(): return {}", "must return model: there is no default for it"),
        ("def make(): return {**parts(), 'trian': 1}", "unknown part of workload .* did you mean 'train'"),
        ("def make(): return {**parts(), 'model': model()}", "must be a function .* a model that is built already"),
        ("def make(): return {**parts(), 'loss': 3}", r"loss .* a function \(model, batch\) -> Tensor, got int"),
        ("def make(): return {**parts(), 'validation': 3}", "validation .* must be batches, such as .*, got int"),
        ("def make(): return {**parts(), 'train': iter([1])}", "train .* can be iterated only once"),
        ("def make(): return {**parts(), 'train': []}", "train .* is empty"),
        ("def make(): return {**parts(), 'validation': []}", "validation .* is empty"),
        ("def make(): return {**parts(), 'epochs': 0}", "epochs .* must be an integer >= 1, got 0"),
        ("def make(): return {**parts(), 'fingerprint': 5}", "fingerprint .* must be text, got 5"),
        ("def make(): return {**parts(), 'model': lambda: 5}", "model .* must return an nn.Module, got int"),
        ("def make(): return {**parts(), 'model': nn.Flatten}", "must have parameters that train, got none"),
        ("def make(): return {**parts(), 'optimizer': lambda p: 5}", "optimizer .* return a torch optimizer, got int"),
        ("def make(): return {**parts(), 'schedule': lambda o, n: 5}", "schedule .* must return a scheduler .* int"),
        ("def make(): return {**parts(), 'loss': lambda m, b: m(b[0])}", r"got a tensor of shape \(8, 3\)"),
        ("def make(): return {**parts(), 'loss': lambda m, b: torch.tensor(1.0)}", "got one without a gradient"),
        ("def make(): return {**parts(), 'loss': lambda m, b: 1 / 0}", "raised ZeroDivisionError: division"),
        ("def make(): return {**parts(), 'evaluate': lambda m, b, d: 'x'}", "must return a number, .*, got str"),
        ("def make(): return {**parts(), 'evaluate': lambda m, b, d: 93.5}", r"must return a fraction, .* got 93\.5"),
        ("def make(): return {**parts(), 'model': lambda: nn.Linear(4, 2)}", r"must be in 0\.\.1, .* got 2"),
        ("def make(): return {**parts(), 'train': [torch.rand(2, 4)]}", "loss .* must be given, .* hold 1 tensors"),
        (
            "def make(): return {**parts(), 'validation': [(torch.rand(2, 4), torch.zeros(2, 1, dtype=torch.long))]}",
            r"evaluate .* must be given, .* \(2,\) here, and the targets are \(2, 1\)",
        ),
        (
            "def make(): return {**parts(), 'validation': [(torch.rand(2, 4), torch.eye(3)[:2])]}",
            r"evaluate .* must be given, .* the targets are \(2, 3\)",
        ),
        (  # a regression
            "def make(): return {**parts(), 'model': lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "
            "'loss': lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1].float())}",
            r"evaluate .* must be given, .* \(\) here, and the targets are \(8,\)",
        ),
        (
            "def make(): return {**parts(), 'train': [(torch.rand(2, 4), torch.zeros(3, dtype=torch.long))]}",
            "as many targets as inputs, got 3 and 2 in train",
        ),
        ("def make(): return {**parts(), 'train': [(torch.rand(2, 4), ['a', 'b'])]}", r"got str as a batch\[1\]\[0\]"),
        (
            "def make(): return {**parts(), 'train': DataLoader(data(0, 9), num_workers=1, persistent_workers=True)}",
            "must not keep its worker processes",
        ),
        ("def make(): raise OSError('no data')", "raised OSError: no data"),
        ("def make(width): return parts()", "needs --option width=VALUE"),
        ("make = 5", "must be a function, got int"),
        ("def mkae(): pass", "unknown name in own_training 'make': did you mean 'mkae'"),
        ("1 / 0", "importing own_training failed: ZeroDivisionError: division by zero"),
        ("import no_such_thing", "importing own_training failed: No module named 'no_such_thing'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(write: Write, body: str, message: str) -> None:
    name = write(body)
    with pytest.raises(UserError, match=message) as told:
        check(name)
    assert "\n" not in str(told.value)


def test_a_loader_without_a_length_needs_steps_per_epoch(write: Write) -> None:
    endless = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.rand(4), torch.tensor(1)
def make(steps: int = 0):
    own = {**parts(), "train": DataLoader(Endless(), batch_size=4)}
    return {**own, "steps_per_epoch": steps} if steps else own
"""
    name = write(endless)
    with pytest.raises(UserError, match="has no length: return steps_per_epoch"):
        check(name)
    check(name, "steps=3")
    assert train(name, workload_options=("steps=3",))[-1]["step"] == 6
    short = write("def make(): return {**parts(), 'steps_per_epoch': 9}", module="short_one")
    with pytest.raises(UserError, match="gave 7 batches in epoch 0, not 9"):
        train(short)


def test_unknown_names_and_modules() -> None:
    assert is_factory("a.b:c")
    assert not any(is_factory(name) for name in ("digits", "a b:c", "a:", ":c", "a:b:c", "a.:c"))
    with pytest.raises(UserError, match=r"unknown workload 'digit': did you mean 'digits'.*package\.module:function"):
        TrialConfig(workload="digit")
    with pytest.raises(UserError, match=r"there is no module no_such_module, neither installed nor in .*"):
        build("no_such_module:make")


def test_an_evaluation_that_becomes_a_percentage_is_refused(write: Write) -> None:
    name = write(
        "calls = []\ndef share(model, batches, device):\n    calls.append(1)\n"
        "    return 0.5 if len(calls) < 2 else 50.0\n"
        "def make(): return {**parts(), 'evaluate': share}"
    )
    check(name)
    with pytest.raises(UserError, match=r"evaluate .* must return a fraction, .* got 50"):
        train(name)
