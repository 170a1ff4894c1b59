"""Check that training repeats bit for bit on this machine, so that a forked run equals an unforked one."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.runtime.isolation import kept_generators
from trainables.training.run import TrainingRun

#: Most steps that are trained twice, and the fewest where steps take long.
MOST_STEPS, FEWEST_STEPS = 8, 2
#: Time limit for all steps; `FEWEST_STEPS` are trained even if they exceed it.
STEPS_BUDGET_S = 20.0
#: Time limit for evaluating the whole validation split twice.
EVALUATIONS_BUDGET_S = 10.0
#: Types of the values outside a model's state that are compared, and containers in which they may be nested.
_SIMPLE = (bool, int, float, str, np.generic, itertools.count, type(None))
_NESTED = (tuple, list, dict)
#: Attributes of every module.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def why_not_repeatable(config: TrialConfig, steps: int | None = None) -> str:
    """Train a few steps without a break and again with a checkpoint in the middle; evaluate one model twice.

    Args:
        config: what to train, and on which device.
        steps: optimizer steps, >= 2, at most the run's; None for eight, fewer where that takes long.

    Returns:
        The first difference in words; empty where there is none.
    """
    with TrainingRun(config) as run:
        before = _outside_the_state(run.model)
        first_s = _train(run, 1)
        if steps is None:
            steps = min(MOST_STEPS, max(FEWEST_STEPS, int(STEPS_BUDGET_S / (2 * max(first_s, 1e-6)))))
        steps = min(steps, run.total_steps)
        _train(run, steps - 1)
        straight, kept = _state(run), _outside_the_state(run.model)
        first, second = _two_evaluations(run)
    with TrainingRun(config) as run:
        _train(run, steps // 2)
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
    with TrainingRun(config) as run:
        file.seek(0)
        run.load_state_dict(torch.load(file, weights_only=True, map_location=run.device))
        _train(run, steps - steps // 2)
        forked, attributes = _state(run), _outside_the_state(run.model)
    # Attributes of the model, its classes and their modules, such as a counter, that training changes.
    lost = [name for name, text in kept.items() if text not in (before.get(name), attributes.get(name))]
    if lost:
        return f"the model keeps {', '.join(lost)} outside of its state_dict()"
    changed = [name for name, value in straight.items() if not _equal(value, forked[name])]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{changed[0]}{more} came out differently when {steps} steps were trained again"
    for name, value in first.items():
        if repr(value) != repr(second.get(name)):  # NaN twice is the same
            return f"two evaluations of one model gave {value:.10g} and {second[name]:.10g}"
    return ""


def _train(run: TrainingRun, steps: int) -> float:
    """Train steps across epoch ends without evaluating, and return the seconds taken."""
    begun = time.perf_counter()
    run.begin_epoch()
    for _ in range(steps):
        if run.epoch_is_trained:
            run.skip_evaluation({"epoch": run.epoch + 1})
            run.begin_epoch()
        run.train_step()
    run.pause()
    return time.perf_counter() - begun


def _state(run: TrainingRun) -> Mapping[str, Any]:
    """Return weights, buffers and any extra state of modules."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else repr(value)
        for name, value in run.model.state_dict().items()
    }


def _equal(first: Any, second: Any) -> bool:
    """Return whether two values of `_state` are equal; NaN equals NaN."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _outside_the_state(model: nn.Module) -> dict[str, str]:
    """Return values outside the state in which a model's code could count, as text, by name.

    These are attributes of its modules and of their classes, and single values in the Python modules that define them.
    """
    found: dict[str, str] = {}
    sources = set()
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        found |= {f"{path}.{name}" if path else name: text for name, text in _texts(own)}
        for kind in type(module).__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                sources.add(kind.__module__)
                found |= {f"{kind.__name__}.{name}": text for name, text in _texts(vars(kind))}
    for source in sources & set(sys.modules):
        single = {name: value for name, value in vars(sys.modules[source]).items() if isinstance(value, _SIMPLE)}
        found |= {f"{source}.{name}": text for name, text in _texts(single)}
    return found


def _texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name.startswith("__"):
            continue
        if isinstance(value, Tensor):
            yield name, repr(value.detach().cpu().flatten().tolist())
        elif isinstance(value, np.ndarray):
            yield name, repr(value.tolist())
        elif isinstance(value, np.random.Generator):
            yield name, repr(value.bit_generator.state)
        elif _is_plain(value):
            yield name, repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, _NESTED):
        return all(_is_plain(part) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _SIMPLE)


def _two_evaluations(run: TrainingRun) -> tuple[dict[str, float], dict[str, float]]:
    """Return two evaluations of a part of the validation split, or of all of it where that is fast."""
    run.model.eval()
    begun = time.perf_counter()
    first, second = (_evaluated(run, a_little=True) for _ in range(2))
    part, took_s = run.workload.little_part, time.perf_counter() - begun
    if first != second or not 0 < part < 1 or took_s / part > EVALUATIONS_BUDGET_S:
        return first, second
    return _evaluated(run), _evaluated(run)


def _evaluated(run: TrainingRun, *, a_little: bool = False) -> dict[str, float]:
    with torch.no_grad(), kept_generators([run.device]):
        if a_little:
            found = run.workload.evaluate_a_little(run.model, run.device)
            return run.workload.named_metrics(found, None)
        return run.workload.metrics_on(run.model, "validation", run.device, run.quality.name)
