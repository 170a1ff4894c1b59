"""Check that training repeats bit for bit on this machine, so that a forked run equals an unforked one."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
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

    ``steps`` (>= 2) are at most the run's; None: eight, fewer where that takes long. Return the first difference in
    words; empty where there is none.
    """
    with TrainingRun(config) as run:
        before = _outside_the_state(run.model)
        begun = time.perf_counter()
        _train(run, 1)
        if steps is None:
            affordable = STEPS_BUDGET_S / (2 * max(time.perf_counter() - begun, 1e-6))
            steps = min(MOST_STEPS, max(FEWEST_STEPS, int(affordable)))
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


def _train(run: TrainingRun, steps: int) -> None:
    for _ in islice(run.each_step(), steps):
        run.train_step()
    run.pause()


def _state(run: TrainingRun) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else repr(value)
        for name, value in run.model.state_dict().items()
    }


def _equal(first: Any, second: Any) -> bool:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return bool(first == second)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


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
            value = value.detach().cpu().flatten()
        if isinstance(value, (Tensor, np.ndarray)):
            value = value.tolist()
        elif isinstance(value, np.random.Generator):
            value = value.bit_generator.state
        if _is_plain(value):
            yield name, repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, _NESTED):
        return all(_is_plain(part) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _SIMPLE)


def _two_evaluations(run: TrainingRun) -> list[dict[str, float]]:
    """Return two evaluations of a part of the validation split, or of all of it where that is fast."""

    def evaluated(whole: bool) -> dict[str, float]:
        workload = run.workload
        with torch.no_grad(), kept_generators([run.device]):
            if whole:
                return workload.metrics_on(run.model, "validation", run.device, run.quality.name)
            return workload.named_metrics(workload.evaluate_a_little(run.model, run.device), None)

    run.model.eval()
    begun = time.perf_counter()
    found = [evaluated(whole=False) for _ in range(2)]
    part, took_s = run.workload.little_part, time.perf_counter() - begun
    if found[0] == found[1] and 0 < part < 1 and took_s / part <= EVALUATIONS_BUDGET_S:
        found = [evaluated(whole=True) for _ in range(2)]
    return found
