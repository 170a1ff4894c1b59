"""Fine-tune a text classifier with the Trainer of transformers, LoRA or all weights, and search how many layers stop.

    python -m tune_cac search --space frozen_prefix --script 'python trainer.py MiniLM texts --lora 8'
    . results/NAME/best.env && python trainer.py MiniLM texts --lora 8 --output tuned

MiniLM is a model's folder or its name on the hub, texts a folder with train.csv, validation.csv and test.csv (columns
text and label). It needs `pip install 'tune-cac[huggingface]'`, and `peft` for ``--lora``. Lines that differ from a
script without Gradient-Skip end in "# tune_cac".
"""

import argparse
import os
import tempfile

import pandas as pd
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from tune_cac.integrations.transformers import GradientSkipCallback  # tune_cac

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("data")
parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--output", help="folder for the trained model")
given = parser.parse_args()

tables = {split: pd.read_csv(f"{given.data}/{split}.csv") for split in ("train", "validation", "test")}
classes = sorted(tables["train"]["label"].unique().tolist())
tokenizer = AutoTokenizer.from_pretrained(given.model)


def rows(table):
    found = tokenizer(table["text"].tolist(), truncation=True, max_length=128)
    labels = [classes.index(label) for label in table["label"]]
    return [{"input_ids": ids, "labels": label} for ids, label in zip(found["input_ids"], labels, strict=True)]


model = AutoModelForSequenceClassification.from_pretrained(given.model, id2label=dict(enumerate(map(str, classes))))
if given.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=given.lora, target_modules="all-linear"))
trainer = Trainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(),
        learning_rate=given.lr,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        seed=int(os.environ.get("TUNE_CAC_SEED", 0)),  # tune_cac
    ),
    train_dataset=rows(tables["train"]),
    eval_dataset=rows(tables["validation"]),
    processing_class=tokenizer,
    compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean().item()},
    callbacks=[GradientSkipCallback()],  # tune_cac
)
trainer.train()
trainer.predict(rows(tables["test"]))
if given.output:
    trainer.save_model(given.output)
