"""Fine-tune a pretrained transformer on texts by class under the settings that a search has found, and save it.

    python -m tune_cac search --space frozen_prefix --workload text_classification --data texts --model MiniLM --name s
    . results/s/best.env
    python fine_tune.py MiniLM texts/train.csv tuned

It needs `pip install 'tune-cac[transformers]'`. Lines that differ from a script without Gradient-Skip end in
"# tune_cac".
"""

import os
import sys

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tune_cac as cac  # tune_cac

source, data, target = sys.argv[1:]
epochs = int(os.environ.get("TUNE_CAC_EPOCHS", 3))  # tune_cac
texts = pd.read_csv(data)
classes = sorted(texts["label"].unique().tolist())
tokenizer = AutoTokenizer.from_pretrained(source)
inputs = tokenizer(texts["text"].tolist(), padding=True, truncation=True, max_length=128, return_tensors="pt")
inputs["labels"] = torch.tensor([classes.index(label) for label in texts["label"]])

torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(source, id2label=dict(enumerate(map(str, classes))))
optimizer = cac.gradskip.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, model=model)  # tune_cac
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(texts) // 32))
for epoch in range(epochs):
    model.train()
    for rows in torch.randperm(len(texts)).split(32):
        optimizer.zero_grad()
        loss = model(**{name: tensor[rows] for name, tensor in inputs.items()}).loss
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")
model.save_pretrained(target)
tokenizer.save_pretrained(target)
with torch.no_grad():
    scores = model.eval()(**tokenizer(texts["text"][0], return_tensors="pt")).logits[0]
print("scores of the first text:", *scores.tolist())
