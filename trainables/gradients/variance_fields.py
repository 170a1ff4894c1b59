"""Hyperparameters of the methods that change a gradient's variance, as fields of a configuration. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: What importance sampling draws by.
IMPORTANCE_SCORES = ("loss", "output_gradient", "gradient")
#: From which labels K-FAC's factors are measured: drawn from the model's own distribution, or the batch's.
FISHERS = ("sampled", "empirical")
#: How clusters of gradients are found: passes over all samples, or from the batches that are trained.
CLUSTER_MODES = ("full", "online")


@dataclass(frozen=True, kw_only=True)
class VarianceFields:
    """Fields of the methods of `VARIANCE_METHODS`; None: the method's default."""

    svrg_alpha: float | None = None
    """svrg: coefficient of the control variate, in [0, 1]; 0 is SGD."""
    svrg_alpha_decays: bool | None = None
    """svrg: True if the coefficient falls linearly to 0 over the run."""
    svrg_snapshot_every: int | None = None
    """svrg: steps from one snapshot, a pass over the data, to the next, >= 1."""
    kfac_damping: float | None = None
    """kfac: added to the eigenvalues of the curvature, above 0."""
    kfac_kl_clip: float | None = None
    """kfac: bound on the KL divergence of a step, above 0."""
    kfac_decay: float | None = None
    """kfac: decay of the factors' moving averages, in [0, 1)."""
    kfac_factor_every: int | None = None
    """kfac: steps from one measurement of the factors to the next, >= 1."""
    kfac_inverse_every: int | None = None
    """kfac: steps from one eigendecomposition to the next, >= 1."""
    kfac_fisher: str | None = None
    """kfac: labels of the factors, `FISHERS`."""
    cluster_count: int | None = None
    """gradient_clustering: K, the clusters, >= 1."""
    cluster_mode: str | None = None
    """gradient_clustering: `CLUSTER_MODES`."""
    cluster_every: int | None = None
    """gradient_clustering: steps from one update of the clusters to the next, >= 1."""
    cluster_iterations: int | None = None
    """gradient_clustering: passes over the data of a full update, >= 1."""
    cluster_decay: float | None = None
    """gradient_clustering: decay of the centres in online mode, in [0, 1)."""
    kept_samples: int | None = None
    """gradient_clustering, importance_sampling, svrg: most samples that are kept of data without numbers, >= 1."""
    importance_by: str | None = None
    """importance_sampling: `IMPORTANCE_SCORES`."""
    importance_uniform: float | None = None
    """importance_sampling: share of the probability that is spread evenly, in (0, 1]."""
    importance_update_every: int | None = None
    """importance_sampling: steps from one update of the probabilities to the next, >= 1."""
    zero_threshold: float | None = None
    """zero_gradients: norm of a sample's output gradient below which it is left out, above 0."""
    zero_unbiased: bool | None = None
    """zero_gradients: True keeps some of those samples with a larger weight."""


#: Fields and values where they are None, by method; their options are the fields without the method's prefix.
VARIANCE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "svrg": {
        "gradient_start_itr": 0,
        "svrg_alpha": 1.0,
        "svrg_alpha_decays": False,
        "svrg_snapshot_every": 100,
        "kept_samples": 5000,
    },
    "kfac": {
        "gradient_start_itr": 0,
        "kfac_damping": 1e-3,
        "kfac_kl_clip": 1e-2,
        "kfac_decay": 0.95,
        "kfac_factor_every": 10,
        "kfac_inverse_every": 100,
        "kfac_fisher": "sampled",
    },
    "gradient_clustering": {
        "gradient_start_itr": 0,
        "cluster_count": 10,
        "cluster_mode": "full",
        "cluster_every": 100,
        "cluster_iterations": 3,
        "cluster_decay": 0.99,
        "kept_samples": 5000,
    },
    "importance_sampling": {
        "gradient_start_itr": 0,
        "importance_by": "loss",
        "importance_uniform": 0.5,
        "importance_update_every": 10,
        "kept_samples": 5000,
    },
    "zero_gradients": {"gradient_start_itr": 0, "zero_threshold": 0.01, "zero_unbiased": False},
}
#: Methods that change a gradient's variance.
VARIANCE_METHODS = tuple(VARIANCE_DEFAULTS)
