"""One schedule for each kind of memory that compression has, over the four epochs of the tiny workload.

Its model: convolutions 0, 3, 6 and 9 of 4, 4, 6 and 6 filters, each with batch norm and ReLU, and the linear layer 15.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from runs import Row

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun

EPOCHS = 4
CONVOLUTIONS = ["0.weight", "3.weight", "6.weight", "9.weight"]


def span(kind: str, name: str, start: int, end: int, frequency: int = 1, **args: Any) -> dict[str, Any]:
    """A policy over a range of epochs."""
    instance: dict[str, Any] = {"instance_name": name}
    if args:
        instance["args"] = args
    return {kind: instance, "starting_epoch": start, "ending_epoch": end, "frequency": frequency}


def sections(policies: list[dict[str, Any]], **more: dict[str, Any]) -> dict[str, Any]:
    """A schedule in plain types."""
    return {"version": 1, **more, "policies": policies}


SENSITIVITY = {"class": "SensitivityPruner", "sensitivities": {"*.weight": 0.5}}
AGP = {"class": "AutomatedGradualPruner", "initial_sparsity": 0.1, "final_sparsity": 0.8, "weights": CONVOLUTIONS}


def ranked(name: str, **more: Any) -> dict[str, Any]:
    """A ranking of filters of two layers."""
    share: dict[str, Any] = (
        {"initial_sparsity": 0.2, "final_sparsity": 0.6} if name.endswith("_AGP") else {"desired_sparsity": 0.5}
    )
    return {"class": name, "group_type": "Filters", "weights": ["3.weight", "6.weight"], **share, **more}


#: By name; plain types.
SCHEDULES: dict[str, dict[str, Any]] = {
    "sensitivity": sections([span("pruner", "p", 1, 4, 2)], pruners={"p": SENSITIVITY}),
    "agp": sections([span("pruner", "p", 1, 4)], pruners={"p": AGP}),
    "splicing": sections(
        [span("pruner", "p", 1, 4, use_double_copies=True, mini_batch_pruning_frequency=3, keep_mask=True)],
        pruners={"p": {"class": "SplicingPruner", "sensitivities": {"*.weight": 0.1}, "low_thresh_mult": 0.7,
                       "hi_thresh_mult": 0.9, "sensitivity_multiplier": 0.2}},
    ),
    "forward only": sections(
        [span("pruner", "p", 1, 3, mask_on_forward_only=True, mask_gradients=True, skip_first_minibatch=True)],
        pruners={"p": SENSITIVITY},
    ),
    "discarded": sections(
        [span("pruner", "p", 1, 3, use_double_copies=True, discard_masks_at_minibatch_end=True,
              mini_batch_pruning_frequency=1)],
        pruners={"p": SENSITIVITY},
    ),
    "leader": sections(
        [span("pruner", "p", 1, 3)],
        pruners={"p": ranked("L1RankedStructureParameterPruner_AGP", weights=["6.weight", "9.weight"],
                             group_dependency="Leader", noise=0.5)},
    ),
    "blocks and random levels": sections(
        [span("pruner", "b", 1, 3), span("pruner", "r", 0, 4)],
        pruners={
            "b": ranked("L2RankedStructureParameterPruner", group_type="Blocks", weights=["6.weight"],
                        kwargs={"block_shape": [2, 2, 1, 1]}),
            "r": {"class": "RandomLevelStructureParameterPruner", "group_type": "Filters", "weights": ["3.weight"],
                  "sparsity_range": [0.2, 0.8]},
        },
    ),
    "activations": sections(
        [span("pruner", "a", 2, 4), span("pruner", "m", 1, 4, 2)],
        pruners={"a": ranked("ActivationAPoZRankedFilterPruner_AGP"),
                 "m": ranked("ActivationMeanRankedFilterPruner", weights=["9.weight"])},
    ),
    "gradients": sections([span("pruner", "p", 2, 4)], pruners={"p": ranked("GradientRankedFilterPruner_AGP")}),
    "random filters": sections(
        [span("pruner", "p", 1, 4), span("pruner", "b", 2, 4, mini_batch_pruning_frequency=2, use_double_copies=True)],
        pruners={"p": ranked("RandomRankedFilterPruner", weights=["3.weight"]),
                 "b": ranked("BernoulliFilterPruner", weights=["6.weight"])},
    ),
    "folded norms": sections(
        [span("pruner", "p", 1, 4, 2, fold_batchnorm=True)],
        pruners={"p": ranked("L1RankedStructureParameterPruner")},
    ),
    "regularizers": sections(
        [span("regularizer", "l1", 0, 3, keep_mask=True), span("regularizer", "lasso", 1, 4),
         span("regularizer", "variance", 2, 4)],
        regularizers={
            "l1": {"class": "L1Regularizer", "reg_regims": {"0.weight": 0.01}, "threshold_criteria": "Max"},
            "lasso": {"class": "GroupLassoRegularizer", "reg_regims": {"3.weight": [0.05, "Filters"]},
                      "threshold_criteria": "Mean_Abs"},
            "variance": {"class": "GroupVarianceRegularizer", "reg_regims": {"6.weight": [1e-4, "Filters"]}},
        },
    ),
    "dorefa": sections(
        [span("quantizer", "q", 1, 4), span("pruner", "p", 2, 4)],
        quantizers={"q": {"class": "DorefaQuantizer", "bits_weights": 3, "bits_activations": 4}},
        pruners={"p": SENSITIVITY},
    ),
    "pact": sections(
        [span("quantizer", "q", 1, 4), span("lr_scheduler", "l", 0, 4)],
        quantizers={"q": {"class": "PACTQuantizer", "bits_weights": 4, "bits_activations": 4}},
        lr_schedulers={"l": {"class": "ExponentialLR", "gamma": 0.8}},
    ),
    "linear training": sections(
        [span("pruner", "p", 0, 4), span("quantizer", "q", 2, 4)],
        quantizers={"q": {"class": "QuantAwareTrainRangeLinearQuantizer", "bits_activations": 6, "bits_weights": 4,
                          "ema_decay": 0.9}},
        pruners={"p": AGP},
    ),
    "post-training": sections(
        [span("quantizer", "q", 2, 3)],
        quantizers={"q": {"class": "PostTrainLinearQuantizer", "bits_activations": 6, "bits_parameters": 6,
                          "clip_acts": "N_STD", "clip_n_stds": 2.0}},
    ),
    "learning rates": sections(
        [span("lr_scheduler", "plateau", 0, 2), span("lr_scheduler", "steps", 2, 3), span("lr_scheduler", "poly", 3, 4),
         span("pruner", "p", 3, 4)],
        lr_schedulers={
            "plateau": {"class": "ReduceLROnPlateau", "patience": 0, "factor": 0.5, "mode": "max"},
            "steps": {"class": "MultiStepMultiGammaLR", "milestones": [1, 3], "gammas": [0.5, 0.1]},
            "poly": {"class": "PolynomialLR", "T_max": 8, "power": 2},
        },
        pruners={"p": SENSITIVITY},
    ),
    "thinning": sections(
        [span("pruner", "p", 1, 2), span("pruner", "e", 0, 4), span("extension", "x", 1, 2)],
        pruners={"p": ranked("L1RankedStructureParameterPruner"),
                 "e": {"class": "SparsityLevelParameterPruner", "levels": {"9.weight": 0.3, "6.weight": 0.3}}},
        extensions={"x": {"class": "FilterRemover"}},
    ),
    "looking while thinned": sections(
        [span("pruner", "p", 1, 4), span("extension", "x", 1, 4)],
        pruners={"p": ranked("ActivationAPoZRankedFilterPruner_AGP")},
        extensions={"x": {"class": "FilterRemover"}},
    ),
}  # fmt: skip


def distilled(checkpoint: Path) -> dict[str, Any]:
    """A teacher's weights from a file, and pruning beside."""
    return sections(
        [span("distiller", "d", 1, 3), span("pruner", "p", 2, 4)],
        distillers={"d": {"class": "KnowledgeDistillation", "checkpoint": str(checkpoint), "temperature": 3.0,
                          "distill_weight": 0.7, "student_weight": 0.3}},
        pruners={"p": AGP},
    )  # fmt: skip


def text(schedule: dict[str, Any]) -> str:
    """As YAML."""
    return str(yaml.safe_dump(schedule, sort_keys=False))


@cache
def trained_alone(
    config: TrialConfig, cuts: tuple[int, ...] = ()
) -> tuple[list[Row], dict[str, torch.Tensor], dict[int, bytes]]:
    """Rows and weights of a run, and its states before these steps, as they are saved."""
    states = {}
    with TrainingRun(config) as run:
        rows = []
        while not run.finished:
            run.begin_epoch()
            while not run.epoch_is_trained:
                if run.step in cuts:
                    file = io.BytesIO()
                    torch.save(run.state_dict(), file)
                    states[run.step] = file.getvalue()
                run.train_step()
            rows.append(run.end_epoch())
        return rows, {name: value.clone() for name, value in run.model.state_dict().items()}, states
