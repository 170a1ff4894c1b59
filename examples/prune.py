"""Prune two layers by a compression schedule, in an ordinary loop, which three lines are added to.

python prune.py
"""

import torch
from sklearn.datasets import load_digits

import tune_cac as cac

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

schedule = {  # or the name of a file
    "version": 1,
    "pruners": {"half": {"class": "SparsityLevelParameterPruner", "levels": {"2.weight": 0.5, "6.weight": 0.25}}},
    "policies": [{"pruner": {"instance_name": "half"}, "epochs": [1, 2]}],
}
scheduler = cac.compression.CompressionScheduler(model, schedule, optimizer)

for epoch in range(4):
    loader = torch.randperm(len(labels)).split(64)
    for batch in scheduler.batches(epoch, loader):
        loss = scheduler.loss(torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    zeros = [int((p == 0).sum()) for p in model.parameters() if p.dim() > 1]
    print(f"epoch {epoch}: zeros {zeros}")
