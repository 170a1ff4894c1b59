"""Print what a GPU does with Gradient-Skip, as ratios in one run: steps, memory, compiled models, searches.

    python benchmarks/gpu.py [--device cuda] [--parts steps host sync compile correct recipe search] [--minutes 6]
                             [--tiny]

One prepared script for a data-centre card: a part begins nothing when ``--minutes`` are over. ``--tiny`` runs it on a
CPU, as a test of itself; the first four parts take a minute there, to compile takes three. Models are transformers'
ResNet-50 (224 px, batch 128), ViT-B/16 (batch 64) and GPT-2 (8 x 1,024 tokens) with random weights, in bfloat16
autocast, by fused AdamW.

steps     a step with nothing, a half and three quarters of the tensors stopped, over torch's own full step; beside it
          the same tensors frozen by hand (`requires_grad`); FLOPs, joules by NVML, peak memory behind the first step
host      a step of the small network of digits, which waits for the host, over torch's own
sync      synchronizing calls of the optimizer in 40 steps with a decision each 20, and of a trial's steps without
          decisions, alone and over the stage tree
compile   seconds of the first step and of those behind a stop, graphs, largest difference of losses to eager ones
correct   stopped weights still, a resumed run equal bit for bit, replayed savings equal to executed ones
recipe    `recipe.py`, every item of the training recipe
search    time of searches, 1, 2 and 4 trials at a time on one GPU, without what they take to begin, over the same
          number of trainings in a plain loop: of digits, and of how many layers of a ResNet-18 to freeze (`fine_tuned`)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import header, now, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from trainables.config import TrialConfig
from trainables.gradskip import SGD, AdamW, Settings
from trainables.runtime.energy import energy_j
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.recipe.recipe import compile_model
from trainables.training.run import TrainingRun
from trainables.workloads import build_for

#: Shares of the tensors that are stopped, in the order in which the model runs.
SHARES = (0.5, 0.75)
PARTS = ("steps", "host", "sync", "compile", "correct", "recipe", "search")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it is trained on."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[str], dict[str, Tensor]]  # by device; arguments of the model, which returns its loss


def cases(*, tiny: bool) -> list[Case]:
    """Return the three models."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    px, (images, pictures, texts, length) = (32, (2, 2, 2, 16)) if tiny else (224, (128, 64, 8, 1024))
    small_resnet = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]} if tiny else {}
    small_vit = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
                 "image_size": 32, "patch_size": 8} if tiny else {}  # fmt: skip
    small_gpt = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 16,
                 "bos_token_id": 0, "eos_token_id": 0} if tiny else {}  # fmt: skip
    words = 100 if tiny else 50_257

    def pictures_of(count: int) -> Callable[[str], dict[str, Tensor]]:
        return lambda device: {
            "pixel_values": torch.randn(count, 3, px, px, device=device),
            "labels": torch.randint(10, (count,), device=device),
        }

    def sentences(device: str) -> dict[str, Tensor]:
        found = torch.randint(words, (texts, length), device=device)
        return {"input_ids": found, "labels": found}

    return [
        Case(name="ResNet-50", batch=pictures_of(images),
             model=lambda: ResNetForImageClassification(ResNetConfig(num_labels=10, **small_resnet))),
        Case(name="ViT-B/16", batch=pictures_of(pictures),
             model=lambda: ViTForImageClassification(ViTConfig(num_labels=10, **small_vit))),
        Case(name="GPT-2", batch=sentences,
             model=lambda: GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM", **small_gpt))),
    ]  # fmt: skip


class Training:
    """Steps of a model on one batch, with a share of its tensors stopped by our optimizer, or by hand."""

    def __init__(self, case: Case, device: str, share: float, *, by_hand: bool) -> None:
        torch.manual_seed(0)
        self.device, self.model, self.batch = device, case.model().to(device), case.batch(device)
        parameters = list(self.model.parameters())
        last = round(share * len(parameters)) - 1
        settings = (
            Settings(stop_layer_num=(last,), stop_layer_itr=(0,), whole_units=True, watch=("conv", "linear"))
            if share
            else Settings(start_itr=10**9)
        )
        self.optimizer: Any = AdamW(parameters, lr=1e-4, fused=True, model=self.model, settings=settings)
        self.step()  # in which the stop comes
        self.stopped = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        if by_hand:
            self.optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-4, fused=True)
        self.step()
        with FlopCounterMode(display=False) as counter:
            self.step()
        self.flops, self.joules, self.peak_mb = counter.get_total_flops(), 0.0, float("nan")
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            self.peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20

    def step(self) -> None:
        """Take a step, without waiting for the device."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss: Tensor = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()


def compare(runs: dict[str, Training], first: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the ratio of each training's steps to the first one's, by round; they take turns in random order."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        seconds = {}
        for name in random.sample(list(runs), len(runs)):
            begun, begun_j = now(runs[name].device), energy_j(torch.device(runs[name].device))
            for _ in range(steps):
                runs[name].step()
            seconds[name] = now(runs[name].device) - begun
            if number and begun_j is not None:
                runs[name].joules += (energy_j(torch.device(runs[name].device)) or 0.0) - begun_j
        if number:  # the first warms up
            for name, took in seconds.items():
                found[name].append(took / seconds[first])
    return found


def steps(device: str, *, tiny: bool) -> None:
    """Print steps and memory of the three models."""
    for case in cases(tiny=tiny):
        runs = {"torch's own": Training(case, device, 0.0, by_hand=True)}
        runs |= {"nothing stopped": Training(case, device, 0.0, by_hand=False)}
        for share in SHARES:
            runs[f"{share:.0%} stopped"] = Training(case, device, share, by_hand=False)
            runs[f"{share:.0%} by hand"] = Training(case, device, share, by_hand=True)
            assert runs[f"{share:.0%} stopped"].stopped == runs[f"{share:.0%} by hand"].stopped
        own = runs["torch's own"]
        for name, ratios in compare(runs, "torch's own", *((2, 1) if tiny else (12, 4))).items():
            run = runs[name]
            joules = f"; joules {run.joules / own.joules:.3f}" if own.joules else ""
            print(
                f"{case.name:<10} {name:<16} step {spread(ratios)}; FLOPs {run.flops / own.flops:.3f}{joules}; peak "
                f"{run.peak_mb:.0f} MiB; {len(run.stopped)} tensors",
                flush=True,
            )
        del runs


def host(device: str, *, tiny: bool) -> None:
    """Print a step that waits for the host."""
    from trainables.workloads.digits import Digits

    model = Digits().make_model()

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, x: Tensor, y: Tensor) -> Any:
            loss = nn.functional.cross_entropy(self.network(x), y)
            return argparse.Namespace(loss=loss)

    x = next(iter(Digits().train_batches(0, 0)))
    case = Case(name="digits", model=Small, batch=lambda d: {"x": x[0].to(d), "y": x[1].to(d)})
    runs = {
        "torch's own": Training(case, device, 0.0, by_hand=True),
        "ours": Training(case, device, 0.0, by_hand=False),
    }
    found = compare(runs, "torch's own", *((2, 5) if tiny else (12, 100)))
    print(f"digits, a step of the small network: {spread(found['ours'])} of torch's own", flush=True)


def sync(device: str, *, tiny: bool) -> None:
    """Print how often the optimizer waits for the device."""
    model = cases(tiny=True)[1].model().to(device)
    batch = cases(tiny=True)[1].batch(device)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True, model=model,
                      settings=Settings(start_itr=0, samples=20, start_thr=0.5))  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    step()
    decided = waits(device, step, 40)
    print(f"synchronizing calls in 40 steps with a decision each 20: {decided if device == 'cuda' else 'not on a CPU'}")
    with tempfile.TemporaryDirectory() as folder:
        config = TrialConfig(method="none", epochs=2, device=device)
        sharing = Sharing(tree=folder, budget_bytes=0)
        with TrainingRun(config) as alone:
            alone.train_epoch()
            alone.begin_epoch()
            found = [waits(device, alone.train_step, alone.workload.steps_per_epoch)]
        with SharedRun(config, sharing) as shared:
            shared.train_epoch()
            found.append(waits(device, shared.train_epoch, 1))
    print(
        f"synchronizing calls of a trial's epoch: {found[0]} alone, without evaluation; {found[1]} over the stage tree"
    )


def waits(device: str, call: Callable[[], Any], times: int) -> int:
    """Return how often calls wait for the device; 0 on a CPU."""
    found = 0
    for _ in range(times):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        found += sum("synchroniz" in str(one.message) for one in said)
    return found


def compiled(device: str, *, tiny: bool) -> None:
    """Print what a stop costs a compiled model."""
    from stopped_steps import resnet18
    from torch._dynamo.utils import counters

    generator, width, count = torch.Generator().manual_seed(0), 8 if tiny else 64, 8 if tiny else 256
    x = torch.randn(count, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (count,), generator=generator).to(device)
    expected: list[float] = []
    for mode in ("eager", "default", "reduce-overhead"):
        model: Any = resnet18(width).to(device)
        settings = Settings(stop_layer_num=(20,), stop_layer_itr=(5,), whole_units=True)
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, model=model, settings=settings, example_inputs=x)
        torch._dynamo.reset()
        counters.clear()
        if mode != "eager":
            assert compile_model(model, mode, torch.device(device))
        took, losses = [], []
        for _ in range(12):
            begun = now(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            took.append(now(device) - begun)
            losses.append(loss.item())
        expected = expected or losses
        differs = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        graphs = counters["stats"]["unique_graphs"]
        print(
            f"compile {mode:<16} first step {took[0]:.2f} s, behind the stop {max(took[6:9]):.2f} s, then "
            f"{1000 * median(took[9:]):.1f} ms; {graphs} graphs; losses within {differs:.1e} of eager",
            flush=True,
        )


def correct(device: str, *, tiny: bool) -> None:
    """Check what has to be equal on this device."""
    from analysis.trace_replay.replay_frame import replay
    from analysis.trace_replay.traces import read_trace
    from tune_cac.tuning.baseline import completed

    epochs, more = 4, {"device": device, "deterministic": True}
    stops = TrialConfig(method="gradskip", epochs=epochs, CAC_STOP_LAYER_NUM=(5,), CAC_STOP_LAYER_ITR=(12,), **more)  # type: ignore[arg-type]
    with TrainingRun(stops) as run, TrainingRun(stops) as again:
        for _ in range(2):
            run.train_epoch()
        still = [p.detach().clone() for p in run.model.parameters() if not p.requires_grad]
        again.load_state_dict(deepcopy(run.state_dict()))
        rows = [[one.train_epoch() for _ in range(2)][-1] for one in (run, again)]
        frozen = [p for p in run.model.parameters() if not p.requires_grad]
        assert still
        assert all(torch.equal(a, b) for a, b in zip(still, frozen, strict=True))
        print(f"stopped weights still: {len(still)} tensors")
        pairs = zip(run.model.state_dict().values(), again.model.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert rows[0]["quality"] == rows[1]["quality"]
        print("a resumed run equals the uninterrupted one, bit for bit")
    with tempfile.TemporaryDirectory() as folder:
        dense = TrialConfig(method="none", epochs=epochs, **more)  # type: ignore[arg-type]
        with SharedRun(dense, Sharing(tree=folder)) as recorded:
            while not recorded.finished:
                recorded.train_epoch()
            trace = completed(recorded.store, read_trace(recorded.store), [stops])
        predicted = float(replay(trace, [stops])["compute_saved"].iloc[0])
    assert predicted == rows[0]["compute_saved"], (predicted, rows[0]["compute_saved"])
    print(f"replayed savings equal executed ones: {predicted:.4f}", flush=True)


def recipe(device: str, *, tiny: bool) -> None:
    """Run the benchmark of the recipe."""
    size = ("--batch-size", "4", "--rounds", "1", "--steps", "1") if tiny else ("--rounds", "3", "--steps", "3")
    script = Path(__file__).with_name("recipe.py")
    subprocess.run([sys.executable, str(script), "--device", device, *size], check=True)


def fine_tuned(images: int = 1_000, px: int = 96, width: int = 64, epochs: int = 6) -> dict[str, Any]:
    """Return a ResNet-18 on enlarged digits: as costly as the fine-tuning of a pretrained one, without its weights."""
    from sklearn.datasets import load_digits
    from transformers import ResNetConfig, ResNetForImageClassification

    data = load_digits()
    inputs = nn.functional.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, size=(px, px))
    samples = TensorDataset(inputs[: images + 600], torch.tensor(data.target)[: images + 600])
    widths = [width * 2**stage for stage in range(4)]
    config = ResNetConfig(
        num_channels=1, embedding_size=width, hidden_sizes=widths, depths=[2] * 4, layer_type="basic", num_labels=10
    )
    return {
        "model": lambda: ResNetForImageClassification(config),
        "train": DataLoader(Subset(samples, range(images)), batch_size=50, shuffle=True),
        "validation": DataLoader(Subset(samples, range(images, images + 300)), batch_size=100),
        "test": DataLoader(Subset(samples, range(images + 300, images + 600)), batch_size=100),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]).logits, batch[1]),
        "evaluate": lambda model, batches, device: float(
            torch.cat([model(x.to(device)).logits.argmax(1) == y.to(device) for x, y in batches]).double().mean()
        ),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=5e-4),
        "epochs": epochs,
    }


def searched(dense: TrialConfig, space: str, trials: int, at_a_time: int, timeout_s: float) -> tuple[float, float]:
    """Return seconds and full trainings of a search of so many trials for a training."""
    import analysis

    options = [word for option in dense.workload_options or () for word in ("--option", option)]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [
            "search", "--space", space, "--workload", dense.workload, "--trials", str(trials), "--epochs",
            str(dense.epochs), "--seeds", "1", "--no-controls", "--name", "study", "--device", dense.device,
            "--concurrency", str(at_a_time), "--gpus-per-trial", str(1 / at_a_time if dense.device == "cuda" else 0),
            *options,
        ]  # fmt: skip
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        subprocess.run(
            [sys.executable, "-m", "tune_cac", *command], cwd=folder, check=True, capture_output=True, env=here,
            timeout=None if timeout_s == float("inf") else timeout_s,
        )  # fmt: skip
        took = time.perf_counter() - begun
        return took, analysis.search_cost(analysis.load(f"{folder}/results/study")).dense_equivalents


def plain_s(config: TrialConfig) -> float:
    """Return the seconds of a training in torch alone, evaluated each epoch."""
    workload = build_for(config)
    torch.manual_seed(0)
    model = workload.make_model().to(config.device)
    optimizer = workload.make_optimizer(model.named_parameters())
    scheduler = workload.make_scheduler(optimizer, workload.steps_per_epoch * config.epochs)
    begun = now(config.device)
    for epoch in range(config.epochs):
        model.train()
        for batch in workload.train_batches(epoch, 0):
            optimizer.zero_grad()
            workload.loss(model, tuple(tensor.to(config.device) for tensor in batch)).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            workload.evaluate(model, "validation", config.device)
    return now(config.device) - begun


def search(device: str, *, tiny: bool, ends_s: float = float("inf")) -> None:
    """Print what searches take over the trainings that they execute; none begins or goes on behind the end."""
    if importlib.util.find_spec("ray") is None:
        print("search: not measured, Ray is not installed")
        return
    for space, dense in (
        ("auto_thresholds", TrialConfig(epochs=3 if tiny else 30)),
        (
            "frozen_prefix",
            TrialConfig(
                workload="gpu:fine_tuned", epochs=2 if tiny else 6,
                workload_options=("images=50", "px=16", "width=8") if tiny else (),
            ),
        ),
    ):  # fmt: skip
        dense = replace(dense, method="none", device=device)
        alone_s = [plain_s(dense) for _ in range(2)][-1]  # the first warms up
        begins_s: float | None = None
        for trials, at_a_time in ((1, 1), *((3 if tiny else 8, n) for n in ((1,) if tiny else (1, 2, 4)))):
            try:
                took, cost = searched(dense, space, trials, at_a_time, max(1.0, ends_s - time.perf_counter()))
            except subprocess.TimeoutExpired:
                print(f"search of {dense.workload}, {trials} trials, {at_a_time} at a time: not measured, time is over")
                break
            if begins_s is None:
                begins_s = took - cost * alone_s
                print(f"search of {dense.workload}, one trial: {took:.1f} s, of which {begins_s:.1f} s to begin")
                continue
            print(
                f"search of {dense.workload}, {trials} trials, {at_a_time} at a time: {took:.1f} s for {cost:.2f} "
                f"trainings of {alone_s:.2f} s in a plain loop: {(took - begins_s) / (cost * alone_s):.2f} times those",
                flush=True,
            )


def main() -> None:
    """Print the parts; a part that fails says so and the others follow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    random.seed(0)
    warnings.filterwarnings("ignore", message="Gradient-Skip (will|may) stop nothing")
    card = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(header("benchmarks/gpu.py"), "|", card, flush=True)
    ends_s = float("inf") if given.tiny else time.perf_counter() + 60 * given.minutes
    does: dict[str, Callable[..., None]] = {
        "steps": steps, "host": host, "sync": sync, "compile": compiled, "correct": correct, "recipe": recipe,
        "search": partial(search, ends_s=ends_s),
    }  # fmt: skip
    failed = []
    for part in given.parts:
        begun = time.perf_counter()
        if begun >= ends_s:
            print(f"{part}: not measured, time is over")
            continue
        try:
            does[part](given.device, tiny=given.tiny)
        except Exception as error:  # noqa: BLE001 - the time on a lent card is short
            failed.append(part)
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
        print(f"({part}: {time.perf_counter() - begun:.0f} s)", flush=True)
        torch.cuda.empty_cache()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
