"""A workload from a function of the user's: what it may return, what is said of what it may not, and that it trains."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.registry import is_factory
from trainables.training.doctor.determinism import repetition
from trainables.training.run import TrainingRun
from trainables.workloads import build, default_epochs, factory
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.seeded_loader import seeded_epoch
from trainables.workloads.user_code import code_digest

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator) + labels[:, None], labels)

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

def parts():
    return {
        "model": model,
        "train": DataLoader(data(0, 50), batch_size=8, shuffle=True),
        "validation": DataLoader(data(1, 20), batch_size=8),
    }
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into the working directory; the name of its function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    factory.load.cache_clear()

    def written(body: str, *, module: str = "own_training", head: str = HEAD) -> str:
        (tmp_path / f"{module}.py").write_text(head + "\n" + body)
        sys.modules.pop(module, None)
        factory.load.cache_clear()
        return f"{module}:make"

    return written


def check(name: str, *options: str) -> None:
    build(name, options).check(0)


def train(name: str, **more: Any) -> list[dict[str, Any]]:
    rows = []
    with TrainingRun(TrialConfig(workload=name, **{"epochs": 2, "method": "none", **more})) as run:
        while not run.finished:
            rows.append(run.train_epoch())
    return rows


def test_the_least_that_a_factory_returns_trains_with_the_defaults(write: Write) -> None:
    name = write("def make(): return parts()")
    check(name)
    assert default_epochs(name) == 30
    rows = train(name)
    assert rows[-1]["step"] == 2 * 7  # 50 samples in batches of 8
    assert rows[-1]["learning_rate"] == pytest.approx(0, abs=1e-9)  # cosine, to its end
    assert 0 <= rows[-1]["accuracy"] <= 1
    assert rows[-1]["test_accuracy"] is None
    # 2 * (4*8 + 8*3) FLOPs a sample forward; backward the same for weights, and once more for the second layer's input
    assert rows[-1]["executed_flops"] == 2 * 50 * (2 * 56 + 2 * 56 + 2 * 24)


def test_default_loss_and_accuracy_are_cross_entropy_and_hits(write: Write) -> None:
    workload = build(write("def make(): return parts()"))
    torch.manual_seed(0)
    model = workload.make_model().eval()
    batch = next(workload.train_batches(0, 0))
    logits = model(batch[0])
    by_hand = -torch.log_softmax(logits, 1)[torch.arange(len(batch[1])), batch[1]].mean()
    assert float(workload.loss(model, batch).detach()) == pytest.approx(float(by_hand))
    import own_training

    images, labels = own_training.data(1, 20).tensors
    hits = sum(int(model(images[n : n + 1]).argmax()) == int(labels[n]) for n in range(20))
    assert workload.evaluate(model, "validation", torch.device("cpu")) == pytest.approx(hits / 20)


def test_every_part_of_the_users_is_used(write: Write) -> None:
    name = write(
        """
def make(width: int = 4, rate: float = 0.5):
    import torch.nn.functional as F
    own = parts()
    own["test"] = DataLoader(data(2, 10), batch_size=5)
    own["loss"] = lambda model, batch: 2 * F.cross_entropy(model(batch[0]), batch[1])
    own["evaluate"] = lambda model, batches, device: len(list(batches)) / 100
    own["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=rate)
    own["schedule"] = lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 1, 1 / total, total)
    own["epochs"] = width
    return own
"""
    )
    check(name, "width=3")
    assert default_epochs(name, ["width=3"]) == 3
    workload = build(name, ["rate=0.25"])
    optimizer = workload.make_optimizer(workload.make_model().named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.25
    rows = train(name)
    assert rows[-1]["accuracy"] == 0.03
    assert rows[-1]["test_accuracy"] == 0.02


def test_an_object_with_attributes_or_a_workload_will_do(write: Write) -> None:
    name = write("from types import SimpleNamespace\ndef make(): return SimpleNamespace(other=1, **parts())")
    check(name)
    assert train(name)[-1]["step"] == 14
    name = write("from trainables.workloads.digits import Digits\ndef make(): return Digits()", module="subclass_one")
    assert build(name).name == name
    assert build(name).steps_per_epoch == 10


def test_batches_of_dicts_reach_the_users_loss_as_they_were(write: Write) -> None:
    name = write(
        """
def make():
    own = parts()
    def collate(samples):
        return {"x": torch.stack([s[0] for s in samples]), "more": [torch.stack([s[1] for s in samples])]}
    own["train"] = DataLoader(data(0, 50), batch_size=8, collate_fn=collate)
    own["loss"] = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["more"][0])
    return own
"""
    )
    check(name)
    assert train(name)[-1]["train_loss"] > 0


def test_a_fork_equals_the_run_alone_with_shuffling_dropout_and_augmentation(write: Write) -> None:
    name = write(
        """
import random, numpy as np
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 50
    def __getitem__(self, n):
        images, labels = data(0, 50)[n]
        return images + random.random() + float(np.random.rand()) + torch.rand(1), labels
def make():
    return {**parts(), "train": DataLoader(Noisy(), batch_size=8, shuffle=True)}
"""
    )
    assert repetition(TrialConfig(workload=name, method="none", epochs=2), steps=6).reason == ""


def test_a_validation_split_without_a_length_has_a_mean_loss(write: Write) -> None:
    """A loader of an iterable data set was asked for its length, which it has not, after the first epoch."""
    name = write(
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([data(0, 50)[n] for n in range(50)])
def make():
    return {**parts(), "validation": DataLoader(Stream(), batch_size=20)}
"""
    )
    with TrainingRun(TrialConfig(workload=name, method="none", epochs=1)) as run:
        run.model.eval()
        streamed = run.workload.mean_loss(run.model, "validation", run.device)
        (batch,) = DataLoader(run.workload._made.validation.dataset, batch_size=50)  # type: ignore[attr-defined]
        assert streamed == pytest.approx(float(run.workload.loss(run.model, tuple(batch)).detach()))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            """
class Counting(nn.Sequential):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 1000)
def make():
    return {**parts(), "model": lambda: Counting(nn.Linear(4, 3))}
""",
            r"the model keeps calls outside of its state_dict\(\)",
        ),
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
        *(
            (
                f"""
import itertools, numpy as np
CALLS = 0
class Counting(nn.Sequential):
    seen = []
    def __init__(self, *layers):
        super().__init__(*layers)
        self._calls, self._whole, self._each = 0, np.int64(0), itertools.count()
        self.kept = torch.zeros(1)
    def forward(self, x):
        global CALLS
        {line}
        return super().forward(x)
def make():
    return {{**parts(), "model": lambda: Counting(nn.Linear(4, 3))}}
""",
                rf"the model keeps {name} outside of its state_dict\(\)",
            )
            for line, name in (
                ("self._calls += 1", "_calls"),
                ("self._whole += 1", "_whole"),
                ("next(self._each)", "_each"),
                ("self.kept = self.kept + 1", "kept"),
                ("self.seen.append(0)", r"Counting\.seen"),
                ("CALLS += 1", r"\w+\.CALLS"),
            )
        ),
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
    found = repetition(TrialConfig(workload=write(body), method="none", epochs=2)).reason
    assert re.fullmatch(reason, found), found


def test_gradient_skip_stops_layers_of_a_users_model(write: Write) -> None:
    name = write("def make(): return parts()")
    rows = train(name, method="gradskip", CAC_STOP_LAYER_NUM=(1,), CAC_STOP_LAYER_ITR=(4,))
    assert rows[-1]["stopped_through"] == 1
    # From the sixth step on, 60 of the 100 samples, nothing of the first layer's backward pass is left.
    saved = 60 / 100 * (2 * 32 + 2 * 24) / (2 * 56 + 2 * 56 + 2 * 24)
    assert rows[-1]["compute_saved"] == pytest.approx(saved)


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
        ("def make(): return {**parts(), 'evaluate': lambda m, b, d: 'x'}", "must return a number, got str"),
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


def test_options_reach_the_function_in_their_types(write: Write) -> None:
    name = write(
        "def make(width: int, rate: float = 0.5, name: str | None = None, flag=True):\n"
        "    assert (type(width), type(rate), name, flag) == (int, float, None, False)\n"
        "    return parts()"
    )
    check(name, "width=3", "rate=1", "name=none", "flag=no")
    with pytest.raises(UserError, match=r"option width of workload .* must be an integer, got 'x'"):
        check(name, "width=x")
    with pytest.raises(UserError, match=r"unknown option of workload .* 'widht': did you mean 'width'"):
        check(name, "width=3", "widht=4")
    bare = write("def make(): return parts()", module="bare_one")
    with pytest.raises(UserError, match="takes no options, got width=3: leave it out"):
        check(bare, "width=3")


def test_the_fingerprint_changes_with_code_beside_the_module_and_with_data(write: Write, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("SIZE = 8\n")
    name = write("import beside\ndef make(): return parts()")
    first, digest = build(name).fingerprint(), code_digest("own_training")
    assert build(name).fingerprint() == first
    (tmp_path / "beside.py").write_text("SIZE = 9\n")
    assert code_digest("own_training") != digest
    (tmp_path / "unrelated.py").write_text("SIZE = 9\n")
    (tmp_path / "beside.py").write_text("SIZE = 8\n")
    assert code_digest("own_training") == digest
    assert build(name).fingerprint() == first
    (tmp_path / "numbers.pt").write_text("0")
    body = "import pathlib\ndef make():\n    n = int(pathlib.Path('numbers.pt').read_text())\n"
    body += "    return {**parts(), 'train': DataLoader(data(n, 50), batch_size=8)}"
    reads = write(body, module="reading")
    before = build(reads).fingerprint()
    (tmp_path / "numbers.pt").write_text("1")
    factory.load.cache_clear()
    assert build(reads).fingerprint() != before


def test_a_random_split_is_the_same_in_every_process(write: Write) -> None:
    name = write(
        "def make():\n    a, b = torch.utils.data.random_split(data(0, 50), [40, 10])\n"
        "    return {**parts(), 'train': DataLoader(a, batch_size=40), 'validation': DataLoader(b)}"
    )
    torch.manual_seed(1)
    first = next(build(name).train_batches(0, 0))
    factory.load.cache_clear()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = next(build(name).train_batches(0, 0))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


# --- batches and their order ----------------------------------------------------------------------------------------


class Drawing(Dataset[torch.Tensor]):
    """Draws from every generator that a transform may use."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()), float(torch.rand(()))])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_an_epochs_batches_depend_on_epoch_and_seed_alone(workers: int, own: bool) -> None:
    generator = torch.Generator() if own else None
    loader = DataLoader(Drawing(), batch_size=2, shuffle=True, num_workers=workers, generator=generator)

    def epoch(number: int, seed: int) -> torch.Tensor:
        torch.manual_seed(random.randrange(1000))  # whatever the process did before
        random.seed()
        batches = []
        for batch in seeded_epoch(loader, number, seed):
            torch.rand(3), random.random(), np.random.rand()
            batches.append(batch)
        return torch.cat(batches)

    first = epoch(0, 0)
    # numpy's generator is the workers' own matter: torch seeds it in them since 1.9.
    assert torch.equal(first, epoch(0, 0))
    assert not torch.equal(first, epoch(1, 0))
    assert not torch.equal(first, epoch(0, 1))
    assert sorted(first[:, 0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_the_process_own_generators_go_on_as_if_no_loader_had_drawn() -> None:
    loader = DataLoader(Drawing(), batch_size=2, shuffle=True)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for _ in seeded_epoch(loader, 0, 0):
        pass
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert drawn == (float(torch.rand(())), random.random(), float(np.random.rand()))


def test_samplers_are_told_the_epoch() -> None:
    dataset = TensorDataset(torch.arange(12))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    orders = [torch.cat([b[0] for b in seeded_epoch(loader, epoch, 0)]).tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_batches_go_flat_and_back() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    batch = {"x": torch.ones(2), "y": [torch.zeros(1), (torch.ones(3), pair(torch.ones(4), torch.ones(5)))]}
    flat = flatten(batch)
    assert [len(t) for t in flat] == [2, 1, 3, 4, 5]
    back = unflatten(structure_of(batch), flat)
    assert back["y"][1][1].b is flat[4]
    assert isinstance(back["y"][1][1], pair)
    with pytest.raises(ValueError, match="2 tensors do not fit"):
        unflatten(structure_of([torch.ones(1)]), (torch.ones(1), torch.ones(1)))
    with pytest.raises(UserError, match=r"got int as a batch\['n'\]"):
        flatten({"n": 3})
    with pytest.raises(UserError, match="at least one tensor"):
        flatten([])


def test_model_given_as_a_class(write: Write) -> None:
    net = "class Net(nn.Linear):\n    def __init__(self): super().__init__(4, 3)\n"
    name = write(net + "def make(): return {**parts(), 'model': Net}")
    check(name)
    assert isinstance(build(name).make_model(), nn.Linear)


def test_the_example_of_the_docs_trains(write: Write) -> None:
    page = Path(__file__).parents[3] / "docs" / "own-training.md"
    blocks = page.read_text().split("```python\n")
    code = next(block for block in blocks if block.startswith("# my_project/training.py")).split("```")[0]
    assert len(code.strip().splitlines()) <= 31  # the path, and 30 lines
    name = write("make = make_workload", head=code)
    check(name, "width=4")
    assert default_epochs(name) == 10
    rows = train(name, workload_options=("width=4", "batch_size=250"))
    assert rows[-1]["step"] == 8
    assert 0 <= rows[-1]["test_accuracy"] <= 1


def test_a_class_for_each_place_counts_each_place(write: Write) -> None:
    name = write(
        """
def make():
    batch = torch.rand(4, 3, 5), torch.randint(0, 2, (4, 5), generator=torch.Generator().manual_seed(0))
    return {"model": lambda: nn.Conv1d(3, 2, 1), "train": [batch], "validation": [batch], "epochs": 1}
"""
    )
    check(name)
    assert 0 <= train(name, epochs=1)[-1]["accuracy"] <= 1


def test_an_evaluation_that_becomes_a_percentage_is_refused(write: Write) -> None:
    name = write(
        "calls = []\ndef share(model, batches, device):\n    calls.append(1)\n"
        "    return 0.5 if len(calls) < 2 else 50.0\n"
        "def make(): return {**parts(), 'evaluate': share}"
    )
    check(name)
    with pytest.raises(UserError, match=r"evaluate .* must return a fraction, .* got 50"):
        train(name)


@pytest.mark.parametrize("looks", ["x.sum().item() * 0", "0 * torch.ones(8).sum()"])
def test_models_that_need_numbers_are_counted_with_numbers(write: Write, looks: str) -> None:
    """What a model reads of its input, or makes on the CPU, the meta device cannot follow."""
    name = write(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 8)\n"
        f"        self.b = nn.Linear(8, 3)\n    def forward(self, x): return self.b(self.a(x) + {looks})\n"
        "def make(): return {**parts(), 'model': Net}"
    )
    rows = train(name)
    assert rows[-1]["executed_flops"] == 2 * 50 * (2 * 56 + 2 * 56 + 2 * 24)


def test_options_of_any_name_tell_trainings_apart(write: Write) -> None:
    from trainables.stage_tree.root import root_facts, root_id

    name = write("def make(cache: int = 8): return {**parts(), 'model': lambda: nn.Linear(4, cache)}")
    ids = set()
    for cache in (8, 16):
        options = (f"cache={cache}",)
        config = TrialConfig(workload=name, workload_options=options)
        ids.add(root_id(root_facts(config, build(name, options))))
    assert len(ids) == 2
    assert [train(name, workload_options=(f"cache={n}",))[-1]["executed_flops"] for n in (8, 16)] == [
        2 * 50 * 2 * (2 * 4 * n) for n in (8, 16)
    ]


def test_modules_without_an_init_file_belong_to_the_code(write: Write, tmp_path: Path) -> None:
    from trainables.workloads.user_code import own_modules

    (tmp_path / "space" / "deep").mkdir(parents=True)
    file = tmp_path / "space" / "deep" / "net.py"
    file.write_text("SIZE = 1\n")
    before = code_digest("space.deep.net")
    file.write_text("SIZE = 2\n")
    assert code_digest("space.deep.net") != before
    assert own_modules("space.deep.net") == [tmp_path / "space"]
    assert own_modules("torch.nn") == []  # installed on every machine


def test_a_factory_of_an_installed_package() -> None:
    """Any callable will do, such as a class of a workload."""
    workload = build("trainables.workloads.digits:Digits")
    assert workload.name == "trainables.workloads.digits:Digits"
    assert workload.steps_per_epoch == 10
