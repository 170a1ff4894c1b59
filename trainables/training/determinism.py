"""Check that training repeats bit for bit here: where it does, a forked run equals the run alone."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.training.generators import kept_generators
from trainables.training.run import TrainingRun

#: Steps that are trained twice, and the fewest where steps take long.
MOST_STEPS, FEWEST_STEPS = 8, 2
#: What the steps may take together, where the fewest do not take longer.
STEPS_BUDGET_S = 20.0
#: Types of attributes of a module that are compared; tensors are in its state.
_PLAIN = (bool, int, float, str, tuple, list, dict)


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What differed between a run and the same run continued from a checkpoint."""

    tensors: tuple[str, ...] = ()
    """Names of weights and buffers."""
    attributes: tuple[str, ...] = ()
    """Names of attributes of the model, such as a counter, that no checkpoint holds."""
    evaluations: tuple[float, float] | None = None
    """Two evaluations of one model, where they differ."""
    steps: int = 0
    """Steps that were trained twice."""

    @property
    def reason(self) -> str:
        """The first difference in words; empty where there is none."""
        if self.attributes:
            return f"the model keeps {', '.join(self.attributes)} outside of its state_dict()"
        if self.tensors:
            more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
            return f"{self.tensors[0]}{more} came out differently when {self.steps} steps were trained again"
        if self.evaluations:
            first, second = self.evaluations
            return f"two evaluations of one model gave {first:.10g} and {second:.10g}"
        return ""


def repetition(config: TrialConfig, steps: int | None = None) -> Repetition:
    """Train a few steps at once, and again with a checkpoint in the middle; evaluate one model twice.

    Args:
        config: what to train; its device counts.
        steps: optimizer steps, >= 2, at most the run's; None for eight, fewer where that takes long.
    """
    with TrainingRun(config) as run:
        first_s = _train(run, 1)
        if steps is None:
            steps = min(MOST_STEPS, max(FEWEST_STEPS, int(STEPS_BUDGET_S / (2 * max(first_s, 1e-6)))))
        steps = min(steps, run.total_steps)
        _train(run, steps - 1)
        straight, kept = _weights(run), _plain_attributes(run.model)
        evaluations = _two_evaluations(run)
    with TrainingRun(config) as run:
        _train(run, steps // 2)
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
    with TrainingRun(config) as run:
        file.seek(0)
        run.load_state_dict(torch.load(file, weights_only=True, map_location=run.device))
        _train(run, steps - steps // 2)
        forked, attributes = _weights(run), _plain_attributes(run.model)
    return Repetition(
        tensors=tuple(name for name, value in straight.items() if not torch.equal(value, forked[name])),
        attributes=tuple(name for name, value in kept.items() if attributes.get(name) != value),
        evaluations=None if evaluations[0] == evaluations[1] else evaluations,
        steps=steps,
    )


def differing_tensors(config: TrialConfig, steps: int = MOST_STEPS) -> list[str]:
    """Return the names of the weights that differ between a run and the same run continued from a checkpoint.

    Args:
        config: what to train; its device counts.
        steps: optimizer steps, >= 2, at most the run's.
    """
    return list(repetition(config, steps).tensors)


def _train(run: TrainingRun, steps: int) -> float:
    """Train over the ends of epochs without evaluating; seconds."""
    begun = time.perf_counter()
    run.begin_epoch()
    for _ in range(steps):
        if run.epoch_is_trained:
            run.skip_evaluation({"epoch": run.epoch + 1})
            run.begin_epoch()
        run.train_step()
    run.pause()
    return time.perf_counter() - begun


def _weights(run: TrainingRun) -> Mapping[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in run.model.state_dict().items()}


def _plain_attributes(model: nn.Module) -> dict[str, str]:
    """Public attributes of its modules in plain types, as text, by name."""
    return {
        f"{path}.{name}" if path else name: repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and isinstance(value, _PLAIN) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        return all(_is_plain(part) for part in value.values())
    return isinstance(value, (bool, int, float, str))


def _two_evaluations(run: TrainingRun) -> tuple[float, float]:
    run.model.eval()
    found = []
    for _ in range(2):
        with torch.no_grad(), kept_generators([run.device]):
            found.append(run.workload.evaluate_a_little(run.model, run.device))
    return found[0], found[1]
