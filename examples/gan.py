"""Train a generator of digits against a discriminator, each with Gradient-Skip settings of its own.

    python gan.py --discriminator-stop 60 --discriminator-layer 8
    python -m tune_cac search --script 'python gan.py --discriminator-stop 60' --metric frechet_distance --direction min

The generator reads the ``CAC_*`` variables, which a search sets; the discriminator takes its settings from the options.
Lines that differ from a script without Gradient-Skip end in "# tune_cac".
"""

import argparse

import torch

import tune_cac as cac  # tune_cac
from trainables.workloads.digits import digit_splits
from trainables.workloads.gan_digits import GAN, frechet_distance

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--discriminator-stop", type=int, help="step at which its first layers stop")
parser.add_argument("--discriminator-layer", type=int, default=4, help="the last of them, by parameter number")
parser.add_argument("--width", type=int, default=16)
arguments = parser.parse_args()

torch.manual_seed(0)
model = GAN("generator", arguments.width)
generator, discriminator = model.get_submodule("generator"), model.get_submodule("discriminator")
stop = arguments.discriminator_stop
settings = cac.gradskip.Settings(  # tune_cac
    start_thr=-1,
    stop_layer_num=() if stop is None else (arguments.discriminator_layer,),
    stop_layer_itr=() if stop is None else (stop,),
)
optimizers = [
    cac.gradskip.AdamW(generator.parameters(), lr=5e-4, betas=(0.0, 0.9), model=generator),  # tune_cac
    cac.gradskip.AdamW(  # tune_cac
        discriminator.parameters(), lr=2e-3, betas=(0.0, 0.9), model=discriminator, settings=settings
    ),
]
images, validation = digit_splits()["train"][0], digit_splits()["validation"][0]
step = 0
for epoch in range(arguments.epochs):
    model.train()
    for part in torch.randperm(len(images)).split(64):
        losses = model(images[part], torch.randn(len(part), 32))
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
        step += 1
    model.eval()
    with torch.no_grad():
        samples = generator(torch.randn(len(validation), 32, generator=torch.Generator().manual_seed(0)))
    cac.report(frechet_distance=frechet_distance(samples, validation), step=step, epoch=epoch + 1)  # tune_cac
    for name, optimizer in zip(("generator", "discriminator"), optimizers, strict=True):
        print(f"epoch {epoch + 1}: {name} stopped through parameter {optimizer.gradskip.stopped_through}")
