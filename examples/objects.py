"""Prune with components as Python objects, without a schedule in YAML.

python objects.py
"""

import torch

import tune_cac as cac

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = cac.compression.CompressionScheduler(model, optimizer)
scheduler.add_policy(cac.compression.SensitivityPruner(model, sensitivities={"0.weight": 0.5}), epochs=[0, 2, 4])
scheduler.on_epoch_begin(0)
scheduler.apply_masks()
print(f"{(model[0].weight == 0).float().mean().item():.2f} of the first layer is zero")
