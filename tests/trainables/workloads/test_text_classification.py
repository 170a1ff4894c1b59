"""Texts by class on a pretrained transformer, beside a plain loop of transformers and torch."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_bert import save_tiny_bert, sentences, write_sentences

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.run import TrainingRun
from trainables.workloads import build
from trainables.workloads.seeded_loader import shuffled_batches
from tune_cac.cli.arguments import workload_options

NAME = "text_classification"

pytestmark = pytest.mark.slow  # importing transformers takes seconds


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def options(bert: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    data = write_sentences(tmp_path_factory.mktemp("texts"), train=50, dev=40, test=30)
    return (f"data={data}", f"model={bert}", "batch_size=16", "learning_rate=0.003")


def trained(options: tuple[str, ...], **more: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    config = TrialConfig(workload=NAME, workload_options=options, **{"epochs": 2, "method": "none", **more})
    with TrainingRun(config) as run:
        rows = [run.train_epoch() for _ in range(config.epochs)]
        return rows, {name: value.clone() for name, value in run.model.state_dict().items()}


def frozen_block(options: tuple[str, ...]) -> dict[str, Any]:
    """Settings that freeze the embeddings and the first of the two blocks after the first step."""
    names = [name for name, _ in build(NAME, options).make_model().named_parameters()]
    last = max(number for number, name in enumerate(names) if "layer.0." in name)
    return {"method": "gradskip", "CAC_STOP_LAYER_NUM": (last,), "CAC_STOP_LAYER_ITR": (0,), "CAC_PREFIX_MODE": "eval"}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_run_is_a_plain_loop_of_transformers(is_frozen: bool, bert: str, options: tuple[str, ...]) -> None:
    """What is frozen stays in evaluation mode, though the run calls ``train()`` on the model in each epoch."""
    from sklearn.metrics import f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows, state = trained(options, **(frozen_block(options) if is_frozen else {}))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    # Of 8 steps the first is the warm-up, at the full rate.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * max(0, step - 1) / 7)
    )
    tokenizer = AutoTokenizer.from_pretrained(bert)

    def inputs(count: int, seed: int) -> tuple[Any, torch.Tensor]:
        texts, labels = sentences(count, seed)
        numbers = torch.tensor([["neg", "pos"].index(label) for label in labels])
        return tokenizer(texts, padding=True, return_tensors="pt"), numbers

    encoded, labels = inputs(50, 0)
    for epoch in range(2):
        for step, part in enumerate(shuffled_batches(50, 16, epoch, 0)):
            model.train()
            if is_frozen and epoch + step > 0:
                for module in (model.bert.embeddings, model.bert.encoder.layer[0]):
                    module.requires_grad_(False).eval()
            optimizer.zero_grad()
            model(**{name: value[part] for name, value in encoded.items()}, labels=labels[part]).loss.backward()
            optimizer.step()
            schedule.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-4)
    encoded, labels = inputs(40, 1)
    with torch.no_grad():
        scores = model.eval()(**encoded).logits
    further = json.loads(rows[-1]["further_metrics"])
    assert rows[-1]["quality"] == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
    assert further["f1"] == pytest.approx(f1_score(labels, scores.argmax(1), average="macro"))
    assert further["val_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)), rel=1e-4)


def test_the_forward_cache_trains_bit_for_bit_as_without(options: tuple[str, ...]) -> None:
    stops = {**frozen_block(options), "epochs": 3}
    (without, one), (cached, other) = trained(options, **stops), trained(options, **stops, forward_cache_mb=10)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["quality"] for row in without] == [row["quality"] for row in cached]
    assert cached[-1]["forward_flops"] < without[-1]["forward_flops"]


@pytest.mark.parametrize(("metric", "direction"), [("f1", "max"), ("val_loss", "min")])
def test_another_metric_is_what_trials_are_compared_by(metric: str, direction: str, options: tuple[str, ...]) -> None:
    (_, row), _ = trained(options, metric=metric, direction=direction)
    further = json.loads(row["further_metrics"])
    assert {metric, *(name.removeprefix("test_") for name in further)} == {"accuracy", "f1", "val_loss"}


def test_files_of_all_kinds_are_read_alike(bert: str, tmp_path: Path) -> None:
    texts, labels = sentences(40, 0)
    texts[0] = 'a "fine" film'
    found = []
    for kind in ("csv", "tsv", "parquet"):
        path = tmp_path / f"all.{kind}"
        columns = ("text=text", "label=label")
        if kind == "parquet":
            numbers = [["neg", "pos"].index(label) for label in labels]
            pq.write_table(pa.table({"text": texts, "label": numbers}), path)
        elif kind == "csv":
            rows = ['"' + text.replace('"', '""') + f'",{label}' for text, label in zip(texts, labels, strict=True)]
            path.write_text("\n".join(["text,label", *rows]))
        else:  # as benchmarks have them: no names, and nothing quoted
            path.write_text("".join(f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=True)))
            columns = ("text=0", "label=1")
        workload = build(NAME, (f"data={path}", f"model={bert}", "validation=0.25", *columns))
        splits = [*workload.train_batches(0, 0), *(workload.evaluation_batches("validation") or ())]
        found.append([tensor for batch in splits for tensor in batch])
        assert len(splits[-1][-1]) == 10
        assert workload.splits == ("train", "validation")
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("sentence,label\na film,pos\n", (), "unknown column 'text': Valid: label, sentence; give --option text=NAME"),
        ("text,lable\na film,pos\n", (), "unknown column 'label': did you mean 'lable'? Valid: lable, text; give"),
        ("text,label\na,pos\nb,\nc,pos\n", (), "row 1 (from 0) must have a text and a label, got ('b', '')"),
        ("text,label\na,0.1\nb,0.7\n", (), "must have 2 or more classes, each of several training texts, got 2 labels"),
        (
            "text,label\na,1\nb,0.7\nc,1\n",
            (),
            "must have classes, got numbers with fractions such as 0.7: a regression is",
        ),
        ("text,label\na,pos,more\n", (), "cannot be read: CSV parse error: Expected 2 columns, got 3"),
        ("text,label\na,x\nb,y\na,y\n", ("model=nowhere/at/all",), "must be a folder of save_pretrained or a name on"),
        ("text,label\na,x\nb,y\na,y\n", ("validation=2",), "must be a share in (0, 1), got 2.0"),
        (None, (), "must be a file (.csv, .tsv, .parquet) or a folder with train.csv"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    content: str | None, more: tuple[str, ...], message: str, bert: str, tmp_path: Path
) -> None:
    path = tmp_path / "texts.csv"
    if content is not None:
        path.write_text(content)
    given = {"data": f"data={path}", "model": f"model={bert}", **{text.partition("=")[0]: text for text in more}}
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        build(NAME, given.values())
    assert "\n" not in str(raised.value)


def test_labels_of_validation_must_be_of_the_training_texts(bert: str, tmp_path: Path) -> None:
    data = write_sentences(tmp_path, train=20, validation=10)
    (tmp_path / "validation.csv").write_text("text,label\na film,positive\n")
    with pytest.raises(UserError, match=r"validation of .*: unknown label 'positive': Valid: neg, pos, as in"):
        build(NAME, (f"data={data}", f"model={bert}"))


def test_a_folder_of_a_model_is_found_from_the_folder_of_a_trial(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(bert).parent)
    given = Namespace(model=Path(bert).name, data=Path(bert).name)
    assert workload_options(given) == (f"data={bert}", f"model={bert}")
    assert workload_options(Namespace(model="resnet20")) == ("model=resnet20",)
