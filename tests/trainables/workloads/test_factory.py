"""A workload from a function of the user's: what it may return, and that it trains."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from user_factories import Write, check, train

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.doctor.determinism import why_not_repeatable
from trainables.training.run import TrainingRun
from trainables.workloads import build, default_epochs, factory
from trainables.workloads.user_code import code_digest


def test_the_least_that_a_factory_returns_trains_with_the_defaults(write: Write) -> None:
    name = write("def make(): return parts()")
    check(name)
    assert default_epochs(name) == 30
    rows = train(name)
    assert rows[-1]["step"] == 2 * 7  # 50 samples in batches of 8
    assert rows[-1]["learning_rate"] == pytest.approx(0, abs=1e-9)  # cosine, to its end
    assert 0 <= rows[-1]["quality"] <= 1
    assert rows[-1]["test_quality"] is None
    # 2 * (4*8 + 8*3) FLOPs a sample forward; backward the same for weights, and once more for the second layer's input
    assert rows[-1]["executed_flops"] == 2 * 50 * (2 * 56 + 2 * 56 + 2 * 24)


@pytest.mark.parametrize(("period", "warned"), [(1, True), (7, False)])
def test_a_schedule_that_is_meant_for_epochs_is_warned_of(write: Write, period: int, warned: bool) -> None:
    name = write(
        f"""
def make():
    step = lambda optimizer, total: torch.optim.lr_scheduler.StepLR(optimizer, {period}, gamma=0.1)
    return {{**parts(), "schedule": step, "epochs": 3}}
"""
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(name)
    assert any("after the first of 3 epochs: give its lengths in steps" in str(w.message) for w in caught) == warned


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
    assert rows[-1]["quality"] == 0.03
    assert rows[-1]["test_quality"] == 0.02


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
    assert why_not_repeatable(TrialConfig(workload=name, method="none", epochs=2), steps=6) == ""


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


def test_gradient_skip_stops_layers_of_a_users_model(write: Write) -> None:
    name = write("def make(): return parts()")
    rows = train(name, method="gradskip", CAC_STOP_LAYER_NUM=(1,), CAC_STOP_LAYER_ITR=(4,))
    assert rows[-1]["stopped_through"] == 1
    # From the sixth step on, 60 of the 100 samples, nothing of the first layer's backward pass is left.
    saved = 60 / 100 * (2 * 32 + 2 * 24) / (2 * 56 + 2 * 56 + 2 * 24)
    assert rows[-1]["compute_saved"] == pytest.approx(saved)


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
    assert 0 <= rows[-1]["test_quality"] <= 1


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
