"""Train with Gradient-Skip in two processes, which stop sending the gradients of stopped layers.

CAC_VAR_START_ITR=60 CAC_VAR_START_THR=0.99 CAC_VAR_SAMPLES=5 torchrun --standalone --nproc-per-node 2 parallel.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import tune_cac as cac

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
labels = torch.tensor(digits.target, device=device)

torch.manual_seed(0)
layers = []
for inside, outside in ((1, 16), (16, 16), (16, 32)):
    layers += [torch.nn.Conv2d(inside, outside, 3, padding=1), torch.nn.BatchNorm2d(outside), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(128, 10))
model.to(device)

optimizer = cac.gradskip.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, model=model)
parallel = cac.gradskip.DistributedDataParallel(model, optimizer)  # torch.nn.parallel's before

for epoch in range(10):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))[rank::size]
    for batch in order[: len(order) // 32 * 32].split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(images[batch]), labels[batch]).backward()
        optimizer.step()

if rank == 0:
    for event in optimizer.gradskip.events:
        print(f"step {event.iteration}: stopped through {event.name}")
dist.barrier()  # gloo may abort a process whose peer has left
dist.destroy_process_group()
