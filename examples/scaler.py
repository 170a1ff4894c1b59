"""Train with Gradient-Skip around any optimizer of torch, in mixed precision with a GradScaler and clipped gradients.

python scaler.py
"""

import torch
from sklearn.datasets import load_digits

import tune_cac as cac

device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
labels = torch.tensor(digits.target, device=device)

torch.manual_seed(0)
layers = []
for inside, outside in ((1, 16), (16, 16), (16, 32)):
    layers += [torch.nn.Conv2d(inside, outside, 3, padding=1), torch.nn.BatchNorm2d(outside), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(128, 10))
model.to(device)

settings = cac.gradskip.Settings(start_itr=60, start_thr=0.99, samples=5, braking_distance=10, whole_units=True)
optimizer = cac.gradskip.wrap(
    torch.optim.NAdam(model.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), settings, model=model
)
scaler = torch.amp.GradScaler(device)

for epoch in range(10):
    for batch in torch.randperm(len(labels)).split(64):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the layers that still train
        scaler.step(optimizer)  # a step skipped for infinities is no iteration
        scaler.update()

print("iterations:", optimizer.gradskip.iteration)
for event in optimizer.gradskip.events:
    print(f"step {event.iteration}: stopped through {event.name}")
