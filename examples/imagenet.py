"""Train an image classifier on folders of images by class, or on Parquet files, with Gradient-Skip.

python imagenet.py DATA --arch resnet50 --epochs 90     # or imagenet.sh, which sets the CAC_* variables
python imagenet.py DATA --resume checkpoint.pt          # go on, with every stop so far
python imagenet.py DATA --resume model_best.pt --evaluate

DATA holds train/CLASS/*.jpg and val/CLASS/*.jpg, or Hugging Face's train-*.parquet and validation-*.parquet. Without a
validation split a tenth of the training images validates. For several processes see parallel.py.
"""

import argparse
import itertools
import shutil
import time
from pathlib import Path

import torch
from torch import nn

import tune_cac as cac
from trainables.errors import UserError
from trainables.workloads.images.workload import Images
from trainables.workloads.models import MODELS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("data", help="folder of images by class, or of Parquet files")
    parser.add_argument("-a", "--arch", default="resnet18", help=f"{', '.join(MODELS)}, or package.module:function")
    parser.add_argument("--epochs", type=int, default=90, help="epochs to train in all")
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="images per step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at first; a tenth of it every --lr-epochs")
    parser.add_argument("--lr-epochs", type=int, default=30, help="epochs from one learning rate to the next")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument(
        "--image-size", type=int, help="side of the inputs in pixels; not given: 224, or small images' own"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    parser.add_argument("-e", "--evaluate", action="store_true", help="evaluate on the validation split and end")
    parser.add_argument("-p", "--print-every", type=int, default=10, metavar="STEPS", help="steps from line to line")
    parser.add_argument("--steps-per-epoch", type=int, metavar="N", help="end every epoch after N steps, to try it out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="folder for decoded images; not given: in the temporary folder")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for checkpoint.pt and model_best.pt")
    return parser.parse_args()


def train(images, model, optimizer, epoch, device, arguments) -> None:
    model.train()
    batches = itertools.islice(images.train_batches(epoch, arguments.seed), arguments.steps_per_epoch)
    started = time.perf_counter()
    for step, (inputs, labels) in enumerate(batches, start=1):
        inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step % arguments.print_every == 0:
            seconds = (time.perf_counter() - started) / step
            place = f"epoch {epoch} step {step}/{images.steps_per_epoch}"
            print(f"{place}: loss {loss.item():.4f}, {seconds:.3f} s a step")


@torch.no_grad()
def evaluate(images, model, device) -> tuple[float, float]:
    """Return top-1 and top-5 accuracy in percent; of fewer than five classes, all count for top-5."""
    model.eval()
    top1 = top5 = count = 0
    for inputs, labels in images.evaluation_batches("validation"):
        scores, labels = model(inputs.to(device)), labels.to(device)
        hits = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
        top1 += int(hits[:, 0].sum())
        top5 += int(hits.sum())
        count += len(labels)
    return 100 * top1 / count, 100 * top5 / count


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = Images(
        data=arguments.data, model=arguments.arch, batch_size=arguments.batch_size,
        image_size=arguments.image_size, cache=arguments.cache,
    )  # fmt: skip
    model = images.make_model().to(device)
    state = torch.load(arguments.resume, map_location=device, weights_only=True) if arguments.resume else None
    if state:
        model.load_state_dict(state["model"])
    if arguments.evaluate:
        top1, top5 = evaluate(images, model, device)
        print(f"validation: top-1 {top1:.2f} %, top-5 {top5:.2f} %")
        return
    optimizer = cac.gradskip.SGD(
        model.parameters(), lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay,
        model=model,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, arguments.lr_epochs, gamma=0.1)
    first_epoch, best = 0, 0.0
    if state:
        optimizer.load_state_dict(state["optimizer"])  # with it every stop so far
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, best = state["epoch"], state["best"]
        print(f"begin at epoch {first_epoch}, iteration {optimizer.gradskip.iteration}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    known_stops = len(optimizer.gradskip.events)
    for epoch in range(first_epoch, arguments.epochs):
        train(images, model, optimizer, epoch, device, arguments)
        scheduler.step()
        for event in optimizer.gradskip.events[known_stops:]:
            print(f"iteration {event.iteration}: stopped through {event.name}")
        known_stops = len(optimizer.gradskip.events)
        top1, top5 = evaluate(images, model, device)
        print(f"epoch {epoch}: validation top-1 {top1:.2f} %, top-5 {top5:.2f} %", flush=True)
        state = {
            "epoch": epoch + 1, "best": max(best, top1), "model": model.state_dict(),
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        }  # fmt: skip
        torch.save(state, arguments.output / "checkpoint.pt")
        if top1 > best or epoch == 0:
            best = top1
            shutil.copyfile(arguments.output / "checkpoint.pt", arguments.output / "model_best.pt")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"imagenet.py: {error}") from None
