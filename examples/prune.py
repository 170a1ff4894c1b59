"""Prune two layers by a compression schedule, in an ordinary loop.

python prune.py
"""

import torch
from sklearn.datasets import load_digits

from trainables.compression.scheduler import CompressionScheduler

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

schedule = {  # or a file: CompressionScheduler.from_file(model, optimizer, "schedule.yaml")
    "version": 1,
    "pruners": {"half": {"class": "SparsityLevelParameterPruner", "levels": {"2.weight": 0.5, "6.weight": 0.25}}},
    "policies": [{"pruner": {"instance_name": "half"}, "epochs": [1, 2]}],
}
scheduler = CompressionScheduler.from_schedule(model, optimizer, schedule)

for epoch in range(4):
    batches = torch.randperm(len(labels)).split(64)
    scheduler.on_epoch_begin(epoch)
    for step, batch in enumerate(batches):
        scheduler.on_minibatch_begin(epoch, step, len(batches))
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss = scheduler.before_backward_pass(epoch, step, len(batches), loss)
        optimizer.zero_grad()
        loss.backward()
        scheduler.before_parameter_optimization(epoch, step, len(batches))
        optimizer.step()
        scheduler.on_minibatch_end(epoch, step, len(batches))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    scheduler.on_epoch_end(epoch, metrics={"min": loss.item(), "max": accuracy})
    zeros = [int((p == 0).sum()) for p in model.parameters() if p.dim() > 1]
    print(f"epoch {epoch}: zeros {zeros}")
