"""Build a pruner and its policy as Python objects, without a schedule in YAML.

python objects.py
"""

import torch

from trainables.compression.policies import PruningPolicy
from trainables.compression.pruners import build_pruner
from trainables.compression.schedule.configs import SensitivityPrunerConfig
from trainables.compression.scheduler import CompressionScheduler

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pruner = build_pruner("mine", SensitivityPrunerConfig(sensitivities={"0.weight": 0.5}), model, seed=0)
scheduler = CompressionScheduler(model, optimizer)
scheduler.add_component("mine", pruner)  # its memory is part of the scheduler's state
scheduler.add_policy(PruningPolicy(pruner), epochs=[0, 2, 4], component="mine")
scheduler.on_epoch_begin(0)
scheduler.apply_masks()
print(f"{(model[0].weight == 0).float().mean().item():.2f} of the first layer is zero")
