"""Train a small network on the outputs of a larger one, from the second epoch on.

python distill.py
"""

import argparse

import torch
from sklearn.datasets import load_digits

from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy
from trainables.compression.distillation_flags import add_distillation_args
from trainables.compression.scheduler import CompressionScheduler

parser = argparse.ArgumentParser()
add_distillation_args(parser)
args = parser.parse_args(["--kd-temp", "4", "--kd-dw", "0.7", "--kd-sw", "0.3", "--kd-start-epoch", "1"])

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))  # trained before
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

weights = DistillationLossWeights(args.kd_distill_wt, args.kd_student_wt, args.kd_teacher_wt)
policy = KnowledgeDistillationPolicy(model, teacher, args.kd_temp, weights)
scheduler = CompressionScheduler(model, optimizer)
scheduler.add_policy(policy, starting_epoch=args.kd_start_epoch, ending_epoch=3)

for epoch in range(3):
    for batch in scheduler.batches(epoch, torch.randperm(len(labels)).split(64)):
        output = policy.forward(images[batch])  # or model(images[batch]): the scheduler sees either
        loss = scheduler.loss(torch.nn.functional.cross_entropy(output, labels[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
