"""Methods that change a gradient's variance, as methods of a trial."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.attachment import EstimateFlops, RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients.fields import KEPT_SAMPLES, VARIANCE_DEFAULTS, estimator_in, options_of
from trainables.gradients.gradient_clustering import GradientClustering
from trainables.gradients.gradient_method import Draw, GradientMethod
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.kfac import KFAC, check_treatable
from trainables.gradients.layer_signals import check_some, treatable_layers
from trainables.gradients.straight_through_directions import SwitchedOn
from trainables.gradients.svrg import SVRG
from trainables.gradients.zero_gradients import ZeroGradients
from trainables.runtime.isolation import captured_generators
from trainables.workloads.base import Batch, Samples
from trainables.workloads.sample_access import TensorSamples, reservoir

_CLASSES: dict[str, type[GradientMethod]] = {
    method.name: method for method in (SVRG, KFAC, GradientClustering, ImportanceSampling, ZeroGradients)
}


class AttachedGradientMethod(SwitchedOn):
    """A gradient method attached to one training run.

    It is built in its first step, so that nothing is spent before. Data without numbers are kept in a reservoir, one
    epoch's samples at most, which is filled anew before a method passes over all samples.
    """

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(config)
        name = estimator_in(config.method)
        assert name is not None
        self._name, self._optimizer, self._run, self._seed = name, optimizer, run, config.seed
        self._class = _CLASSES[name]
        self._epoch = self._filled = 0
        self._method: GradientMethod | None = None
        self._draw: Draw | None = None
        self._rows: AbstractContextManager[Any] = nullcontext()
        if config.forward_cache_mb and self._class.chooses_samples:
            raise UserError(
                f"method {name} chooses the samples of a step, which a forward cache would not know, got "
                f"forward_cache_mb={config.forward_cache_mb}: leave it out"
            )
        with _said_before_the_search():
            check_model(name, run.model)

    def gradient_method(self) -> GradientMethod | None:
        return self._method

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self._epoch = epoch

    def batch(self, batch: Batch) -> Batch:
        self._draw = None
        if not self.is_on:
            return batch
        method = self._built(self._epoch, len(batch[0]))
        method.iteration = self._iteration
        if self._run.samples is None and method.is_about_to_pass and self._filled != self._epoch:
            method.data = self._kept(self._epoch)
            self._filled = self._epoch
        method.refresh()
        if self._class.chooses_samples:
            usual, method.batch_size = method.batch_size, len(batch[0])
            self._draw = method.draw(method.generator())
            method.batch_size = usual
        else:
            self._draw = Draw(batch=batch, randomness=captured_generators(method.device))
        return self._draw.batch

    def forward_pass(self) -> AbstractContextManager[Any]:
        if self._draw is None or self._method is None:
            return nullcontext()
        self._rows = self._method.rows(self._draw)
        return self._rows

    def estimate(self, loss: Callable[[nn.Module], Tensor], batch: Batch) -> EstimateFlops | None:
        method, draw = self._method, self._draw
        if draw is None or method is None:
            return None
        method.observe(draw, self._rows)
        if type(method).adjust is not GradientMethod.adjust:
            method.set_gradients(method.adjust(method.gradients(), draw))
        self._draw, self._rows = None, nullcontext()
        # Every parameter that trains takes part in the loop's own backward pass.
        return replace(method.meter.take(), all_trained=False)

    def _built(self, epoch: int, batch_size: int) -> GradientMethod:
        if self._method is not None:
            return self._method
        assert self._run.loss is not None, "a run of a workload has its loss"
        data: Samples = self._run.samples
        if data is None:
            data = self._kept(epoch)
            self._filled = epoch
        options = options_of(self._name, self.settings, self._run.total_steps)
        if options.get("clusters", 0) > data.count:
            warnings.warn(
                f"cluster_count must be at most the {data.count} samples there are, got {options['clusters']}: each "
                "sample is a cluster of its own",
                stacklevel=2,
            )
            options["clusters"] = data.count
        with _said_before_the_search():
            self._method = self._class(
                self._run.model,
                self._run.loss,
                data,
                self._optimizer,
                batch_size=min(batch_size, data.count),
                seed=self._seed,
                **options,
            )
        return self._method

    def _kept(self, epoch: int) -> TensorSamples:
        """Return the samples of an epoch, as many as may be kept."""
        assert self._run.epoch_batches is not None
        most = int(self.settings.get("kept_samples", 1))  # the others only train the loop's own batches
        return reservoir(self._run.epoch_batches(epoch), most=most, seed=self._seed)

    def measured(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if isinstance(self._method, ImportanceSampling):
            found["effective_samples"] = self._method.effective_share()
        if isinstance(self._method, GradientClustering) and self._iteration >= self._run.total_steps:
            self._run.model.train()
            clusters = [asdict(cluster) for cluster in self._method.inspect()]
            found["gradient_clusters"] = json.dumps(clusters)
        return found

    def training_state(self) -> dict[str, Any]:
        if self._method is None:
            return {}
        state = {"state": self._method.state_dict(), "batch_size": self._method.batch_size, "epoch": self._filled}
        return {"gradient_method": state}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        super().resume(decision_state, training_state)
        kept = training_state.get("gradient_method")
        if kept is not None:
            self._method = None
            self._built(int(kept["epoch"]), int(kept["batch_size"])).load_state_dict(kept["state"])


@contextmanager
def _said_before_the_search() -> Iterator[None]:
    """Leave out the warning of layers that K-FAC does not treat, which every trial would repeat."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="K-FAC treats")
        yield


def check_model(method: str, model: nn.Module) -> None:
    """Raise UserError for a model that no configuration of the method can train."""
    if method == "kfac":
        check_treatable(model)
    if method == "gradient_clustering":
        check_some(treatable_layers(model), method, model)


def warn_of_run(method: str, samples: Samples | None) -> None:
    """Warn of samples without numbers, of which the method knows some only.

    Args:
        method: that changes a gradient's variance.
        samples: of the workload.
    """
    if samples is None and "kept_samples" in VARIANCE_DEFAULTS[method]:
        warnings.warn(
            f"the workload's training samples have no numbers, so {method} chooses among a reservoir of "
            f"kept_samples of an epoch ({KEPT_SAMPLES} unless set), filled anew before each pass over them",
            stacklevel=3,
        )


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> AttachedGradientMethod:
    """Attach the configuration's method.

    Raises:
        UserError: a model that it cannot treat, or a forward cache beside a method that chooses samples.
    """
    return AttachedGradientMethod(optimizer, config, run)
