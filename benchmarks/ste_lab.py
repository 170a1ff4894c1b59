"""Repeat the lab notes' experiment on stochastic-rounding STE, with controls; and train digits with each estimator.

    python benchmarks/ste_lab.py [--step 1e-5] [--largest 0.5] [--models 10] [--digits-seeds 10]

For each model (raw, and pretrained 500 steps at batch 16,000) and each of ten batches of 1,024: directions from one
batch, scaled to unit length unless it says otherwise; the loss of that batch with plain sign activations at every
learning rate from --step to --largest in steps of --step; the smallest loss and its rate; and the loss of another batch
at that rate. Printed: in how many batches a direction beats the plain STE, by each fixed number n of samples and by the
notes' own count (any n of 1..10), beside noise on the plain STE's direction, by batch and held out.

The losses along a line are exact: each activation changes its sign at known rates, and between two of them the loss of
a sample is a quadratic function of the rate. A sample has a few such pieces, instead of 50,000 forward passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, stdev

import torch
import torch.nn.functional as F
from machine import header
from torch import Tensor, nn

from trainables.gradients import StraightThroughSettings, straight_through_direction
from trainables.gradients.gradient_method import norm_of
from trainables.workloads import binary_mlp, build

BATCHES, BATCH_SIZE, SAMPLES = 10, 1024, 10
TRIAL_STEP, NES_SIGMA = 0.1, 0.02
DATA_SEED = 1_000
#: Names of directions, before the number of samples or of the draw.
SR, OWN_LENGTH, AS_FAR, TENTH = (
    "sr, n = ",
    "sr, own length, n = ",
    "STE + noise as far as sr's, ",
    "STE + noise of 0.1, ",
)
#: Direction by parameter name.
Direction = dict[str, Tensor]
#: Inputs and targets.
Batches = tuple[Tensor, Tensor]
#: Settings of the open questions; the samples n = 1..10 of stochastic rounding come before them.
OPEN = {
    "backward noise, n = 1": StraightThroughSettings(estimator="backward_noise", normalise=True),
    "backward noise, n = 4": StraightThroughSettings(estimator="backward_noise", samples=4, normalise=True),
    "backward noise, n = 10": StraightThroughSettings(estimator="backward_noise", samples=10, normalise=True),
    "sr, n = 10, effect": StraightThroughSettings(
        samples=10, weighting="effect", trial_step=TRIAL_STEP, normalise=True
    ),
    "proposal, n = 10, effect of 1 + 10": StraightThroughSettings(
        estimator="proposal", samples=10, candidates=10, trial_step=TRIAL_STEP, normalise=True
    ),
    **{
        f"nes, {pairs} pairs": StraightThroughSettings(estimator="nes", samples=pairs, sigma=NES_SIGMA, normalise=True)
        for pairs in (10, 100)
    },
}


def split_at_sign_changes(values: Tensor, slopes: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split intervals of rates where one of values - rate * slopes changes its sign.

    Args:
        values: (S, D), one row an interval.
        slopes: (S, D).
        begin: (S,).
        end: (S,).

    Returns:
        For each part the interval that it is of, its begin and its end.
    """
    changes = values / slopes
    inside = (changes > begin[:, None]) & (changes < end[:, None])
    whose = torch.cat([torch.arange(len(begin)), inside.nonzero()[:, 0]])
    begins = torch.cat([begin, changes[inside]])
    order = begins.argsort(stable=True)
    order = order[whose[order].argsort(stable=True)]
    whose, begins = whose[order], begins[order]
    ends = end[whose]
    same = whose[1:] == whose[:-1]
    ends[:-1] = torch.where(same, begins[1:], ends[:-1])
    return whose, begins, ends


def line_losses(model: nn.Sequential, direction: Direction, batch: tuple[Tensor, Tensor], rates: Tensor) -> Tensor:
    """Return the loss of a batch at w - rate * direction for each of the ascending rates, plain sign, in float64."""
    hidden, targets = (part.double() for part in batch)
    sample = torch.arange(len(hidden))
    begin = torch.zeros(len(hidden), dtype=torch.float64)
    end = torch.full_like(begin, float(rates[-1]) + 1e-9)  # the last rate is inside
    layers = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    for name in layers:
        weight, bias = (p.detach().double() for p in model.get_submodule(name).parameters())
        values = hidden @ weight.T + bias
        slopes = hidden @ direction[f"{name}.weight"].double().T + direction[f"{name}.bias"].double()
        if name != layers[-1]:
            whose, begin, end = split_at_sign_changes(values, slopes, begin, end)
            middle = ((begin + end) / 2)[:, None]
            hidden = torch.where(values[whose] - middle * slopes[whose] >= 0, 1.0, -1.0).double()
            sample = sample[whose]
    errors = values - targets[sample]
    parts = torch.stack([errors.square().sum(1), -2 * (errors * slopes).sum(1), slopes.square().sum(1)], 1)
    steps = torch.zeros(len(rates) + 1, 3, dtype=torch.float64)
    steps.index_add_(0, torch.searchsorted(rates, begin), parts)
    steps.index_add_(0, torch.searchsorted(rates, end), -parts)
    constant, linear, square = steps.cumsum(0)[:-1].T
    return (constant + rates * linear + rates.square() * square) / targets.numel()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Effect of a direction on one batch."""

    loss: float
    """Smallest loss on the batch along the direction."""
    held_out: float
    """Loss of another batch at the same rate."""
    rate: float
    """That rate."""


#: What each direction does on one batch, by its name.
Row = dict[str, Found]


def search_line(model: nn.Sequential, direction: Direction, own: Batches, other: Batches, rates: Tensor) -> Found:
    losses = line_losses(model, direction, own, rates)
    best = int(losses.argmin())
    held_out = line_losses(model, direction, other, rates[best : best + 1])
    return Found(loss=float(losses[best]), held_out=float(held_out), rate=float(rates[best]))


def unit(direction: Direction) -> Direction:
    length = norm_of(direction.values())
    return {name: part / length for name, part in direction.items()}


def minus(direction: Direction, other: Direction) -> Direction:
    return {name: part - other[name] for name, part in direction.items()}


def with_noise(direction: Direction, size: float, generator: torch.Generator) -> Direction:
    """Return a direction plus Gaussian noise of a norm, scaled to unit length."""
    noise = unit({name: torch.randn(part.shape, generator=generator) for name, part in direction.items()})
    return unit({name: part + size * noise[name] for name, part in direction.items()})


def directions(model: nn.Sequential, batch: Batches, seed: int) -> Iterator[tuple[str, Direction, tuple[int, int]]]:
    """Yield names, directions and their forward and backward passes."""

    def estimate(settings: StraightThroughSettings) -> tuple[Direction, tuple[int, int]]:
        found = straight_through_direction(lambda m: F.mse_loss(m(batch[0]), batch[1]), model, settings, seed)
        return found.gradient, (found.forward_passes, found.backward_passes)

    gradient, passes = estimate(StraightThroughSettings(estimator="sign"))
    plain = unit(gradient)
    yield "STE", plain, passes
    yield "STE, own length", gradient, passes
    noise = torch.Generator().manual_seed(seed)
    for n in range(1, SAMPLES + 1):  # a seed's first n samples are the same for each n: averages are nested
        sampled, passes = estimate(StraightThroughSettings(samples=n))
        yield f"{OWN_LENGTH}{n}", sampled, passes
        yield f"{SR}{n}", unit(sampled), passes
        yield f"{AS_FAR}{n}", with_noise(plain, norm_of(minus(unit(sampled), plain).values()), noise), (1, 1)
        yield f"{TENTH}{n}", with_noise(plain, 0.1, noise), (1, 1)
    for name, settings in OPEN.items():
        yield name, *estimate(settings)


def compare(model: nn.Sequential, seed: int, rates: Tensor) -> tuple[list[Row], dict[str, tuple[int, int]]]:
    """Return what each direction does on each batch, "before" among them, and the passes by direction."""
    generator = torch.Generator().manual_seed(DATA_SEED + seed)
    draw = partial(binary_mlp.draw, generator, BATCH_SIZE)
    rows, passes = [], {}
    for number in range(BATCHES):
        own, other = draw(), draw()
        zero = torch.zeros(1, dtype=torch.float64)
        still = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        before = (float(line_losses(model, still, part, zero)) for part in (own, other))
        row = {"before": Found(loss=next(before), held_out=next(before), rate=0.0)}
        for name, direction, passes[name] in directions(model, own, seed * BATCHES + number):
            row[name] = search_line(model, direction, own, other, rates)
        rows.append(row)
    return rows, passes


def counts(models: list[list[Row]], names: list[str], *, rival: str = "STE", held_out: bool = False) -> str:
    """In how many batches of each model any of these directions beats another."""
    key = "held_out" if held_out else "loss"
    won = [
        sum(min(getattr(row[name], key) for name in names) < getattr(row[rival], key) for row in rows)
        for rows in models
    ]
    return f"{sum(won)} of {sum(map(len, models))} ({' '.join(map(str, won))})"


def falls(rows: list[Row], name: str, key: str) -> str:
    """Mean and range over batches of how much a direction lowers the loss."""
    found = [getattr(row["before"], key) - getattr(row[name], key) for row in rows]
    return f"{mean(found):+.5f} ({min(found):+.5f} to {max(found):+.5f})"


def table(models: list[list[Row]], passes: dict[str, tuple[int, int]]) -> None:
    rows = [row for own in models for row in own]
    print(f"  loss before: {mean(row['before'].loss for row in rows):.5f} (by model: ", end="")
    print(f"{' '.join(format(mean(row['before'].loss for row in own), '.4f') for own in models)})")
    print("  direction | passes | beats STE, in batches (by model) | held out | loss lowered | held out | rate, median")
    for name in passes:
        if name.startswith((OWN_LENGTH, AS_FAR, TENTH)):
            continue
        won = f"{counts(models, [name])} | {counts(models, [name], held_out=True)}"
        lowered = f"{falls(rows, name, 'loss')} | {falls(rows, name, 'held_out')}"
        rate = median(row[name].rate for row in rows)
        print(f"  {name} | {passes[name][0]} + {passes[name][1]} | {won} | {lowered} | {rate:.5f}")
    unscaled = "STE, own length"
    rivals = ((SR, "STE"), (SR, unscaled), (OWN_LENGTH, unscaled), (AS_FAR, "STE"), (TENTH, "STE"))
    for kind, rival in rivals:
        every = [f"{kind}{n}" for n in range(1, SAMPLES + 1)]
        alone = [sum(row[name].loss < row[rival].loss for row in rows) for name in every]
        print(
            f"  {kind}any of 1..{SAMPLES} beats {rival}: {counts(models, every, rival=rival)}, held out "
            f"{counts(models, every, rival=rival, held_out=True)}; each of them alone: {alone}"
        )
    every = [f"{SR}{n}" for n in range(1, SAMPLES + 1)]
    for what, names in (("STE", ["STE"]), ("sr at every n", every)):
        lower = [sum(max(row[name].loss for name in names) < row["before"].loss for row in own) for own in models]
        print(f"  {what} lowers the loss: {sum(lower)} of {len(rows)}")


#: Estimators that whole trainings of digits compare.
TRAININGS = {
    "STE": StraightThroughSettings(estimator="sign"),
    "sr, n = 1": StraightThroughSettings(samples=1),
    "sr, n = 4": StraightThroughSettings(samples=4),
    "backward noise, n = 1": StraightThroughSettings(estimator="backward_noise"),
}


def train_digits(settings: StraightThroughSettings, seed: int, epochs: int) -> float:
    """Return the validation accuracy after a training; its steps are those of a trial but for the direction."""
    workload = build("digits", ("activations=binary",))
    torch.manual_seed(seed)
    model = workload.make_model().train()
    optimizer = workload.make_optimizer(model.named_parameters())
    scheduler = workload.make_scheduler(optimizer, epochs * workload.steps_per_epoch)
    number = 0
    for epoch in range(epochs):
        for batch in workload.train_batches(epoch, seed):
            found = straight_through_direction(
                lambda m, batch=batch: workload.loss(m, batch), model, settings, seed * 1_000_003 + number
            )
            for name, parameter in model.named_parameters():
                parameter.grad = found.gradient[name]
            with torch.no_grad():  # a direction leaves batch norm's statistics alone: plain signs, which are evaluated
                model(batch[0])
            optimizer.step()
            scheduler.step()
            number += 1
    model.eval()
    with torch.no_grad():
        return float(workload.quality_on(model, "validation", "cpu"))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=1e-5, help="distance of two learning rates (default: 1e-5)")
    parser.add_argument("--largest", type=float, default=0.5, help="largest learning rate (default: 0.5)")
    parser.add_argument("--models", type=int, default=10, help="seeds of the initial weights (default: 10)")
    parser.add_argument("--pretraining-steps", type=int, default=None, help="default: 500")
    parser.add_argument("--digits-seeds", type=int, default=10, help="trainings of each (default: 10; 0: none)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of digits (default: 30)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(header("benchmarks/ste_lab.py"))
    rates = given.step * torch.arange(1, round(given.largest / given.step) + 1, dtype=torch.float64)
    print(f"{given.models} models, {BATCHES} batches of {BATCH_SIZE}, {len(rates)} rates to {given.largest}")
    for state in ("raw", "pretrained"):
        models = []
        for seed in range(given.models):
            torch.manual_seed(seed)
            model = binary_mlp.network()
            if state == "pretrained":
                binary_mlp.pretrain(model, given.pretraining_steps)
            rows, passes = compare(model, seed, rates)
            models.append(rows)
        print(f"{state} models", flush=True)
        table(models, passes)
    found: dict[str, list[float]] = {name: [] for name in TRAININGS}
    for seed in range(given.digits_seeds):
        for name, settings in TRAININGS.items():
            found[name].append(train_digits(settings, seed, given.epochs))
    for name, accuracies in found.items() if given.digits_seeds > 1 else ():
        differences = [own - ste for own, ste in zip(accuracies, found["STE"], strict=True)]
        print(
            f"digits, activations=binary, {given.epochs} epochs, {name}: validation accuracy {mean(accuracies):.4f}, "
            f"deviation {stdev(accuracies):.4f} ({min(accuracies):.4f} to {max(accuracies):.4f}, n = {len(accuracies)})"
            f"; minus STE's on the same seed {mean(differences):+.4f}, deviation {stdev(differences):.4f}"
        )


if __name__ == "__main__":
    main()
