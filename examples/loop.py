"""Train a small convolutional network on scikit-learn's digits with Gradient-Skip, in an ordinary loop.

CAC_VAR_START_ITR=60 CAC_VAR_START_THR=0.99 CAC_VAR_SAMPLES=5 python loop.py
"""

import torch
from sklearn.datasets import load_digits

import tune_cac as cac

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
layers = []
for inside, outside in ((1, 16), (16, 16), (16, 32)):
    layers += [torch.nn.Conv2d(inside, outside, 3, padding=1), torch.nn.BatchNorm2d(outside), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(128, 10))

# The one line: torch.optim.SGD before. model= is optional; it gives layers their names.
optimizer = cac.gradskip.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, model=model)

for epoch in range(10):
    for batch in torch.randperm(len(labels)).split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()

for event in optimizer.gradskip.events:
    print(f"step {event.iteration}: stopped through {event.name} ({event.rule}, ratio {event.ratio:.3f})")
